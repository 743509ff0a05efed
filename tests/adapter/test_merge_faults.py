"""Merges that are killed, or asked to merge what does not belong together."""

import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_folders import contents, edit_json, replace_tensor
from convert_runs import assert_nothing_partial, assert_same, finish, manifest, staging, start, wait_for

from kimi_bridge.adapter import merge_adapter
from kimi_bridge.adapter.merge import plan_merge
from kimi_bridge.adapter.peft_format import WEIGHTS_NAME, tensor_name
from kimi_bridge.checkpoint import CheckpointReader, synthesize_checkpoint
from kimi_bridge.checkpoint.convert import Options, run_plan
from kimi_bridge.conversion import merge as merge_module
from kimi_bridge.conversion.jobs import Merge, Region
from kimi_bridge.conversion.storage import Files
from kimi_bridge.errors import CheckpointError
from tests.adapter.adapters import (
    EXPERT,
    EXPERTS,
    LAYERS,
    MODULES,
    O_PROJ,
    Q_A,
    adapter,
    edit_config,
    edit_weights,
    random_pairs,
    specs_of,
    write,
)

WIDE = {"hidden_size": 512, "moe_intermediate_size": 256, "n_routed_experts": 16}
SIZE = "300KB"


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base in enough shards to take a while, and an adapter on all of its experts and attention."""
    folder = tmp_path_factory.mktemp("medium")
    base = synthesize_checkpoint(folder / "base", overrides=WIDE, convention="mixed")
    modules = [name.removesuffix(".weight") for name in CheckpointReader(base).weight_names()]
    specs = specs_of(base, [m for m in modules if ".mlp.experts." in m or m.endswith("o_proj")])
    write(folder / "lora", base, specs, random_pairs(specs))
    return folder


@pytest.fixture(scope="module")
def expected(medium: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    dst = tmp_path_factory.mktemp("expected") / "out"
    merge_adapter(medium / "base", medium / "lora", dst, max_shard_size=SIZE)
    return contents(dst)


def finished(dst: Path) -> list[Path]:
    return [*staging(dst).glob("*.safetensors"), *dst.glob("*.safetensors")]


def test_killed_at_6_moments(medium: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    """The record that ends up beside the weights holds the sums of all shards, whoever made them."""
    moments = random.Random(0)
    arguments, options = (medium / "base", medium / "lora"), {"max_shard_size": SIZE}
    kills = runs = resumed = 0
    while kills < 6:
        dst = tmp_path / f"run{runs}"
        runs += 1
        assert runs < 20
        for _ in range(3):
            process = start(merge_adapter, *arguments, dst, **options)
            shards = moments.randrange(1, len(expected))
            wait_for(lambda: len(finished(dst)) >= shards or not process.is_alive())  # noqa: B023
            process.kill()
            process.join()
            kills += process.exitcode == -signal.SIGKILL
            assert_nothing_partial(dst, expected)
            if process.exitcode == 0:
                break
            resumed += bool(finished(dst))
        else:
            finish(merge_adapter, *arguments, dst, **options)
        assert_same(dst, expected)
        shutil.rmtree(dst)
    assert resumed > 2


def test_a_resumed_merge_reports_the_whole(medium: Path, tmp_path: Path) -> None:
    base, lora, dst = medium / "base", medium / "lora", tmp_path / "out"
    whole = merge_adapter(base, lora, tmp_path / "whole", max_shard_size=SIZE)
    process = start(merge_adapter, base, lora, dst, max_shard_size=SIZE)
    wait_for(lambda: len(list(staging(dst).glob("*.safetensors"))) > 5)
    process.kill()
    process.join()
    assert 5 <= len(manifest(dst)["shards"]) < whole.shards
    resumed = merge_adapter(base, lora, dst, max_shard_size=SIZE)
    assert resumed.resumed_shards >= 5
    assert (resumed.kinds, resumed.groups, resumed.worst) == (whole.kinds, whole.groups, whole.worst)
    again = merge_adapter(base, lora, dst, max_shard_size=SIZE)
    assert (again.resumed_shards, again.written_bytes, again.kinds) == (whole.shards, 0, whole.kinds)


def test_another_adapter_is_another_conversion(medium: Path, tmp_path: Path) -> None:
    base, lora, dst = (
        medium / "base",
        Path(shutil.copytree(medium / "lora", tmp_path / "lora")),
        tmp_path / "out",
    )
    before = plan_merge(base, lora).identity
    process = start(merge_adapter, base, lora, dst, max_shard_size=SIZE)
    wait_for(lambda: len(list(staging(dst).glob("*.safetensors"))) > 5)
    process.kill()
    process.join()
    # One bit of the last B, in place: neither size nor header change.
    with (lora / WEIGHTS_NAME).open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        low, high = file.read(2)
        file.seek(-2, os.SEEK_END)
        file.write(bytes([low ^ 1, high]))
    assert plan_merge(base, lora).identity["adapter"]["headers"] == before["adapter"]["headers"]
    for options in ({}, {"int4": False}):
        with pytest.raises(CheckpointError, match=r"unfinished conversion with other settings .*adapter"):
            merge_adapter(base, lora, dst, max_shard_size=SIZE, **options)
    shutil.rmtree(lora)
    shutil.copytree(medium / "lora", lora)
    edit_config(lora, lora_alpha=16)
    assert plan_merge(base, lora).identity["adapter"]["headers"] != before["adapter"]["headers"]
    with pytest.raises(CheckpointError, match=r"unfinished conversion with other settings .*adapter"):
        merge_adapter(base, lora, dst, max_shard_size=SIZE)


def narrow(folder: Path) -> None:
    name = tensor_name(O_PROJ, "B")
    edit_weights(folder, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))


def elsewhere(folder: Path) -> None:
    for part in ("A", "B"):
        old, new = (tensor_name(m, part) for m in (O_PROJ, LAYERS + "7.self_attn.o_proj"))
        edit_weights(folder, lambda tensors: tensors.update({new: tensors.pop(old)}))  # noqa: B023


def without_b(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop(tensor_name(EXPERT, "B")))


def poisoned(part: str, value: float) -> Callable[[Path], None]:
    def poison(folder: Path) -> None:
        name = tensor_name(EXPERTS[-1], "A" if part == "A" else "B")
        edit_weights(folder, lambda tensors: tensors[name].view(-1)[-1:].fill_(value))

    return poison


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (narrow, rf"adapts {O_PROJ} as \[127, 64\], which is \[128, 64\] in .*another base model"),
        (elsewhere, r"layers\.7\.self_attn\.o_proj, which .* does not have: it belongs to another base"),
        (without_b, rf"{EXPERT}\.lora_B\.weight is missing in .*lora, but .*lora_A\.weight is there"),
        (poisoned("A", float("nan")), rf"{EXPERTS[-1]}\.lora_A\.weight of .* holds NaN or Inf"),
        (poisoned("B", float("inf")), rf"{EXPERTS[-1]}\.lora_B\.weight of .* holds NaN or Inf"),
        (lambda f: os.truncate(f / WEIGHTS_NAME, 5000), "adapter_model.safetensors is truncated"),
        (lambda f: (f / WEIGHTS_NAME).unlink(), "holds no weights"),
        (lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config.json"),
    ],
)
def test_refused_before_anything_is_written(
    kimi: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    lora = adapter(tmp_path / "lora", kimi)
    damage(lora)
    with pytest.raises(CheckpointError, match=message) as caught:
        merge_adapter(kimi, lora, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_adapter_of_another_base(bases: Path, tmp_path: Path) -> None:
    """Of the same shapes: only the notes of save_adapter tell."""
    lora = adapter(tmp_path / "lora", bases / "other")
    with pytest.raises(CheckpointError, match=r"was trained on another base model than .*kimi .*other"):
        merge_adapter(bases / "kimi", lora, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    edit_weights(lora, lambda tensors: None)
    merge_adapter(bases / "kimi", lora, tmp_path / "out")


def test_wrong_folders_and_settings(kimi: Path, tmp_path: Path) -> None:
    lora = adapter(tmp_path / "lora", kimi)
    for message, job in (
        ("source and destination at once", lambda: merge_adapter(kimi, lora, lora)),
        ("lies inside the source", lambda: merge_adapter(kimi, lora, lora / "merged")),
        ("0 workers", lambda: merge_adapter(kimi, lora, tmp_path / "out", workers=0)),
        ("is no folder", lambda: merge_adapter(kimi, tmp_path / "nowhere", tmp_path / "out")),
        ("has no adapter_config.json", lambda: merge_adapter(kimi, kimi, tmp_path / "out")),
    ):
        with pytest.raises(CheckpointError, match=message):
            job()
    assert not (tmp_path / "out").exists()


def test_the_current_folder_is_no_destination(
    kimi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty path is that folder, too."""
    lora = adapter(tmp_path / "lora", kimi)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(CheckpointError, match="is the current folder"):
        merge_adapter(kimi, lora, "", overwrite=True)
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize("int4", [True, False])
def test_a_damaged_base(kimi: Path, tmp_path: Path, int4: bool) -> None:
    base = Path(shutil.copytree(kimi, tmp_path / "base"))
    lora = adapter(tmp_path / "lora", base)
    for name, message in (
        (O_PROJ + ".weight", f"{O_PROJ}.weight, merged, rows .*NaN or Inf.* The base is damaged, or"),
        (EXPERT + ".weight_scale", f"{EXPERT}.weight: its scales hold NaN or Inf"),
    ):
        good = CheckpointReader(base).tensor(name).clone()
        bad = good.clone()
        bad[3, 1] = float("nan")
        replace_tensor(base, name, bad)
        with pytest.raises(CheckpointError, match=message):
            merge_adapter(base, lora, tmp_path / "out", int4=int4)
        assert not (tmp_path / "out").exists()
        replace_tensor(base, name, good)
    merge_adapter(base, lora, tmp_path / "out", int4=int4)


@pytest.mark.parametrize("int4", [True, False])
def test_an_update_too_large_for_its_dtype(kimi: Path, tmp_path: Path, int4: bool) -> None:
    for module in (Q_A, EXPERT):
        specs = specs_of(kimi, [module], alphas={module: 3e38})
        lora = write(tmp_path / module / "lora", kimi, specs, random_pairs(specs, gain=100))
        with pytest.raises(CheckpointError, match=r"or the update too large for torch\.bfloat16"):
            merge_adapter(kimi, lora, tmp_path / module / "out", int4=int4)


def test_a_base_in_other_dtypes(bases: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(bases / "kimi_bf16", tmp_path / "base"))
    weight = CheckpointReader(base).tensor(O_PROJ + ".weight")
    lora = adapter(tmp_path / "lora", base)
    replace_tensor(base, O_PROJ + ".weight", weight.float())
    merge_adapter(base, lora, tmp_path / "out")
    assert CheckpointReader(tmp_path / "out").tensor(O_PROJ + ".weight").dtype == torch.float32
    replace_tensor(base, O_PROJ + ".weight", weight.to(torch.float8_e4m3fn))
    lora = adapter(tmp_path / "lora8", base)
    with pytest.raises(CheckpointError, match=r"o_proj\.weight of .* is torch\.float8_e4m3fn: adapters are"):
        merge_adapter(base, lora, tmp_path / "out8")


@pytest.mark.parametrize("int4", [True, False])
def test_memory_holds_one_module_at_a_time(
    kimi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, int4: bool
) -> None:
    """A is read once a job; of B and the weight a block of rows at a time, each once."""
    monkeypatch.setattr(merge_module, "ROWS", 16)
    plan = plan_merge(kimi, adapter(tmp_path / "lora", kimi), int4)
    jobs = [unit.job for unit in plan.units if isinstance(unit.job, Merge)]
    assert {job.name for job in jobs} == {module + ".weight" for module in MODULES}
    seen: list[Region] = []
    read = Files.read

    def spy(self: Files, region: Region, into: torch.Tensor | str) -> torch.Tensor:
        seen.append(region)
        return read(self, region, into)

    monkeypatch.setattr(Files, "read", spy)
    run_plan(plan, tmp_path / "out", Options(1, None, True, False, False, None))
    counts = Counter(seen)
    for job in jobs:
        assert counts[job.a] == 1
        row = job.b.nbytes // job.rows
        blocks = [region for region in seen if within(region, job.b)]
        assert [(r.offset - job.b.offset, r.nbytes) for r in blocks] == [
            (start * row, min(16, job.rows - start) * row) for start in range(0, job.rows, 16)
        ]
        if isinstance(job.source, Region):
            nbytes = job.columns * job.dtype.itemsize
            mine = [
                r
                for r in seen
                if r.path == job.source.path and 0 <= r.offset - job.source.offset < job.source.nbytes
            ]
            assert max(r.nbytes for r in mine) <= 16 * nbytes
            assert sum(r.nbytes for r in mine) == job.source.nbytes


def within(part: Region, whole: Region) -> bool:
    return part.path == whole.path and 0 <= part.offset - whole.offset < whole.nbytes


def test_a_config_without_text_is_refused(bases: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(bases / "kimi_bf16", tmp_path / "base"))
    lora = adapter(tmp_path / "lora", base)
    edit_json(base / "config.json", lambda config: config.pop("text_config"))
    with pytest.raises(CheckpointError, match="text_config"):
        merge_adapter(base, lora, tmp_path / "out", int4=True)
