"""Fake INT4: the experts compute with what would be served, and the masters learn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kimi_bridge.checkpoint import CheckpointReader, quantize_checkpoint, synthesize_checkpoint
from tests.megatron.conftest import needs_megatron_checkpoints
from tests.megatron.ranks import Layout, Ranks

ONE = Layout()
EP2 = Layout(ep=2, etp=1)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("qat")
    for convention in ("kimi", "rtn", "mixed"):
        synthesize_checkpoint(folder / convention, seed=5, convention=convention)
    synthesize_checkpoint(folder / "bf16", int4=False, convention="rtn")
    synthesize_checkpoint(folder / "kimi_vl", family="kimi_vl")
    quantize_checkpoint(folder / "kimi_vl", folder / "kimi_vl_int4")
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("source", ["kimi", "rtn", "mixed", "kimi_vl_int4"])
@pytest.mark.parametrize(
    ("layout", "recompute", "microbatches"),
    [(ONE, False, 1), (ONE, True, 1), (EP2, False, 3)],
    ids=["plain", "recompute", "ep2-microbatches"],
)
def test_gradients_are_the_straight_through_ones(
    source: str, layout: Layout, recompute: bool, microbatches: int, ranks: Ranks, sources: dict[str, Path]
) -> None:
    result = ranks.run(
        "qat_gradients",
        src=str(sources[source]),
        layout=layout,
        recompute=recompute,
        microbatches=microbatches,
    )
    assert result["loss"] == result["expected_loss"]
    assert result["loss"] != result["plain_loss"], "without fake INT4 the loss must be another"
    assert result["equal"]
    assert result["unchanged"], "the masters must be back in place"
    assert result["expert_gradients"] > 10
    assert result["served"] > 0
    report = result["report"]
    assert report.trained == 4 * 8
    assert report.frozen == report.snapped == 0
    assert f"{report.groups:,} groups" in result["text"]
    assert (report.not_fixed > 0) == (source in ("rtn", "mixed"))


@pytest.mark.parametrize("source", ["kimi", "rtn", "mixed"])
def test_the_export_is_what_the_last_forward_computed_with(
    source: str, ranks: Ranks, sources: dict[str, Path], tmp_path: Path
) -> None:
    result = ranks.run(
        "qat_exports_what_it_computed_with", src=str(sources[source]), dst=str(tmp_path / "out")
    )
    assert result["losses"][-1] < result["losses"][0]
    reader, before = CheckpointReader(tmp_path / "out"), CheckpointReader(sources[source])
    compared = changed = 0
    for name, values in result["seen"].items():
        layer, expert, linear = name.split(".")[2], name.split(".")[6], name.split(".")[7]
        prefix = f"language_model.model.layers.{layer}.mlp.experts.{expert}."
        parts = ("gate_proj", "up_proj") if linear == "linear_fc1" else ("down_proj",)
        exported = torch.cat([reader.weight(f"{prefix}{part}.weight") for part in parts])
        assert torch.equal(exported.view(torch.int16), values.view(torch.int16)), name
        compared += 1
        changed += not torch.equal(exported, torch.cat([before.weight(f"{prefix}{p}.weight") for p in parts]))
    assert compared == 32
    assert changed > 16, "training must have moved codes"


@pytest.mark.parametrize(("spec", "layout"), [("local", ONE), ("te", Layout(tp=2, pp=2, ep=2, etp=1))])
@pytest.mark.parametrize("source", ["kimi", "rtn", "mixed"])
def test_frozen_int4_experts_are_recognised_and_left_alone(
    source: str, spec: str, layout: Layout, ranks: Ranks, sources: dict[str, Path]
) -> None:
    result = ranks.run("qat_frozen", src=str(sources[source]), layout=layout, spec=spec)
    assert result["changed"] == []
    assert result["wrapped"] == []
    assert result["report"].snapped == 0
    assert result["report"].frozen == 32
    assert (result["report"].not_fixed > 0) == (source != "kimi")
    assert result["again"] == result["report"]


@pytest.mark.parametrize("source", ["bf16", "kimi_vl"])
def test_frozen_bf16_experts_are_snapped_once(source: str, ranks: Ranks, sources: dict[str, Path]) -> None:
    result = ranks.run("qat_frozen", src=str(sources[source]), layout=ONE, spec="local")
    assert result["changed"]
    assert all(".mlp.experts." in name for name in result["changed"])
    assert result["report"].snapped == len(result["changed"])
    assert result["wrapped"] == []
    assert result["again"].snapped == 0


@needs_megatron_checkpoints
def test_after_a_megatron_checkpoint_the_bridge_says_where_weights_came_from(
    ranks: Ranks, sources: dict[str, Path], tmp_path: Path
) -> None:
    arguments = {"src": str(sources["rtn"])}
    unknown = ranks.run(
        "qat_after_a_megatron_checkpoint", megatron=str(tmp_path / "a"), with_bridge=False, **arguments
    )
    known = ranks.run(
        "qat_after_a_megatron_checkpoint", megatron=str(tmp_path / "b"), with_bridge=True, **arguments
    )
    assert unknown.not_fixed == 0
    assert known.not_fixed > 0
    assert known.groups == unknown.groups


@pytest.mark.parametrize("source", ["kimi", "rtn"])
def test_distributed_optimizer(source: str, ranks: Ranks, sources: dict[str, Path]) -> None:
    result = ranks.run("qat_main_grad", src=str(sources[source]), layout=EP2)
    for filled, moved in result["steps"]:
        assert filled > 8
        assert moved > 8
    assert result["loss"] == result["expected"], "a stale served value was used"


def test_pipeline_stages_with_microbatches_in_flight(ranks: Ranks, sources: dict[str, Path]) -> None:
    results = ranks.run_all("qat_pipeline", src=str(sources["rtn"]), layout=Layout(pp=2, ep=2))
    for result in results:
        assert not hasattr(result, "trace"), result.trace
        assert result["equal"]
        assert result["losses"] == result["expected_losses"]
        assert result["report"].trained == 4 * 8
    # The first stage holds the dense layer alone, the last one both layers with experts.
    assert sorted(result["expert_gradients"] for result in results) == [0, 0, 16, 16]
    assert sum(len(result["losses"]) == 4 for result in results) == 2


def test_a_model_without_routed_experts(ranks: Ranks, sources: dict[str, Path]) -> None:
    for error in ranks.errors("qat_without_experts", src=str(sources["kimi"])):
        assert error.kind == "KimiBridgeError"
        assert "no routed experts" in error.message
