"""The bridge and fake INT4 on a GPU: Transformer Engine's own grouped GEMMs, NCCL, Megatron's DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kimi_bridge.checkpoint import synthesize_checkpoint, verify_checkpoints

pytest.importorskip("megatron.bridge", reason="needs the megatron extra")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# The kernels of fused attention take MLA's real head widths.
WIDTHS = {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 256,
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gpu")
    for convention in ("kimi", "rtn", "mixed"):
        synthesize_checkpoint(folder / convention, convention=convention, overrides=WIDTHS)
    synthesize_checkpoint(folder / "kimi_vl", family="kimi_vl", overrides=WIDTHS | {"q_lora_rank": None})
    return {path.name: path for path in folder.iterdir()}


def build(src: Path, ddp: bool = False) -> tuple[Any, list[Any]]:
    from megatron.bridge import AutoBridge
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from kimi_bridge.megatron import runtime

    runtime.initialize(runtime.Layout())
    bridge = AutoBridge.from_hf_pretrained(str(src))
    provider = bridge.to_megatron_provider()
    provider.gradient_accumulation_fusion = False
    model = runtime.build_model(provider, runtime.Layout())
    if ddp:
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        model = [DistributedDataParallel(provider, settings, chunk) for chunk in model]
    return bridge, model


def loss_of(model: list[Any], seed: int = 0) -> torch.Tensor:
    ids = torch.randint(0, 1280, (1, 257), device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
    positions = torch.arange(256, device="cuda")[None]
    return model[0](ids[:, :-1], positions, None, labels=ids[:, 1:]).mean()


@pytest.mark.parametrize("source", ["kimi", "rtn", "mixed", "kimi_vl"])
def test_round_trip(source: str, sources: dict[str, Path], tmp_path: Path) -> None:
    from kimi_bridge.megatron import export_checkpoint, iter_int4_weights

    bridge, model = build(sources[source])
    export_checkpoint(bridge, model, tmp_path / "out")
    assert verify_checkpoints(sources[source], tmp_path / "out").identical
    names = [name for bucket in iter_int4_weights(bridge, model, bucket_bytes=1 << 16) for name, _ in bucket]
    assert len(names) == len(set(names)) > (70 if source == "kimi_vl" else 150)


def test_kimi_vl_trains(sources: dict[str, Path]) -> None:
    """Transformer Engine's attention without query compression: gradients reach everything, and help."""
    _, model = build(sources["kimi_vl"], ddp=True)
    parameters = dict(model[0].named_parameters())
    assert not any(name.endswith("linear_q_proj.layer_norm_weight") for name in parameters)
    losses = []
    for _ in range(5):
        model[0].zero_grad_buffer()
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for param in parameters.values():
                norm = param.main_grad.norm()
                param.sub_((0.01 * param.float().norm() * param.main_grad / (norm + 1e-12)).to(param.dtype))
    queries = [p for name, p in parameters.items() if name.endswith("linear_q_proj.weight")]
    assert len(queries) == 3
    assert all(p.main_grad.any() for p in queries)
    assert losses[-1] < losses[0] - 0.1, losses


@pytest.mark.parametrize("fused", [False, True], ids=["autograd", "fused-accumulation"])
@pytest.mark.parametrize("source", ["kimi", "rtn", "mixed"])
def test_training_on_served_values(source: str, fused: bool, sources: dict[str, Path]) -> None:
    """Loss and main_grad are those of a model that holds the served values, over two microbatches."""
    from transformer_engine.pytorch import GroupedLinear

    from kimi_bridge.int4 import KIMI_QAT, dequantize, requantize
    from kimi_bridge.megatron import disable_fake_int4, enable_fake_int4, transfer
    from kimi_bridge.megatron.shards import local_shards

    bridge, model = build(sources[source], ddp=True)
    for module in model[0].modules():
        if isinstance(module, GroupedLinear):
            module.fuse_wgrad_accumulation = fused
    generator = torch.Generator("cuda").manual_seed(1)
    with torch.no_grad():
        for name, param in model[0].named_parameters():
            if ".mlp.experts." in name:
                noise = torch.randn(3, param.shape[1], device="cuda", generator=generator)
                param[:3] += (0.003 * noise).to(param.dtype)

    def step() -> tuple[float, dict[str, torch.Tensor]]:
        model[0].zero_grad_buffer()
        total = 0.0
        for microbatch in range(2):
            loss = loss_of(model, microbatch)
            loss.backward()
            total += loss.item()
        return total, {name: p.main_grad.clone() for name, p in model[0].named_parameters()}

    masters = {name: p.detach().clone() for name, p in model[0].named_parameters()}
    report = enable_fake_int4(model)
    loss, gradients = step()
    assert all(torch.equal(p, masters[name]) for name, p in model[0].named_parameters())
    disable_fake_int4(model)
    plain, _ = step()
    reader = bridge.hf_pretrained.state.source.reader
    with torch.no_grad():
        for shard in local_shards(bridge.get_conversion_tasks(transfer.unwrap(model)), reader):
            if reader.is_triplet(shard.weight):
                reference = reader.int4(shard.weight).to("cuda")
                shard.tensor.copy_(dequantize(requantize(shard.tensor, reference, KIMI_QAT)))
    expected_loss, expected = step()
    assert loss == expected_loss != plain
    for name, gradient in expected.items():
        assert torch.equal(gradients[name], gradient), name
    experts = [name for name in expected if ".mlp.experts." in name and expected[name].any()]
    assert len(experts) > 16
    assert (report.not_fixed > 0) == (source != "kimi")
