"""Two checkpoints compared: what counts as the same, and what is said about what is not."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_folders import EXPERT, PLAIN, add_tensor, edit_json, edit_shard, replace_tensor, shard_of

from kimi_bridge.checkpoint import KINDS, CheckpointReader, Report, tensor_kind, verify_checkpoints
from kimi_bridge.checkpoint import verify as verify_module
from kimi_bridge.checkpoint.triplets import part_names
from kimi_bridge.errors import CheckpointError

EXPERTS = 2 * 8 * 3


def row(report: Report, kind: str) -> verify_module.KindRow:
    (found,) = [row for row in report.rows if row.kind == kind]
    return found


def flip(folder: Path, name: str, bit: int) -> None:
    """Changes one bit of a tensor's last element."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        raw = tensors[name].reshape(-1).view(torch.uint8)
        raw[-tensors[name].itemsize + bit // 8] ^= 1 << bit % 8

    edit_shard(shard_of(folder, name), edit)


@pytest.mark.parametrize("convention", ["kimi", "rtn", "mixed", "kimi_bf16"])
def test_a_checkpoint_is_identical_to_itself(checkpoints: Path, convention: str) -> None:
    folder = checkpoints / convention
    calls: list[tuple[int, int]] = []
    report = verify_checkpoints(folder, folder, progress=lambda done, total: calls.append((done, total)))
    assert report.identical
    assert (report.differences, report.missing, report.extra, report.config) == ([], [], [], "equal")
    reader = CheckpointReader(folder)
    total = sum(reader.info(name).nbytes for name in reader.names())
    assert sum(row.bytes for row in report.rows) == total
    assert sum(row.count for row in report.rows) == len(reader.weight_names())
    assert all(row.identical == row.count for row in report.rows)
    assert all(row.largest_difference == 0 and row.sqnr_db is None for row in report.rows)
    assert [row.kind for row in report.rows] == [kind for kind in KINDS if kind != "other"]
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


@pytest.mark.parametrize(
    "name", [PLAIN, "vision_tower.encoder.blocks.0.wo.bias", "language_model.lm_head.weight"]
)
@pytest.mark.parametrize("chunk", [1 << 25, 256])
def test_one_bit_of_a_plain_tensor(
    tiny: Path, spoiled: Path, name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "_CHUNK_BYTES", chunk)
    flip(spoiled, name, bit=0)
    report = verify_checkpoints(tiny, spoiled)
    assert not report.identical
    (difference,) = report.differences
    assert difference.name == name
    assert difference.reason.endswith("has other bits")
    expected = [CheckpointReader(folder).tensor(name).double() for folder in (tiny, spoiled)]
    assert difference.largest_difference == (expected[0] - expected[1]).abs().max().item() > 0
    noise = (expected[0] - expected[1]).square().sum()
    assert difference.sqnr_db == pytest.approx(10 * math.log10(expected[0].square().sum() / noise))
    found = row(report, tensor_kind(name))
    assert (found.count - found.identical, found.largest_difference) == (1, difference.largest_difference)
    assert sum(row.count - row.identical for row in report.rows) == 1


def test_the_sign_of_zero_is_a_bit(tiny: Path, spoiled: Path, tmp_path: Path) -> None:
    zero = CheckpointReader(tiny).tensor(PLAIN).clone()
    zero[0, 0] = 0.0
    replace_tensor(spoiled, PLAIN, zero)
    other = Path(shutil.copytree(spoiled, tmp_path / "other"))
    zero[0, 0] = -0.0
    replace_tensor(other, PLAIN, zero)
    (difference,) = verify_checkpoints(spoiled, other).differences
    assert (difference.name, difference.largest_difference, difference.sqnr_db) == (PLAIN, 0.0, None)


def test_nan_is_identical_to_the_same_nan_alone(tiny: Path, spoiled: Path, tmp_path: Path) -> None:
    tensor = CheckpointReader(tiny).tensor(PLAIN).clone()
    tensor[0, 0] = math.nan
    replace_tensor(spoiled, PLAIN, tensor)
    assert verify_checkpoints(spoiled, shutil.copytree(spoiled, tmp_path / "other")).identical
    report = verify_checkpoints(tiny, spoiled)
    assert [difference.largest_difference for difference in report.differences] == [math.inf]
    assert json.loads(report.to_json())["differences"][0]["largest_difference"] is None


@pytest.mark.parametrize("part", ["_packed", "_scale"])
def test_one_bit_of_an_int4_weight(tiny: Path, spoiled: Path, part: str) -> None:
    flip(spoiled, EXPERT + part, bit=0)
    (difference,) = verify_checkpoints(tiny, spoiled).differences
    assert (difference.name, difference.reason) == (EXPERT, f"weight{part} has other bits")
    a, b = (CheckpointReader(folder).weight(EXPERT).double() for folder in (tiny, spoiled))
    assert difference.largest_difference == (a - b).abs().max().item() > 0


def test_another_dtype_of_weight_shape_is_a_difference(tiny: Path, spoiled: Path) -> None:
    replace_tensor(spoiled, EXPERT + "_shape", torch.tensor([128, 64]))
    (difference,) = verify_checkpoints(tiny, spoiled).differences
    assert difference.reason == "weight_shape is int32 [2] against int64 [2]"
    assert difference.largest_difference == 0


def test_other_shapes_and_dtypes(tiny: Path, spoiled: Path) -> None:
    tensor = CheckpointReader(tiny).tensor(PLAIN)
    replace_tensor(spoiled, PLAIN, tensor[:64].clone())
    (difference,) = verify_checkpoints(tiny, spoiled).differences
    assert difference == verify_module.Difference(PLAIN, "shape [128, 64] against [64, 64]")
    replace_tensor(spoiled, PLAIN, tensor.float())
    (difference,) = verify_checkpoints(tiny, spoiled).differences
    assert difference.reason == "weight is bfloat16 [128, 64] against float32 [128, 64]"
    assert difference.largest_difference == 0


def test_missing_and_extra_weights(tiny: Path, spoiled: Path) -> None:
    add_tensor(spoiled, "language_model.extra.weight", torch.zeros(2), beside=PLAIN)
    report = verify_checkpoints(tiny, spoiled)
    assert (report.missing, report.extra) == ([], ["language_model.extra.weight"])
    assert not report.identical
    report = verify_checkpoints(spoiled, tiny)
    assert (report.missing, report.extra) == (["language_model.extra.weight"], [])
    assert not report.identical
    assert row(verify_checkpoints(spoiled, spoiled), "other").count == 1


@pytest.mark.parametrize("convention", ["kimi", "rtn", "mixed"])
@pytest.mark.parametrize("swapped", [False, True])
def test_int4_against_bf16_is_compared_by_value(checkpoints: Path, convention: str, swapped: bool) -> None:
    folders = [checkpoints / convention, checkpoints / f"{convention}_bf16"]
    report = verify_checkpoints(*(reversed(folders) if swapped else folders))
    assert report.identical
    assert row(report, "experts").identical == EXPERTS
    assert report.config == "differs in text_config.quantization_config"


def test_int4_against_other_values(checkpoints: Path) -> None:
    report = verify_checkpoints(checkpoints / "rtn", checkpoints / "kimi_bf16")
    assert not report.identical
    assert {difference.reason for difference in report.differences} == {"INT4 against plain: other values"}
    found = row(report, "experts")
    assert (found.count, found.identical, len(report.differences)) == (EXPERTS, 0, EXPERTS)
    a, b = (CheckpointReader(checkpoints / name) for name in ("rtn", "kimi_bf16"))
    pairs = [(a.weight(d.name).double(), b.weight(d.name).double()) for d in report.differences]
    signal = sum(x.square().sum() for x, _ in pairs)
    noise = sum((x - y).square().sum() for x, y in pairs)
    assert found.sqnr_db == pytest.approx(10 * math.log10(signal / noise))
    assert found.largest_difference == max((x - y).abs().max().item() for x, y in pairs)
    # Two conventions on the same weights: 4 bits give about 20 dB.
    assert 15 < found.sqnr_db < 25
    assert sum(row.count - row.identical for row in report.rows) == EXPERTS


def test_configs_are_compared_as_json(tiny: Path, spoiled: Path) -> None:
    (spoiled / "config.json").write_text(json.dumps(json.loads((tiny / "config.json").read_text())))
    assert verify_checkpoints(tiny, spoiled).config == "equal"
    edit_json(spoiled / "config.json", lambda c: c["text_config"].update(routed_scaling_factor=1.0, extra=1))
    report = verify_checkpoints(tiny, spoiled)
    assert report.config == "differs in text_config.extra, text_config.routed_scaling_factor"
    assert report.identical


def test_json_says_the_same(checkpoints: Path) -> None:
    report = verify_checkpoints(checkpoints / "rtn", checkpoints / "kimi")
    content = json.loads(report.to_json())
    assert content == report.to_dict()
    assert content["identical"] is False
    assert [entry["sqnr_db"] for entry in content["rows"]] == [row.sqnr_db for row in report.rows]
    assert len(content["differences"]) == EXPERTS


def test_a_damaged_side_is_an_error(tiny: Path, spoiled: Path) -> None:
    shard = shard_of(spoiled, part_names(EXPERT)[0])
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=f"{shard.name} is truncated"):
        verify_checkpoints(tiny, spoiled)
