"""Conversions killed, starved or misused: a clear error, nothing lost, and the same files in the end."""

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from checkpoint_folders import EXPERT, contents, replace_tensor, shard_of
from convert_runs import (
    assert_nothing_partial,
    assert_same,
    finish,
    manifest,
    staging,
    start,
    wait_for,
)

from kimi_bridge.checkpoint import (
    CheckpointReader,
    dequantize_checkpoint,
    quantize_checkpoint,
    synthesize_checkpoint,
    truncate_checkpoint,
)
from kimi_bridge.checkpoint import convert as convert_module
from kimi_bridge.checkpoint.convert_plan import plan_dequantize
from kimi_bridge.checkpoint.convert_pool import LocalWorkers
from kimi_bridge.checkpoint.convert_staging import Staging
from kimi_bridge.conversion.jobs import Piece
from kimi_bridge.errors import CheckpointError

WIDE = {"hidden_size": 512, "moe_intermediate_size": 256, "n_routed_experts": 16}
SIZE = "1MB"


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """25 MB of bf16 experts, in enough shards to take a while."""
    return synthesize_checkpoint(tmp_path_factory.mktemp("medium") / "int4", overrides=WIDE)


@pytest.fixture(scope="module")
def expected(medium: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    dst = tmp_path_factory.mktemp("expected") / "bf16"
    dequantize_checkpoint(medium, dst, max_shard_size=SIZE)
    return contents(dst)


def finished(dst: Path) -> list[Path]:
    return [*staging(dst).glob("*.safetensors"), *dst.glob("*.safetensors")]


def test_killed_at_20_moments(medium: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    moments = random.Random(0)
    kills = runs = resumed = 0
    while kills < 20:
        dst = tmp_path / f"run{runs}"
        runs += 1
        # A few kills of each run, and then to the end.
        for _ in range(4):
            process = start(dequantize_checkpoint, medium, dst, max_shard_size=SIZE)
            shards = moments.randrange(len(expected))
            wait_for(lambda: len(finished(dst)) >= shards or not process.is_alive())  # noqa: B023
            process.join(moments.uniform(0, 0.05))
            process.kill()
            process.join()
            kills += process.exitcode == -signal.SIGKILL
            assert_nothing_partial(dst, expected)
            if process.exitcode == 0:
                break
            resumed += bool(finished(dst))
        else:
            finish(dequantize_checkpoint, medium, dst, max_shard_size=SIZE)
        assert_same(dst, expected)
        shutil.rmtree(dst)
    assert resumed > 5


def test_what_is_finished_is_not_made_again(medium: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    dst = tmp_path / "out"
    process = start(dequantize_checkpoint, medium, dst, max_shard_size=SIZE)
    wait_for(lambda: len(list(staging(dst).glob("*.safetensors"))) > 5)
    process.kill()
    process.join()
    done = set(manifest(dst)["shards"])
    stamps = {name: (staging(dst) / name).stat().st_ino for name in done}
    assert 5 <= len(done) < len(expected)
    summary = dequantize_checkpoint(medium, dst, max_shard_size=SIZE)
    assert summary.resumed_shards == len(done)
    assert {name: (dst / name).stat().st_ino for name in done} == stamps
    assert_same(dst, expected)
    assert (summary.groups, summary.int4_weights) == (2 * 16 * 3 * 512 * 256 // 32, 96)


def test_a_repaired_source_is_read_again(medium: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    src = Path(shutil.copytree(medium, tmp_path / "src"))
    dst = tmp_path / "out"
    process = start(dequantize_checkpoint, src, dst, max_shard_size=SIZE)
    wait_for(lambda: len(list(staging(dst).glob("*.safetensors"))) > 5)
    process.kill()
    process.join()
    first = sorted(src.glob("*.safetensors"))[0]
    os.utime(first)
    summary = dequantize_checkpoint(src, dst, max_shard_size=SIZE)
    assert summary.resumed_shards < 5
    assert_same(dst, expected, same_source=False)


def test_a_kill_while_publishing(medium: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    """The state between two renames, made by hand: a kill hardly ever hits it."""
    plan = plan_dequantize(medium, SIZE)
    dst = tmp_path / "out"
    keeper = Staging(dst, plan, True, False)
    convert_module._fill(plan, keeper, list(plan.shards), convert_module.Findings(), options())
    keeper._publishing = True
    keeper._write_manifest()
    for filename in list(plan.shards)[:7]:
        (staging(dst) / filename).replace(dst / filename)
    keeper.close()
    assert dequantize_checkpoint(medium, dst, max_shard_size=SIZE).resumed_shards == len(plan.shards)
    assert_same(dst, expected)


def options() -> convert_module.Options:
    return convert_module.Options(1, None, True, False, False, None)


def test_a_worker_that_dies(
    medium: Path, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_module, "_PIECE_BYTES", 1 << 18)
    plan = plan_dequantize(medium, SIZE)
    keeper = Staging(tmp_path / "out", plan, True, False)
    with LocalWorkers(2) as workers:
        pieces = convert_module._OpenShards(plan, keeper, list(plan.shards), workers, True)
        (process,) = workers._processes

        def killing() -> Iterator[Piece]:
            wait_for(lambda: process._ready)
            for number, piece in enumerate(pieces.pieces()):
                if number == 30:
                    os.kill(process.pid, signal.SIGKILL)
                yield piece

        def run() -> None:
            for reply in workers.run(killing()):
                if (complete := pieces.take(reply)) is not None:
                    keeper.finish(reply.shard, complete, sealed=False)

        with pytest.raises(
            CheckpointError, match=r"A worker died at .*SIGKILL: the system ran out of memory"
        ):
            run()
    keeper.close()
    summary = dequantize_checkpoint(medium, tmp_path / "out", max_shard_size=SIZE)
    assert summary.resumed_shards > 0
    assert_same(tmp_path / "out", expected)


def test_workers_end_with_their_caller(medium: Path, tmp_path: Path) -> None:
    process = start(hold_a_worker, tmp_path / "pid")
    wait_for((tmp_path / "pid").exists)
    time.sleep(0.1)
    pid = int((tmp_path / "pid").read_text())
    process.kill()
    process.join()
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text())


def hold_a_worker(path: Path) -> None:
    workers = LocalWorkers(2)
    (process,) = workers._processes
    process.start()
    path.write_text(str(process.pid))
    time.sleep(60)


def test_ctrl_c(medium: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    dst = tmp_path / "out"
    process = start(dequantize_and_say, medium, dst, tmp_path / "said")
    wait_for(lambda: len(list(staging(dst).glob("*.safetensors"))) > 3)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join(30)
    assert (tmp_path / "said").read_text() == "KeyboardInterrupt"
    assert_nothing_partial(dst, expected)
    assert dequantize_checkpoint(medium, dst, max_shard_size=SIZE).resumed_shards > 3
    assert_same(dst, expected)


def dequantize_and_say(src: Path, dst: Path, said: Path) -> None:
    # The fork server ignores SIGINT, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        dequantize_checkpoint(src, dst, max_shard_size=SIZE)
    except BaseException as error:
        said.write_text(type(error).__name__)


def test_disk_full(medium: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=60m", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        plan = plan_dequantize(medium, SIZE)
        keeper = Staging(disk / "out", plan, True, False)
        # Somebody else's file, after the look at what is free.
        with (disk / "filler").open("wb", buffering=0) as file:
            with suppress(OSError):
                while True:
                    file.write(bytes(1 << 20))
            file.truncate(file.tell() - (8 << 20))
        with pytest.raises(
            CheckpointError, match=r"No space left on device; make room.* run the same command"
        ):
            convert_module._fill(plan, keeper, list(plan.shards), convert_module.Findings(), options())
        keeper.close()
        assert_nothing_partial(disk / "out", expected)
        with pytest.raises(CheckpointError, match="bytes free, but the conversion needs"):
            dequantize_checkpoint(medium, disk / "out", max_shard_size=SIZE)
        (disk / "filler").unlink()
        dequantize_checkpoint(medium, disk / "out", max_shard_size=SIZE)
        assert_same(disk / "out", expected)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_file_size_limit(tiny: Path, tmp_path: Path) -> None:
    process = start(limited, tiny, tmp_path / "out", tmp_path / "said")
    process.join(60)
    assert "File too large; make room" in (tmp_path / "said").read_text()
    assert not (tmp_path / "out").exists()


def limited(src: Path, dst: Path, said: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    try:
        dequantize_checkpoint(src, dst)
    except CheckpointError as error:
        said.write_text(str(error))


@pytest.mark.parametrize("damage", ["truncated", "input/output error", "gone"])
def test_a_source_that_fails_on_the_way(tiny: Path, tmp_path: Path, damage: str) -> None:
    """Sound when the plan is made, broken afterwards; repaired, the run goes on."""
    src, dst = Path(shutil.copytree(tiny, tmp_path / "src")), tmp_path / "out"
    plan = plan_dequantize(src, "200KB")
    last = sorted(src.glob("*.safetensors"))[-1]
    kept = last.rename(tmp_path / "kept")
    if damage == "truncated":
        shutil.copy(kept, last)
        os.truncate(last, kept.stat().st_size - 100_000)
    elif damage == "input/output error":
        # Reading where nothing is mapped gives the same EIO as a broken disk.
        last.symlink_to("/proc/self/mem")
    message = {"truncated": "is truncated: it ends at", "gone": "cannot be read .No such file"}.get(
        damage, "cannot be read .Input/output error"
    )
    with pytest.raises(CheckpointError, match=f"{last.name} {message}.*run the same command again"):
        convert_module.run_plan(plan, dst, options())
    assert len(manifest(dst)["shards"]) > 3
    assert [path.name for path in dst.iterdir()] == [".unfinished-conversion"]
    last.unlink(missing_ok=True)
    kept.rename(last)
    summary = dequantize_checkpoint(src, dst, max_shard_size="200KB")
    assert summary.resumed_shards > 3
    dequantize_checkpoint(tiny, tmp_path / "expected", max_shard_size="200KB")
    assert_same(dst, contents(tmp_path / "expected"), same_source=False)


def test_a_truncated_source_is_refused_at_once(spoiled: Path, tmp_path: Path) -> None:
    shard = shard_of(spoiled, EXPERT + "_packed")
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"{shard.name} is truncated"):
        dequantize_checkpoint(spoiled, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("part", "message"), [("_scale", "scales hold NaN or Inf"), ("_shape", "weight_shape holds")]
)
def test_damaged_int4(spoiled: Path, tmp_path: Path, part: str, message: str) -> None:
    tensor = CheckpointReader(spoiled).tensor(EXPERT + part).clone()
    tensor.view(-1)[0] = float("nan") if part == "_scale" else 5
    replace_tensor(spoiled, EXPERT + part, tensor)
    for number, job in enumerate((dequantize_checkpoint, lambda a, b: truncate_checkpoint(a, b, 3))):
        with pytest.raises(CheckpointError, match=f"{EXPERT}: .*{message}"):
            job(spoiled, tmp_path / f"out{number}")
        assert not (tmp_path / f"out{number}").exists()


def test_nan_in_a_plain_weight(checkpoints: Path, tmp_path: Path) -> None:
    src = Path(shutil.copytree(checkpoints / "kimi_bf16", tmp_path / "src"))
    weight = CheckpointReader(src).tensor(EXPERT).clone()
    weight[3, 3] = float("inf")
    replace_tensor(src, EXPERT, weight)
    with pytest.raises(CheckpointError, match=f"{EXPERT}, rows .*holds NaN or Inf, first in row 3"):
        quantize_checkpoint(src, tmp_path / "out")


def test_a_triplet_over_two_shards(tiny: Path, tmp_path: Path) -> None:
    reader = CheckpointReader(tiny)
    apart = [
        name
        for name, int4 in reader.weights().items()
        if int4 and len({reader.info(name + part).filename for part in ("_packed", "_scale", "_shape")}) > 1
    ]
    assert apart
    dequantize_checkpoint(tiny, tmp_path / "out")
    for name in apart:
        assert torch.equal(CheckpointReader(tmp_path / "out").tensor(name), reader.weight(name))
