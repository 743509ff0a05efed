"""What the three conversions write, against compressed-tensors, the source's bits, and transformers."""

import copy
import json
from pathlib import Path

import pytest
import torch
from checkpoint_folders import EXPERT, INDEX, add_tensor, contents, edit_json, replace_tensor, same_bits
from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer, convert_checkpoint
from convert_runs import assert_same, run_with_a_process
from safetensors.torch import load_file
from transformers import DeepseekV3ForCausalLM

from kimi_bridge.checkpoint import (
    CheckpointReader,
    dequantize_checkpoint,
    inspect_checkpoint,
    quantize_checkpoint,
    synthesize_checkpoint,
    truncate_checkpoint,
    verify_checkpoints,
)
from kimi_bridge.checkpoint import convert as convert_module
from kimi_bridge.checkpoint.convert_config import truncated_config
from kimi_bridge.checkpoint.convert_plan import plan_dequantize
from kimi_bridge.conversion.fixed_point import count_loose_groups
from kimi_bridge.conversion.jobs import Findings
from kimi_bridge.errors import CheckpointError, Int4Error
from kimi_bridge.int4 import KIMI_QAT, RTN, Int4Scheme, Int4Weight, dequantize, pack, quantize


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


@pytest.mark.parametrize("convention", ["kimi", "rtn", "mixed"])
def test_dequantize_equals_compressed_tensors(checkpoints: Path, convention: str, tmp_path: Path) -> None:
    src = checkpoints / convention
    convert_checkpoint(str(src), str(tmp_path / "peer"), CompressedTensorsDequantizer(str(src)))
    seen: list[tuple[int, int]] = []
    summary = dequantize_checkpoint(
        src, tmp_path / "ours", max_shard_size="500KB", progress=lambda *p: seen.append(p)
    )
    ours, peer = tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "peer")
    assert ours.keys() == peer.keys()
    assert all(same_bits(ours[name], peer[name]) for name in ours)
    assert verify_checkpoints(tmp_path / "ours", checkpoints / f"{convention}_bf16").config == "equal"

    index = json.loads((tmp_path / "ours" / INDEX).read_text())
    assert index["metadata"]["total_size"] == summary.bytes == sum(t.nbytes for t in ours.values())
    assert (summary.tensors, summary.shards) == (len(ours), len(set(index["weight_map"].values())))
    assert all(p.stat().st_size < 520_000 for p in (tmp_path / "ours").glob("*.safetensors"))
    assert seen[-1] == (summary.bytes, summary.bytes)
    assert (summary.int4_weights, summary.groups) == (48, 48 * 256)
    assert (summary.loose_groups == 0) == (convention == "kimi")
    assert len(summary.worst) == (0 if convention == "kimi" else 10)
    assert {p.name for p in (tmp_path / "ours").iterdir()} >= {"tokenizer.json", "config.json"}
    hidden = [p.name for p in (tmp_path / "ours").iterdir() if p.name.startswith(".")]
    assert hidden == [".kimi-bridge-conversion.json"]
    assert str(tmp_path) not in (tmp_path / "ours" / hidden[0]).read_text()


@pytest.mark.parametrize("convention", ["kimi", "rtn", "mixed"])
def test_quantize_with_a_reference_gives_its_bits_back(
    checkpoints: Path, convention: str, tmp_path: Path
) -> None:
    src, plain = checkpoints / convention, checkpoints / f"{convention}_bf16"
    summary = quantize_checkpoint(plain, tmp_path / "back", reference=src)
    report = verify_checkpoints(src, tmp_path / "back")
    assert report.identical
    assert report.config == "equal"
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads(
        (src / "config.json").read_text()
    )
    assert (summary.loose_groups == 0) == (convention == "kimi")


def test_quantize_keeps_what_did_not_change(checkpoints: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    dequantize_checkpoint(checkpoints / "mixed", plain, max_shard_size="500KB")
    weight = CheckpointReader(plain).tensor(EXPERT).clone()
    weight[5, 40] += 1.0
    replace_tensor(plain, EXPERT, weight)
    quantize_checkpoint(plain, tmp_path / "back", reference=checkpoints / "mixed")
    (difference,) = verify_checkpoints(checkpoints / "mixed", tmp_path / "back").differences
    assert difference.name == EXPERT
    was, now = (CheckpointReader(f).int4(EXPERT) for f in (checkpoints / "mixed", tmp_path / "back"))
    changed = (was.scale != now.scale) | (was.packed != now.packed).unflatten(1, (-1, 4)).any(-1)
    assert changed.nonzero().tolist() == [[5, 1]]
    fresh = quantize(weight, KIMI_QAT)
    assert same_bits(now.scale[5, 1], fresh.scale[5, 1])


@pytest.mark.parametrize("scheme", [KIMI_QAT, RTN, Int4Scheme(16, 7.0, -7)])
def test_quantize_without_a_reference(checkpoints: Path, scheme: Int4Scheme, tmp_path: Path) -> None:
    plain = checkpoints / "kimi_bf16"
    summary = quantize_checkpoint(plain, tmp_path / "int4", scheme)
    reader, before = CheckpointReader(tmp_path / "int4"), CheckpointReader(plain)
    reader.check()
    assert reader.quantization is not None
    assert reader.quantization.group_size == scheme.group_size
    source = CheckpointReader(checkpoints / "kimi")
    assert reader.weights().keys() == before.weights().keys()
    assert {n for n, int4 in reader.weights().items() if int4} == {
        n for n, int4 in source.weights().items() if int4
    }
    for name, int4 in reader.weights().items():
        if int4:
            expected = quantize(before.tensor(name), scheme)
            assert same_bits(reader.int4(name).packed, expected.packed)
            assert same_bits(reader.int4(name).scale, expected.scale)
        else:
            assert same_bits(reader.tensor(name), before.tensor(name))
    assert (summary.loose_groups > 0) == (scheme == RTN)


def test_kimi_vl_has_nothing_to_dequantize_and_can_be_quantized(kimi_vl: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no INT4 weights: there is nothing to dequantize"):
        dequantize_checkpoint(kimi_vl, tmp_path / "plain")
    quantize_checkpoint(kimi_vl, tmp_path / "int4")
    reader = CheckpointReader(tmp_path / "int4")
    int4 = {name for name, is_triplet in reader.weights().items() if is_triplet}
    assert int4 == {name for name in CheckpointReader(kimi_vl).names() if ".mlp.experts." in name}
    assert inspect_checkpoint(tmp_path / "int4").problems == []
    dequantize_checkpoint(tmp_path / "int4", tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "again", reference=tmp_path / "int4")
    assert verify_checkpoints(tmp_path / "int4", tmp_path / "again").identical
    config = json.loads((kimi_vl / "config.json").read_text())
    assert json.loads((tmp_path / "plain/config.json").read_text()) == config


@pytest.mark.parametrize(("name", "int4_weights"), [("mixed", 9), ("kimi_vl", 0)])
def test_truncate_is_a_checkpoint_that_loads(
    checkpoints: Path, name: str, int4_weights: int, tmp_path: Path
) -> None:
    src, dst = checkpoints / name, tmp_path / "small"
    summary = truncate_checkpoint(src, dst, layers=2, experts=3, max_shard_size="300KB")
    whole, cut = CheckpointReader(src), CheckpointReader(dst)
    cut.check()
    text = cut.config_dict["text_config"]
    assert (text["num_hidden_layers"], text["n_routed_experts"], text["num_experts_per_tok"]) == (2, 3, 2)
    assert text["first_k_dense_replace"] == 1
    assert ("quantization_config" in text) == bool(int4_weights)
    for name in cut.names():
        tensor = whole.tensor(name)
        expected = tensor[:3] if ".mlp.gate." in name else tensor
        assert same_bits(cut.tensor(name), expected), name
    left_out = set(whole.weight_names()) - set(cut.weight_names())
    assert all(".layers.2." in name or int(name.split("experts.")[1][0]) >= 3 for name in left_out)
    assert summary.int4_weights == int4_weights
    assert inspect_checkpoint(dst).problems == []

    config = cut.config.text_config
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(config)
    shapes = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    assert shapes["model.layers.1.mlp.experts.down_proj"] == (3, 128, 64)
    for name in cut.weight_names():
        inner = name.removeprefix("language_model.")
        if name.startswith("language_model.") and ".experts." not in name:
            assert shapes[inner] == cut.shape(name), name
    experts = {name for name in shapes if ".mlp.experts." in name}
    assert shapes.keys() - experts == {
        name.removeprefix("language_model.")
        for name in cut.weight_names()
        if name.startswith("language_model.") and ".mlp.experts." not in name
    }


def test_truncate_keeps_all_experts_by_default(tiny: Path, tmp_path: Path) -> None:
    truncate_checkpoint(tiny, tmp_path / "small", layers=3)
    report = verify_checkpoints(tiny, tmp_path / "small")
    assert report.identical
    assert report.config == "equal"


@pytest.mark.parametrize(
    ("n_group", "topk_group", "experts", "expected"),
    [
        (8, 4, 8, (4, 4, 6)),
        (8, 4, 6, (3, 3, 6)),
        (8, 4, 5, (1, 1, 5)),
        (8, 2, 16, (8, 2, 4)),
        (1, 1, 2, (1, 1, 2)),
    ],
)
def test_expert_groups_stay_possible(
    tiny: Path, n_group: int, topk_group: int, experts: int, expected: tuple[int, int, int]
) -> None:
    config = copy.deepcopy(json.loads((tiny / "config.json").read_text()))
    config["text_config"] |= {"n_routed_experts": 32, "num_experts_per_tok": 6}
    config["text_config"] |= {"n_group": n_group, "topk_group": topk_group, "num_nextn_predict_layers": 1}
    config["text_config"]["moe_layer_freq"] = [0, 1, 1]
    text = truncated_config(config, 2, experts)["text_config"]
    assert (text["n_group"], text["topk_group"], text["num_experts_per_tok"]) == expected
    assert (text["moe_layer_freq"], text["num_nextn_predict_layers"]) == ([0, 1], 0)


def test_prediction_layers_are_cut_off(spoiled: Path, tmp_path: Path) -> None:
    extra = "language_model.model.layers.3.eh_proj.weight"
    add_tensor(spoiled, extra, torch.zeros(2, 2), beside=EXPERT + "_packed")
    edit_json(spoiled / "config.json", lambda c: c["text_config"].update(num_nextn_predict_layers=1))
    truncate_checkpoint(spoiled, tmp_path / "small", layers=3)
    assert extra not in CheckpointReader(tmp_path / "small")


def test_processes_write_what_a_thread_writes(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small pieces in a few shards, none of them cut before the process is there to take some."""
    dequantize_checkpoint(checkpoints / "mixed", tmp_path / "one", max_shard_size="500KB")
    monkeypatch.setattr(convert_module, "_PIECE_BYTES", 20_000)
    plan = plan_dequantize(checkpoints / "mixed", "500KB")
    assert run_with_a_process(plan, tmp_path / "two") > 3
    assert_same(tmp_path / "two", contents(tmp_path / "one"))


def test_float16_scales_and_other_groups(tmp_path: Path, tiny: Path) -> None:
    quantization = json.loads((tiny / "config.json").read_text())["text_config"]["quantization_config"]
    quantization["config_groups"]["group_0"]["weights"]["group_size"] = 64
    synthesize_checkpoint(tmp_path / "g64", overrides={"quantization_config": quantization})
    summary = dequantize_checkpoint(tmp_path / "g64", tmp_path / "plain")
    assert (summary.groups, summary.loose_groups) == (48 * 128, 0)
    assert verify_checkpoints(tmp_path / "g64", tmp_path / "plain").identical
    with pytest.raises(CheckpointError, match="groups of 64, the scheme has groups of 32"):
        quantize_checkpoint(tmp_path / "plain", tmp_path / "back", reference=tmp_path / "g64")


@pytest.mark.parametrize("scheme", [KIMI_QAT, RTN, Int4Scheme(32, 7.0, -4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_loose_groups_are_those_that_quantizing_changes(scheme: Int4Scheme, dtype: torch.dtype) -> None:
    """Every 16-bit scale with every largest magnitude, and every code besides it."""
    if dtype == torch.float32:
        generator = torch.Generator().manual_seed(0)
        bits = torch.randint(-(2**31), 2**31 - 1, (1 << 14,), generator=generator, dtype=torch.int32)
    else:
        bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    scales = bits.view(dtype)
    # The last scheme takes another way, and half of the time of all.
    scales = scales[scales.isfinite()][:: 16 if scheme.q_min > -7 else 1]
    for largest in range(9):
        codes = torch.arange(32) % (2 * largest + 1) - largest
        codes = codes.clamp(max=7).to(torch.int8).expand(len(scales), 32)
        weight = Int4Weight(pack(codes.contiguous()), scales[:, None], (len(scales), 32))
        values = dequantize(weight, dtype)
        finite = values.isfinite().all(1)
        again = quantize(torch.where(finite[:, None], values, 0), scheme)
        width = torch.int32 if dtype == torch.float32 else torch.int16
        same = (again.packed == weight.packed).all(1) & finite
        same &= again.scale[:, 0].view(width) == scales.view(width)
        if not finite.all() and scheme.q_min > -7:
            with pytest.raises(Int4Error):
                count_loose_groups(weight, scheme)
            continue
        assert count_loose_groups(weight, scheme) == len(scales) - int(same.sum())


def test_findings_keep_the_worst() -> None:
    findings = Findings()
    for number in range(30):
        findings.add_weight(f"w{number:02d}", number, 100)
    assert (findings.weights, findings.groups, findings.loose) == (30, 3000, 435)
    assert [entry.name for entry in findings.worst] == [f"w{n}" for n in range(29, 19, -1)]
