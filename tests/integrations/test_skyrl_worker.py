"""SkyRL 0.3.0's own Megatron worker on an INT4 checkpoint, without the plugin and with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kimi_bridge.checkpoint import CheckpointReader, synthesize_checkpoint, verify_checkpoints
from tests.integrations.skyrl_worker import ALL_LINEAR
from tests.megatron.ranks import Layout, Ranks

pytest.importorskip("skyrl")

EP4 = Layout(ep=4, etp=1)
TP2 = Layout(tp=2, ep=2, etp=1)
TP2PP2 = Layout(tp=2, pp=2, ep=2, etp=1)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("skyrl")
    layers = {"num_hidden_layers": 4}
    for convention in ("kimi", "mixed", "rtn"):
        synthesize_checkpoint(folder / convention, convention=convention, overrides=layers)
    synthesize_checkpoint(folder / "bf16", int4=False, overrides=layers)
    return {path.name: str(path) for path in folder.iterdir()}


def test_without_the_plugin_skyrl_builds_a_vision_model(ranks: Ranks, sources: dict[str, str]) -> None:
    result = ranks.run("without", src=sources["kimi"])
    assert result["bridge"] == "KimiK25VLBridge"
    assert result["provider"] == "KimiK25VLModelProvider"
    assert "modeling_kimi_k25.py" in result["error"], "the vision tower is the checkpoint's own code"


@pytest.mark.parametrize("as_bf16_base", [False, True], ids=["model.path", "bf16_base_path"])
@pytest.mark.parametrize("layout", [EP4, TP2PP2], ids=str)
def test_with_it_the_model_is_the_checkpoint(
    layout: Layout, as_bf16_base: bool, ranks: Ranks, sources: dict[str, str], tmp_path: Path
) -> None:
    bridge = ranks.run(
        "round_trip",
        src=sources["mixed"],
        dst=str(tmp_path / "out"),
        layout=layout,
        as_bf16_base=as_bf16_base,
    )
    assert bridge == "kimi_bridge.megatron.bridge.KimiK25TextBridge"
    report = verify_checkpoints(Path(sources["mixed"]), tmp_path / "out")
    assert report.identical, report


def test_whoever_registers_later_is_behind(ranks: Ranks, sources: dict[str, str]) -> None:
    assert ranks.run("registered_late", src=sources["kimi"]) == "kimi_bridge.megatron.bridge"


def test_language_model_only_off_says_what_to_set(ranks: Ranks, sources: dict[str, str]) -> None:
    for error in ranks.errors("vision", src=sources["kimi"]):
        assert error.kind == "KimiBridgeError"
        assert "trainer.policy.language_model_only=true" in error.message


@pytest.mark.parametrize(
    "targets", [ALL_LINEAR, "[linear_proj,linear_fc1,linear_fc2]"], ids=["all", "no latents"]
)
@pytest.mark.parametrize("layout", [EP4, TP2], ids=str)
def test_skyrls_adapter_is_this_librarys(
    layout: Layout, targets: str, ranks: Ranks, sources: dict[str, str], tmp_path: Path
) -> None:
    loaded = ranks.run("adapters", src=sources["kimi"], dst=str(tmp_path), layout=layout, targets=targets)
    assert loaded == str(tmp_path / "skyrl")
    theirs, ours = adapter(tmp_path / "skyrl"), adapter(tmp_path / "peft")
    assert theirs[0]["r"] == ours[0]["r"] == 8
    assert theirs[0]["lora_alpha"] == ours[0]["lora_alpha"] == 24
    assert theirs[0]["base_model_name_or_path"] == sources["kimi"]
    assert set(theirs[1]) == set(ours[1])
    assert any(".experts.7." in name for name in ours[1])
    assert any(".kv_a_proj_with_mqa." in name for name in ours[1]) == (targets == ALL_LINEAR)
    for name, tensor in ours[1].items():
        assert tensor.abs().sum() > 0, name
        assert torch.equal(theirs[1][name], tensor.float()), name


def adapter(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = json.loads((folder / "adapter_config.json").read_text())
    return config, load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("bucketed", [False, True], ids=["one-by-one", "buckets"])
def test_the_weights_of_a_sync_are_this_librarys(
    bucketed: bool, ranks: Ranks, sources: dict[str, str], tmp_path: Path
) -> None:
    result = ranks.run(
        "sync", src=sources["bf16"], dst=str(tmp_path / "out"), layout=TP2PP2, bucketed=bucketed
    )
    exported = CheckpointReader(tmp_path / "out")
    text = {name for name in exported.names() if name.startswith("language_model.")}
    assert set(result["sent"]) == set(result["metadata"]["names"]) == text
    for name, shape in zip(result["metadata"]["names"], result["metadata"]["shapes"], strict=True):
        assert list(result["sent"][name].shape) == shape
        assert torch.equal(result["sent"][name], exported.tensor(name).to(torch.bfloat16)), name


def test_packed_codes_are_never_cast(ranks: Ranks, sources: dict[str, str]) -> None:
    result = ranks.run("sync_of_codes", src=sources["kimi"])
    assert result["dtypes"] == ["torch.bfloat16"], "what SkyRL would have sent without the guard"
    assert len(result["errors"]) == 2
    assert all("merge_lora=false" in error for error in result["errors"])


@pytest.mark.parametrize("targets", ["all-linear", "[linear_proj,linear_nonsense]", "[linear_kv_up_proj]"])
def test_targets_that_are_no_module_or_not_served(
    targets: str, ranks: Ranks, sources: dict[str, str], tmp_path: Path
) -> None:
    arguments = {"dst": str(tmp_path), "layout": Layout(), "targets": targets}
    for error in ranks.errors("adapters", src=sources["kimi"], **arguments):
        assert error.kind == "KimiBridgeError"
        assert f'"trainer.policy.model.lora.target_modules={ALL_LINEAR}"' in error.message


@pytest.mark.parametrize(("source", "divisor", "q_min"), [("kimi", 7.0, -7), ("rtn", 7.5, -8)])
def test_fake_quantized_experts_are_skyrls(
    source: str, divisor: float, q_min: float, ranks: Ranks, sources: dict[str, str]
) -> None:
    result = ranks.run(
        "fake_quantized_experts", src=sources[source], layout=EP4, divisor=divisor, q_min=q_min
    )
    assert (result["linears"], result["weights"]) == (6, 12)
    assert result["replaced"]
    assert result["restored"]
    assert result["equal"]
    # The grid of a Kimi checkpoint is a fixed point; amax/7.5 is not.
    assert (result["changed"] > 0) == (source == "rtn")


def test_a_training_step(ranks: Ranks, sources: dict[str, str], tmp_path: Path) -> None:
    """Forward, backward and optimizer are SkyRL's; only kernels without a CPU form are others."""
    result = ranks.run("training_steps", src=sources["kimi"], dst=str(tmp_path / "out"), layout=EP4)
    for step in result["steps"]:
        assert step["grad_norm"] > 0
    assert result["gain"] > 0.01, "what was rewarded must become likelier"
    assert result["frozen"]
    assert result["fake quantized"] > 0, "the experts' GEMMs must have got weights of the fake quantization"
    config, tensors = adapter(tmp_path / "out")
    assert config["r"] == 8
    trained = [tensor for name, tensor in tensors.items() if "lora_B" in name]
    assert sum(tensor.abs().sum() > 0 for tensor in trained) > len(trained) // 2
