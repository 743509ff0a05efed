"""Which weights are INT4: by the quantization_config, as compressed-tensors itself would match them."""

import copy
import json
from typing import Any

import pytest
import torch
from checkpoint_folders import DATA, PREFIX, real_inventory
from compressed_tensors.utils.match import match_named_modules

from kimi_bridge.checkpoint import KimiK25Config, read_quantization
from kimi_bridge.checkpoint.quantization import without_quantization
from kimi_bridge.checkpoint.triplets import PARTS
from kimi_bridge.errors import CheckpointError

FORMS = ("config.json", "config.transformers5.json")
CONFIG = json.loads((DATA / "config.json").read_text())


def changed(**weights: Any) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    quantization(config)["config_groups"]["group_0"]["weights"].update(weights)
    return config


def quantization(config: dict[str, Any]) -> dict[str, Any]:
    return config["text_config"]["quantization_config"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loaded", [False, True])
def test_int4_weights_are_exactly_the_published_triplets(form: str, loaded: bool) -> None:
    config = json.loads((DATA / form).read_text())
    found = read_quantization(KimiK25Config(**config) if loaded else config)
    assert found is not None
    assert found.group_size == 32
    inventory = real_inventory()
    modules = {name.rpartition(".")[0] for name in inventory}
    triplets = {module for module in modules if all(f"{module}.{part}" in inventory for part in PARTS)}
    assert len(triplets) == 60 * 384 * 3
    assert {module for module in modules if found.is_int4(f"{module}.weight")} == triplets
    assert not any(found.is_int4(name) for name in inventory if not name.endswith(".weight"))


@pytest.mark.parametrize(
    ("targets", "ignore"),
    [
        (["Linear"], ["lm_head", "re:.*self_attn.*"]),
        (["Linear"], ["Linear"]),
        (["re:.*experts.*"], []),
        (["re:.*down_proj", "lm_head"], ["re:model.layers.0.*"]),
        (["model.layers.1.mlp.experts.0.up_proj"], []),
        (["LinearBase"], []),
    ],
)
def test_matching_agrees_with_compressed_tensors_on_a_model(targets: list[str], ignore: list[str]) -> None:
    """A module tree with the names and classes of DeepSeek-V3, matched by compressed-tensors."""
    linear = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    names = {f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in linear}
    for mlp in ("0.mlp", "1.mlp.shared_experts", "1.mlp.experts.0", "1.mlp.experts.1"):
        names |= {f"model.layers.{mlp}.{name}_proj" for name in ("gate", "up", "down")}
    model = torch.nn.Module()
    for name in sorted(names | {"lm_head"}):
        put(model, name, torch.nn.Linear(32, 32, device="meta"))
    put(model, "model.embed_tokens", torch.nn.Embedding(32, 32, device="meta"))
    put(model, "model.norm", torch.nn.RMSNorm(32, device="meta"))
    matched = match_named_modules(model, targets, ignore)
    expected = {name for name, module in matched if isinstance(module, torch.nn.Linear)}
    assert expected or "Linear" in ignore or targets == ["LinearBase"]

    config = copy.deepcopy(CONFIG)
    quantization(config)["config_groups"]["group_0"]["targets"] = targets
    quantization(config)["ignore"] = ignore
    found = read_quantization(config)
    assert found is not None
    every = [name for name, module in model.named_modules() if hasattr(module, "weight")]
    assert {name for name in every if found.is_int4(f"language_model.{name}.weight")} == expected


def put(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        if not hasattr(model, parent):
            model.add_module(parent, torch.nn.Module())
        model = getattr(model, parent)
    model.add_module(last, module)


@pytest.mark.parametrize(
    "name",
    [
        "vision_tower.encoder.blocks.0.mlp.up_proj.weight",
        "mm_projector.gate_proj.weight",
        PREFIX + "1.mlp.gate.weight",
        PREFIX + "1.mlp.gate.e_score_correction_bias",
        PREFIX + "1.mlp.experts.0.up_proj.weight_packed",
        PREFIX + "1.input_layernorm.weight",
    ],
)
def test_never_int4(name: str) -> None:
    config = copy.deepcopy(CONFIG)
    quantization(config)["config_groups"]["group_0"]["targets"] = ["re:.*"]
    quantization(config)["ignore"] = []
    found = read_quantization(config)
    assert found is not None
    assert not found.is_int4(name)
    assert found.is_int4(PREFIX + "1.mlp.experts.0.up_proj.weight")


def test_other_group_sizes() -> None:
    found = read_quantization(changed(group_size=128))
    assert found is not None
    assert found.group_size == 128


def test_no_quantization_config() -> None:
    config = copy.deepcopy(CONFIG)
    del config["text_config"]["quantization_config"]
    assert read_quantization(config) is None
    assert read_quantization(KimiK25Config(**config)) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(num_bits=8), "num_bits 8"),
        (changed(symmetric=False), "symmetric False"),
        (changed(type="float"), "type 'float'"),
        (changed(strategy="channel", group_size=None), "strategy 'channel'"),
        (changed(actorder="group"), "actorder 'group'"),
        (changed(group_size=12), "group_size 12"),
        (changed(num_bits="four"), "cannot be read"),
    ],
)
def test_unsupported_weights(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_quantization(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "int-quantized"}, "format 'int-quantized'"),
        ({"quant_method": "fp8"}, "quant_method 'fp8'"),
        ({"config_groups": {}}, "pack-quantized"),
        ({"config_groups": 3}, "cannot be read"),
    ],
)
def test_unsupported_formats(change: dict[str, Any], message: str) -> None:
    config = copy.deepcopy(CONFIG)
    quantization(config).update(change)
    with pytest.raises(CheckpointError, match=message):
        read_quantization(config)


def test_quantized_activations_are_refused() -> None:
    config = copy.deepcopy(CONFIG)
    group = quantization(config)["config_groups"]["group_0"]
    group["input_activations"] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor"}
    with pytest.raises(CheckpointError, match="more than weights"):
        read_quantization(config)


def test_two_group_sizes_are_refused() -> None:
    config = copy.deepcopy(CONFIG)
    groups = quantization(config)["config_groups"]
    groups["group_1"] = copy.deepcopy(groups["group_0"])
    groups["group_1"]["weights"]["group_size"] = 64
    with pytest.raises(CheckpointError, match=r"groups of \[32, 64\]"):
        read_quantization(config)


def test_levels_that_disagree_are_refused() -> None:
    config = json.loads((DATA / "config.transformers5.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head"]
    with pytest.raises(CheckpointError, match="disagree"):
        read_quantization(config)


def test_without_quantization_leaves_everything_else() -> None:
    config = json.loads((DATA / "config.transformers5.json").read_text())
    before = copy.deepcopy(config)
    plain = without_quantization(config)
    assert config == before
    assert read_quantization(plain) is None
    del before["quantization_config"], before["text_config"]["quantization_config"]
    assert plain == before
