"""Conversions with settings or folders that cannot be: refused, and nothing of what is there is lost."""

import os
from pathlib import Path

import pytest
from checkpoint_folders import EXPERT, contents, edit_json, remove_tensor
from convert_runs import (
    assert_same,
    staging,
)

from kimi_bridge.checkpoint import convert as convert_module
from kimi_bridge.checkpoint import (
    dequantize_checkpoint,
    quantize_checkpoint,
    synthesize_checkpoint,
    truncate_checkpoint,
)
from kimi_bridge.checkpoint.convert_plan import plan_dequantize
from kimi_bridge.checkpoint.convert_pool import LocalWorkers
from kimi_bridge.checkpoint.convert_staging import Staging
from kimi_bridge.conversion.execute import answer
from kimi_bridge.errors import CheckpointError


def options() -> convert_module.Options:
    return convert_module.Options(1, None, True, False, False, None)


def test_other_settings_are_refused(tiny: Path, checkpoints: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out"
    plan = plan_dequantize(tiny, "200KB")
    keeper = Staging(dst, plan, True, False)
    convert_module._fill(plan, keeper, list(plan.shards)[:4], convert_module.Findings(), options())
    with pytest.raises(CheckpointError, match="Another process is writing to"):
        dequantize_checkpoint(tiny, dst, max_shard_size="200KB")
    keeper.close()
    before = contents(dst)
    for difference, job in (
        (
            "max_shard_size '200KB', now '300KB'",
            lambda: dequantize_checkpoint(tiny, dst, max_shard_size="300KB"),
        ),
        (
            "source .*kimi, now .*rtn",
            lambda: dequantize_checkpoint(checkpoints / "rtn", dst, max_shard_size="200KB"),
        ),
        (
            "verb 'dequantize', now 'truncate'",
            lambda: truncate_checkpoint(tiny, dst, 2, max_shard_size="200KB"),
        ),
        (
            "verify True, now False",
            lambda: dequantize_checkpoint(tiny, dst, max_shard_size="200KB", verify=False),
        ),
    ):
        with pytest.raises(
            CheckpointError, match=f"unfinished conversion with other settings .*{difference}"
        ):
            job()
        assert contents(dst) == before
    assert dequantize_checkpoint(tiny, dst, max_shard_size="200KB").resumed_shards == 4


def test_a_complete_conversion_is_left_as_it_is(checkpoints: Path, tmp_path: Path) -> None:
    """A run that was killed between its last file and its exit is started again."""
    dst = tmp_path / "out"
    first = dequantize_checkpoint(checkpoints / "rtn", dst, max_shard_size="200KB")
    inodes = {path.name: path.stat().st_ino for path in dst.iterdir()}
    staging(dst).mkdir()
    again = dequantize_checkpoint(checkpoints / "rtn", dst, max_shard_size="200KB")
    assert {path.name: path.stat().st_ino for path in dst.iterdir()} == inodes
    assert (again.resumed_shards, again.written_bytes) == (first.shards, 0)
    assert (again.groups, again.loose_groups, again.worst) == (first.groups, first.loose_groups, first.worst)
    next(dst.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="already holds model-"):
        dequantize_checkpoint(checkpoints / "rtn", dst, max_shard_size="200KB")


def test_overwriting(tiny: Path, checkpoints: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out"
    dequantize_checkpoint(tiny, dst, max_shard_size="200KB")
    for job in (
        lambda: dequantize_checkpoint(tiny, dst, max_shard_size="300KB"),
        lambda: dequantize_checkpoint(checkpoints / "rtn", dst, max_shard_size="200KB"),
        lambda: truncate_checkpoint(tiny, dst, 2, 4),
    ):
        with pytest.raises(CheckpointError, match="already holds model-00001"):
            job()
    truncate_checkpoint(tiny, dst, 2, 4, overwrite=True)
    truncate_checkpoint(tiny, tmp_path / "expected", 2, 4)
    assert_same(dst, contents(tmp_path / "expected"))


def test_wrong_folders(tiny: Path, spoiled: Path, checkpoints: Path, tmp_path: Path) -> None:
    plain = checkpoints / "kimi_bf16"
    before = contents(spoiled)
    (tmp_path / "file").write_text("x")
    for message, job in (
        ("source and destination at once", lambda: dequantize_checkpoint(spoiled, spoiled)),
        ("lies inside the source", lambda: dequantize_checkpoint(spoiled, spoiled / "inner")),
        ("lies inside the source", lambda: quantize_checkpoint(plain, spoiled / "inner", reference=spoiled)),
        ("is a file", lambda: dequantize_checkpoint(spoiled, tmp_path / "file")),
        ("no INT4 weights", lambda: dequantize_checkpoint(plain, tmp_path / "out")),
        ("is INT4 already", lambda: quantize_checkpoint(spoiled, tmp_path / "out")),
        (
            "The reference has no quantization_config",
            lambda: quantize_checkpoint(plain, tmp_path / "out", reference=plain),
        ),
        ("ask for 1 to 3", lambda: truncate_checkpoint(spoiled, tmp_path / "out", 4)),
        ("ask for 1 to 8", lambda: truncate_checkpoint(spoiled, tmp_path / "out", 2, 9)),
        (
            "max_shard_size is 'big'",
            lambda: dequantize_checkpoint(spoiled, tmp_path / "out", max_shard_size="big"),
        ),
        ("0 workers", lambda: dequantize_checkpoint(spoiled, tmp_path / "out", workers=0)),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            job()
        assert "\n" not in str(caught.value)
    assert contents(spoiled) == before
    assert not (tmp_path / "out").exists()


def test_require_fixed_point(checkpoints: Path, tmp_path: Path) -> None:
    dequantize_checkpoint(checkpoints / "kimi", tmp_path / "kimi", require_fixed_point=True)
    with pytest.raises(CheckpointError, match=r"groups of \S+ are no fixed point of amax/7: "):
        dequantize_checkpoint(checkpoints / "rtn", tmp_path / "rtn", require_fixed_point=True)
    with pytest.raises(CheckpointError, match="Without verification"):
        dequantize_checkpoint(checkpoints / "kimi", tmp_path / "x", require_fixed_point=True, verify=False)
    summary = dequantize_checkpoint(checkpoints / "rtn", tmp_path / "rtn", verify=False)
    assert (summary.verified, summary.groups) == (False, 0)


def test_a_bug_in_a_worker_keeps_its_traceback(tiny: Path, tmp_path: Path) -> None:
    plan = plan_dequantize(tiny)
    (shard,) = plan.shards
    keeper = Staging(tmp_path / "out", plan, True, False)
    with LocalWorkers(1) as workers:
        (piece,) = convert_module._OpenShards(plan, keeper, [shard], workers, True).pieces()
    piece.jobs.append(("no job", (0,)))  # type: ignore[arg-type]
    assert "AttributeError" in answer(piece).bug
    keeper.close()


def test_workers_share_the_cores_that_they_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        with LocalWorkers(1) as workers:
            assert workers.threads == len(allowed)
        os.sched_setaffinity(0, {min(allowed)})
        with LocalWorkers(1) as workers:
            assert workers.threads == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize("text", ["{", "[]", '{"identity": 1, "publishing": false, "shards": {}}'])
def test_a_damaged_manifest(text: str, tiny: Path, tmp_path: Path) -> None:
    staging(tmp_path / "out").mkdir(parents=True)
    (staging(tmp_path / "out") / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read .*: remove"):
        dequantize_checkpoint(tiny, tmp_path / "out")


def test_a_config_without_text(spoiled: Path, tmp_path: Path) -> None:
    edit_json(spoiled / "config.json", lambda config: config.pop("text_config"))
    with pytest.raises(CheckpointError, match="text_config"):
        truncate_checkpoint(spoiled, tmp_path / "out", 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a" * 300, "File name too long"),
        ("a\0b", "holds a zero byte"),
        ("dangling", "is a link to"),
        ("dangling/below", "is a link to"),
        ("file/below", "is a file"),
    ],
)
def test_destinations_that_cannot_be(name: str, message: str, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    dst = tmp_path / name
    for job in (lambda: dequantize_checkpoint(tiny, dst), lambda: synthesize_checkpoint(dst, size="tiny")):
        with pytest.raises(CheckpointError, match=message):
            job()
    assert {path.name for path in tmp_path.iterdir()} == {"dangling", "file"}


def test_a_source_without_one_of_its_experts(tmp_path: Path) -> None:
    source = synthesize_checkpoint(tmp_path / "source", int4=False, family="kimi_vl")
    remove_tensor(source, EXPERT)
    for convert in (
        lambda dst: quantize_checkpoint(source, dst),
        lambda dst: truncate_checkpoint(source, dst, layers=2),
    ):
        with pytest.raises(CheckpointError, match=f"{EXPERT} is missing"):
            convert(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_destination_at_home(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    truncate_checkpoint(tiny, "~/out", layers=1)
    assert (tmp_path / "out" / "config.json").is_file()
