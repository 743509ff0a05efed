"""What does not fit raises on every rank, names the tensor, and leaves no output."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kimi_bridge.checkpoint import (
    FAMILIES,
    CheckpointReader,
    inspect_checkpoint,
    synthesize_checkpoint,
    verify_checkpoints,
)
from tests.megatron.ranks import Layout, Ranks

EXPERT = "language_model.model.layers.1.mlp.experts.5.up_proj.weight"
TEXT = "language_model.model.layers.0.self_attn.o_proj.weight"
ALL = Layout(tp=2, pp=2, ep=2, etp=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("good")
    return {family: synthesize_checkpoint(root / family, family=family) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def good(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


@pytest.fixture
def bad(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "bad"))


@pytest.fixture
def bad_int4(folders: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders["kimi_k25"], tmp_path / "bad"))


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], holding: str) -> None:
    """Rewrites the shard that holds a tensor, and the index, after `change`."""
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    filename = index["weight_map"][holding]
    with safe_open(folder / filename, "pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    change(tensors)
    save_file(tensors, folder / filename, {"format": "pt"})
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f != filename}
    index["weight_map"] |= dict.fromkeys(tensors, filename)
    index_path.write_text(json.dumps(index))


def remove(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.pop(name)


def set_to(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


def test_missing_tensor(bad: Path, ranks: Ranks) -> None:
    edit(bad, remove(TEXT), TEXT)
    for error in ranks.errors("just_load", src=str(bad), layout=ALL):
        assert error.kind == "CheckpointError"
        assert TEXT in error.message
        assert "missing" in error.message


@pytest.mark.parametrize("part", ["packed", "scale", "shape"])
def test_incomplete_triplet(part: str, bad_int4: Path, ranks: Ranks) -> None:
    edit(bad_int4, remove(f"{EXPERT}_{part}"), f"{EXPERT}_{part}")
    for error in ranks.errors("just_load", src=str(bad_int4), layout=ALL):
        assert error.kind == "CheckpointError"
        assert f"{EXPERT}_{part}" in error.message


def test_missing_expert(bad: Path, ranks: Ranks) -> None:
    parts = [part for part in CheckpointReader(bad).names() if part.startswith(EXPERT)]
    assert len(parts) in (1, 3)
    for part in parts:
        edit(bad, remove(part), part)
    for error in ranks.errors("just_load", src=str(bad), layout=ALL):
        assert error.kind == "CheckpointError"
        assert EXPERT in error.message


def test_misshaped_tensor(bad: Path, ranks: Ranks) -> None:
    edit(bad, set_to(TEXT, torch.zeros(128, 32, dtype=torch.bfloat16)), TEXT)
    for error in ranks.errors("just_load", src=str(bad), layout=ALL):
        assert error.kind == "CheckpointError"
        assert TEXT in error.message
        assert "[128, 32]" in error.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.float8_e4m3fn])
def test_a_dtype_that_the_model_would_round(dtype: torch.dtype, bad: Path, ranks: Ranks) -> None:
    edit(bad, lambda tensors: tensors.update({TEXT: tensors[TEXT].to(dtype)}), TEXT)
    for error in ranks.errors("just_load", src=str(bad), layout=ALL):
        assert error.kind == "CheckpointError"
        assert f"{TEXT} is {dtype}" in error.message


@pytest.mark.parametrize(
    "name", ["language_model.model.embed_tokens.weight", "language_model.lm_head.weight"]
)
def test_too_few_tokens(name: str, bad: Path, ranks: Ranks) -> None:
    """Megatron's parameter has rows of padding, which are no place for missing tokens."""
    edit(bad, lambda tensors: tensors.update({name: tensors[name][:1000].clone()}), name)
    for error in ranks.errors("just_load", src=str(bad), layout=ALL):
        assert error.kind == "CheckpointError"
        assert f"{name} is [1000, " in error.message


def test_a_projector_of_the_other_family(bad: Path, ranks: Ranks) -> None:
    own, other = ("mm_projector.", "multi_modal_projector.")
    names = CheckpointReader(bad).names()
    if not any(name.startswith(own) for name in names):
        own, other = other, own
    name = next(name for name in names if name.startswith(own))
    renamed = other + name.removeprefix(own)
    edit(bad, lambda tensors: tensors.update({renamed: tensors.pop(name)}), name)
    for error in ranks.errors("just_load", src=str(bad), layout=ALL):
        assert error.kind == "CheckpointError"
        assert renamed in error.message


def test_a_head_that_is_tied_and_there(bad: Path, ranks: Ranks) -> None:
    config = json.loads((bad / "config.json").read_text())
    (bad / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    for error in ranks.errors("just_load", src=str(bad), layout=Layout(tp=2, ep=2, etp=1)):
        assert error.kind == "CheckpointError"
        assert "tie_word_embeddings" in error.message


def test_mistyped_packed(bad_int4: Path, ranks: Ranks) -> None:
    edit(
        bad_int4,
        lambda tensors: tensors.update({f"{EXPERT}_packed": tensors[f"{EXPERT}_packed"].long()}),
        f"{EXPERT}_packed",
    )
    for error in ranks.errors("just_load", src=str(bad_int4), layout=ALL):
        assert error.kind == "CheckpointError"
        assert f"{EXPERT}_packed" in error.message


def test_scale_that_is_not_finite_is_named_on_all_ranks(bad_int4: Path, ranks: Ranks) -> None:
    # Only one rank reads this expert; the others must hear of it.
    scale = f"{EXPERT}_scale"
    edit(bad_int4, lambda tensors: tensors[scale].view(-1)[7].fill_(float("inf")), scale)
    for error in ranks.errors("just_load", src=str(bad_int4), layout=ALL):
        assert error.kind == "CheckpointError"
        assert f"{EXPERT}_scale" in error.message


def test_extra_text_tensor(bad: Path, ranks: Ranks) -> None:
    extra = "language_model.model.layers.9.input_layernorm.weight"
    edit(bad, set_to(extra, torch.ones(128, dtype=torch.bfloat16)), TEXT)
    for error in ranks.errors("just_load", src=str(bad), layout=ALL):
        assert error.kind == "CheckpointError"
        assert extra in error.message


def test_tensor_outside_the_language_model(bad: Path, ranks: Ranks) -> None:
    edit(bad, set_to("audio_tower.proj.weight", torch.ones(3, dtype=torch.bfloat16)), TEXT)
    for error in ranks.errors("just_load", src=str(bad), layout=ALL):
        assert "audio_tower.proj.weight" in error.message


def test_rotary_frequencies_come_through(bad: Path, ranks: Ranks, tmp_path: Path) -> None:
    """Some published checkpoints keep them, in shapes of their own; no model has a place for them."""
    name = "language_model.model.layers.2.self_attn.rotary_emb.inv_freq"
    edit(bad, set_to(name, torch.rand(56)), TEXT)
    ranks.run("round_trip", src=str(bad), dst=str(tmp_path / "out"), layout=ALL)
    assert verify_checkpoints(bad, tmp_path / "out").identical
    assert name in CheckpointReader(tmp_path / "out")
    assert inspect_checkpoint(bad).problems == []


def test_truncated_shard(bad: Path, ranks: Ranks) -> None:
    shard = bad / json.loads((bad / "model.safetensors.index.json").read_text())["weight_map"][TEXT]
    shard.write_bytes(shard.read_bytes()[:-100])
    for error in ranks.errors("just_load", src=str(bad), layout=ALL):
        assert error.kind == "CheckpointError"
        assert shard.name in error.message


def test_index_that_leaves_the_folder(bad: Path, ranks: Ranks) -> None:
    index_path = bad / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"][TEXT] = "../stolen.safetensors"
    index_path.write_text(json.dumps(index))
    for error in ranks.errors("just_load", src=str(bad), layout=ALL):
        assert "../stolen.safetensors" in error.message


def test_wrong_architecture(bad: Path, ranks: Ranks) -> None:
    config = json.loads((bad / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (bad / "config.json").write_text(json.dumps(config))
    for error in ranks.errors("just_load", src=str(bad), layout=ALL):
        assert "LlamaForCausalLM" in error.message


def test_parameter_without_a_mapping(good: Path, ranks: Ranks) -> None:
    for error in ranks.errors("unmapped_parameter", src=str(good)):
        assert error.kind == "CheckpointError"
        assert "decoder.layers.0.extra" in error.message


def test_model_with_fewer_layers(good: Path, ranks: Ranks) -> None:
    for error in ranks.errors("fewer_layers", src=str(good)):
        assert error.kind == "CheckpointError"
        assert "layers.2." in error.message
        assert "truncate" in error.message


def test_model_of_another_width(good: Path, ranks: Ranks) -> None:
    for error in ranks.errors("wider_model", src=str(good)):
        assert error.kind == "CheckpointError"
        assert "layers.0.mlp.gate_proj.weight" in error.message


def test_layout_that_does_not_fit(good: Path, ranks: Ranks) -> None:
    for error in ranks.errors("just_load", src=str(good), layout=Layout(tp=8)):
        assert error.kind == "KimiBridgeError"
        assert "--nproc_per_node 8" in error.message


def test_group_split_by_tensor_parallelism(tmp_path: Path, ranks: Ranks) -> None:
    synthesize_checkpoint(tmp_path / "narrow", overrides={"moe_intermediate_size": 32})
    for error in ranks.errors("just_load", src=str(tmp_path / "narrow"), layout=Layout(tp=2)):
        assert "expert_tensor_parallel_size" in error.message


def test_nan_on_one_rank_stops_all_and_leaves_nothing(
    folders: dict[str, Path], ranks: Ranks, tmp_path: Path
) -> None:
    # Of INT4 weights, which cannot hold it. Plain ones leave as they are.
    src = str(folders["kimi_k25"])
    for error in ranks.errors("nan_on_one_rank", src=src, dst=str(tmp_path / "out"), layout=ALL):
        assert error.kind == "Int4Error"
    assert not (tmp_path / "out").exists()


def test_destination_that_holds_a_checkpoint(good: Path, ranks: Ranks, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    for error in ranks.errors("export_over", src=str(good), dst=str(tmp_path / "out")):
        assert error.kind == "CheckpointError"
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}


def test_adapters_in_the_model(good: Path, ranks: Ranks, tmp_path: Path) -> None:
    for error in ranks.errors("adapters", src=str(good), dst=str(tmp_path / "out")):
        assert "adapter" in error.message
    assert not (tmp_path / "out").exists()


def test_request_for_vision_parameters(good: Path, ranks: Ranks) -> None:
    for error in ranks.errors("vision_request", src=str(good)):
        assert "language_model_only" in error.message
    for error in ranks.errors("text_only", src=str(good), language_model_only=False):
        assert "language_model_only=True" in error.message
    ranks.run("text_only", src=str(good), language_model_only=True)


def test_values_that_half_precision_cannot_hold(bad: Path, ranks: Ranks, tmp_path: Path) -> None:
    edit(bad, lambda tensors: tensors[TEXT].view(-1)[3].fill_(1e5), TEXT)
    arguments = {"src": str(bad), "dst": str(tmp_path / "out"), "layout": ALL, "dtype": "float16"}
    for error in ranks.errors("export_as", **arguments):
        assert TEXT in error.message
        assert "torch.float16 cannot hold" in error.message
    assert not (tmp_path / "out").exists()


def test_the_exports_config_states_its_dtype(good: Path, ranks: Ranks, tmp_path: Path) -> None:
    ranks.run("export_as", src=str(good), dst=str(tmp_path / "out"), layout=ALL, dtype="float32")
    before, after = (json.loads((path / "config.json").read_text()) for path in (good, tmp_path / "out"))
    stated = {key for key in ("torch_dtype", "dtype") if key in before["text_config"]}
    assert stated
    assert all(after["text_config"][key] == "float32" for key in stated)
