"""What the ranks run for adapters. Each function runs on every rank; its result must pickle."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from megatron.bridge import AutoBridge
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from megatron.core import dist_checkpointing, parallel_state
from safetensors.torch import load_file

import kimi_bridge.megatron as kimi
from kimi_bridge.adapter import Adapter
from kimi_bridge.errors import KimiBridgeError
from kimi_bridge.megatron import jobs, runtime
from kimi_bridge.megatron.runtime import Layout
from tests.megatron.forward import local_spec_provider, log_probabilities
from tests.megatron.reference import reference_model

# Kimi-VL has the third in place of the first two.
MLA = [
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_q_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "linear_proj",
]
MLP = ["linear_fc1", "linear_fc2"]
CANONICAL_MLP = ["linear_fc1_gate", "linear_fc1_up", "linear_fc2"]
DIM, ALPHA = 16, 24

# Every variant of the issue: what is trained, on which experts it can be.
VARIANTS: dict[str, Any] = {
    "per-expert": {"share_expert_adapters": False},
    "normalized": {"share_expert_adapters": False, "normalize_moe_lora": True},
    "shared": {"share_expert_adapters": True},
    "shared-normalized": {"share_expert_adapters": True, "normalize_moe_lora": True},
    "outer": {"experts_shared_outer_loras": True},
    "outer-normalized": {"experts_shared_outer_loras": True, "normalize_moe_lora": True},
    "canonical": {"share_expert_adapters": False},
    "canonical-normalized": {"share_expert_adapters": False, "normalize_moe_lora": True},
    "canonical-shared": {"share_expert_adapters": True},
    "attention": {"target_modules": MLA},
}


def make_lora(variant: str, **changes: Any) -> Any:
    canonical = variant.startswith("canonical")
    settings = {"target_modules": MLA + (CANONICAL_MLP if canonical else MLP), "dim": DIM, "alpha": ALPHA}
    return (CanonicalLoRA if canonical else LoRA)(**{**settings, **VARIANTS[variant], **changes})


def build(
    src: str, layout: Layout, lora: Any, spec: str = "grouped", dtype: torch.dtype | None = None
) -> tuple[AutoBridge, list[Any]]:
    """A loaded model with adapters in it. `spec`: "te", "local" or "grouped"; te cannot run forward here."""
    runtime.initialize(layout)
    bridge = AutoBridge.from_hf_pretrained(src)
    provider = bridge.to_megatron_provider(load_weights=False)
    if spec != "te":
        local_spec_provider(provider, dtype, grouped=spec == "grouped")
    provider.register_pre_wrap_hook(lambda model: lora(model, training=True))
    model = runtime.build_model(provider, layout)
    kimi.load_checkpoint(bridge, model)
    return bridge, model


def randomize(model: list[Any], scale: float = 0.02) -> None:
    """Adapters that change something, the same on ranks that hold the same."""
    for chunk in model:
        for name, param in chunk.named_parameters():
            if ".adapter." in name:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                param.data.copy_(torch.randn(param.shape, generator=generator) * scale)


def deltas(path: str | Path) -> dict[str, torch.Tensor]:
    """`scale * B A` in float32, by module."""
    adapter = Adapter(path)
    result = {}
    for module, spec in adapter.modules.items():
        a, b = adapter.tensors(module)
        result[module] = spec.scale * (b.float() @ a.float())
    return result


def parity(src: str, dst: str, variant: str, spec: str, layout: Layout) -> dict[str, float]:
    """Megatron with the adapter against transformers with the exported adapter merged, in float32.

    Also how far the adapter moves the log-probabilities, and how far its experts alone do.
    """
    lora = make_lora(variant)
    bridge, model = build(src, layout, lora, spec, torch.float32)
    if layout == Layout():
        randomize(model)
    else:
        # Other shards than the same names have elsewhere: the file says what is where.
        kimi.load_adapter_into(bridge, model, f"{dst}/peft")
    ids = torch.randint(0, 1280, (2, 48), generator=torch.Generator().manual_seed(0))
    # In training it insists on sequence parallelism beside tensor parallelism.
    model[0].eval()
    ours = log_probabilities(model[0], ids)
    assert ours.shape[-1] == 1280

    def distance(added: dict[str, torch.Tensor]) -> float:
        with torch.no_grad():
            theirs = reference_model(src, added)(ids).logits.float().log_softmax(-1)
        return (ours - theirs).abs().max().item()

    result = {}
    for target in ("peft", "vllm"):
        kimi.export_adapter(bridge, model, lora, f"{dst}/{target}", target=target, overwrite=True)
        dist.barrier()
        result[target] = distance(deltas(f"{dst}/{target}"))
    added = deltas(f"{dst}/peft")
    result["moved"] = distance({})
    result["moved by experts"] = distance({m: d for m, d in added.items() if ".experts." not in m})
    return result


def gradients(src: str, adapter: str, dst: str, variant: str, layout: Layout, spec: str) -> None:
    """The gradients of the experts' adapters, exported as if they were an adapter."""
    lora = make_lora(variant, target_modules=MLP)
    bridge, model = build(src, layout, lora, spec, torch.float32)
    kimi.load_adapter_into(bridge, model, adapter)
    model[0].eval()
    ids = torch.randint(0, 1280, (1, 32), generator=torch.Generator().manual_seed(0))
    wanted = torch.randn(32, 1280, generator=torch.Generator().manual_seed(1))
    (log_probabilities(model[0], ids)[0] * wanted).sum().backward()
    for name, param in model[0].named_parameters():
        if ".adapter." in name:
            param.data.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
    kimi.export_adapter(bridge, model, lora, dst, target="peft", expand_shared_experts=True)


def overlapped_shared_experts(src: str, layout: Layout) -> dict[str, float]:
    """The shared experts' linear_fc2 as moe_shared_expert_overlap uses it: parts of a sum, added up later.

    Largest differences to `x W + scale x A B` and its gradients, relative to the largest value.
    """
    lora = make_lora("per-expert", target_modules=["linear_fc2"])

    def overlap(model: list[Any]) -> list[Any]:
        for chunk in model:
            for name, module in chunk.named_modules():
                if name.endswith("shared_experts.linear_fc2"):
                    # What SharedExpertMLP sets; the rest of it wants CUDA streams.
                    module.explicit_expert_comm = True
        return lora(model, training=True)

    runtime.initialize(layout)
    bridge = AutoBridge.from_hf_pretrained(src)
    provider = bridge.to_megatron_provider(load_weights=False)
    local_spec_provider(provider, torch.float32)
    provider.register_pre_wrap_hook(overlap)
    model = runtime.build_model(provider, layout)
    kimi.load_checkpoint(bridge, model)
    [linear, *_] = [m for n, m in model[0].named_modules() if n.endswith("shared_experts.linear_fc2")]
    group, rank = parallel_state.get_tensor_model_parallel_group(), dist.get_rank() % layout.tp
    adapter = linear.adapter
    generator = torch.Generator().manual_seed(rank)
    for weight in (adapter.linear_in.weight, adapter.linear_out.weight):
        weight.data.normal_(generator=generator)

    def whole(part: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(layout.tp)]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim)

    base = whole(linear.to_wrap.weight.data, 1)
    a = whole(adapter.linear_in.weight.data, 1).requires_grad_()
    b = whole(adapter.linear_out.weight.data, 0).requires_grad_()
    generator.manual_seed(9)
    x = torch.randn(8, 1, base.shape[1], generator=generator)
    gradient = torch.randn(8, 1, base.shape[0], generator=generator)
    output, _ = linear(x.chunk(layout.tp, -1)[rank].contiguous())
    output.backward(gradient)
    total = output.detach().clone()
    dist.all_reduce(total, group=group)
    wanted = x @ base.T + adapter.alpha / adapter.dim * (x @ a.T @ b.T)
    wanted.backward(gradient)

    def apart(got: torch.Tensor, expected: torch.Tensor) -> float:
        return ((got - expected).abs().max() / expected.abs().max()).item()

    return {
        "output": apart(total, wanted.detach()),
        "A": apart(whole(adapter.linear_in.weight.grad, 1), a.grad),
        "B": apart(whole(adapter.linear_out.weight.grad, 0), b.grad),
    }


def make(src: str, dst: str, variant: str) -> None:
    """A random adapter, exported in both forms from an unsharded model."""
    lora = make_lora(variant)
    bridge, model = build(src, Layout(), lora, "te")
    randomize(model)
    for target in ("peft", "vllm"):
        kimi.export_adapter(bridge, model, lora, f"{dst}/{target}", target=target, expand_shared_experts=True)


def round_trip(
    src: str, adapter: str, dst: str, variant: str, layout: Layout, poison: bool = True
) -> dict[str, Any]:
    """Loads an adapter in a layout and exports it, to files, as a stream, and as upstream does."""
    lora = make_lora(variant)
    bridge, model = build(src, layout, lora, "te")
    (poison_adapters if poison else randomize)(model)
    report = kimi.load_adapter_into(bridge, model, f"{adapter}/peft")
    for target in ("peft", "vllm"):
        kimi.export_adapter(
            bridge,
            model,
            lora,
            f"{dst}/{target}",
            target=target,
            expand_shared_experts=True,
            base_name=str(src),
        )
    streamed = dict(kimi.iter_adapter_tensors(bridge, model, lora, target="vllm"))
    upstream = {
        f"base_model.model.{name}": tensor
        for name, tensor in bridge.export_adapter_weights(model, show_progress=False)
    }
    dist.barrier()
    ours = load_file(f"{dst}/peft/adapter_model.safetensors")
    return {
        "stream": same(streamed, load_file(f"{dst}/vllm/adapter_model.safetensors")),
        "upstream": sorted(
            name
            for name in upstream.keys() | ours.keys()
            if not same({name: upstream.get(name)}, {name: ours.get(name)})
        ),
        "cleared": report.cleared,
    }


def vllm_form_comes_back(src: str, adapter: str, dst: str, variant: str, layout: Layout) -> None:
    """The folded form, loaded and exported in either form, computes the same and keeps its bits."""
    lora = make_lora(variant)
    bridge, model = build(src, layout, lora, "te")
    poison_adapters(model)
    kimi.load_adapter_into(bridge, model, f"{adapter}/vllm")
    for target in ("peft", "vllm"):
        kimi.export_adapter(bridge, model, lora, f"{dst}/{target}", target=target, expand_shared_experts=True)


def through_megatron_checkpoint(src: str, adapter: str, dst: str, variant: str, layout: Layout) -> None:
    """A PEFT checkpoint as Megatron-Bridge's trainer saves it: the adapters alone, and run_config.yaml."""
    from megatron.bridge.training.checkpointing import (
        _generate_model_state_dict,
        apply_peft_adapter_filter_to_state_dict,
    )
    from megatron.bridge.training.config import ConfigContainer

    lora = make_lora(variant)
    bridge, model = build(src, layout, lora, "te")
    kimi.load_adapter_into(bridge, model, f"{adapter}/peft")
    state = apply_peft_adapter_filter_to_state_dict(_generate_model_state_dict(model, {}), lora)
    folder = Path(dst) / "iter_0000010"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(folder))
    if dist.get_rank() == 0:
        settings = {"peft": ConfigContainer._convert_value_to_dict(lora)}
        settings["model"] = {"tensor_model_parallel_size": layout.tp}
        (folder / "run_config.yaml").write_text(yaml.safe_dump(settings))
    dist.barrier()


def export_checkpoint(src: str, megatron: str, dst: str, layout: Layout, target: str = "peft") -> None:
    jobs.export_adapter_checkpoint(src, Path(megatron), Path(dst), layout, target, expand_shared_experts=True)


def load_only(
    src: str, adapter: str, variant: str, layout: Layout, changes: dict[str, Any] | None = None
) -> list[str]:
    """For adapters that do not load. What the model held before must still be there."""
    bridge, model = build(src, layout, make_lora(variant, **(changes or {})), "te")
    randomize(model)
    before = checksum(model)
    try:
        kimi.load_adapter_into(bridge, model, adapter)
    finally:
        assert checksum(model) == before
    return []


def export_only(
    src: str,
    dst: str,
    variant: str,
    layout: Layout,
    fault: str = "",
    **options: Any,
) -> dict[str, Any]:
    """An export with something wrong in the model on rank 1 alone, or with nothing wrong."""
    lora = make_lora(variant)
    bridge, model = build(src, layout, lora, "te")
    randomize(model)
    here = dist.get_rank() == 1
    adapters = [m for chunk in model for m in chunk.modules() if hasattr(m, "linear_in")]
    if fault == "nan" and here:
        adapters[3].linear_in.weight.data.view(-1)[5] = float("nan")
    elif fault == "alpha" and here:
        adapters[0].alpha += 1
    elif fault == "none":
        bridge, model = build_plain(src, layout)
    elif fault == "dora":
        lora = DoRA()
    return kimi.export_adapter(bridge, model, lora, dst, **options).notes


def export_warnings(
    src: str, dst: str, variant: str, layout: Layout, target: str, but: bool = False
) -> list[str]:
    targets = [name for name in MLA if not but or name != "linear_kv_up_proj"]
    lora = make_lora(variant, target_modules=targets)
    bridge, model = build(src, layout, lora, "te")
    return kimi.export_adapter(bridge, model, lora, dst, target=target).warnings


def build_plain(src: str, layout: Layout) -> tuple[AutoBridge, list[Any]]:
    bridge = AutoBridge.from_hf_pretrained(src)
    return bridge, runtime.build_model(bridge.to_megatron_provider(load_weights=False), layout)


def weights_of_a_model_with_adapters(src: str, dst: str, layout: Layout) -> str:
    """The INT4 export refuses it; loading the base into it works, and leaves the adapters alone."""
    bridge, model = build(src, layout, make_lora("per-expert"), "te")
    randomize(model)
    before = checksum(model)
    for chunk in model:
        for name, param in chunk.named_parameters():
            if ".adapter." not in name:
                param.data.fill_(float("nan"))
    kimi.load_checkpoint(bridge, model)
    assert checksum(model) == before
    assert all(p.isfinite().all() for chunk in model for p in chunk.parameters())
    try:
        kimi.export_checkpoint(bridge, model, dst)
    except KimiBridgeError as error:
        return str(error)
    return ""


def collectives(src: str, dst: str, layout: Layout) -> int:
    """How many collectives an export takes."""
    lora = make_lora("per-expert")
    bridge, model = build(src, layout, lora, "te")
    counts = [0]
    names = ["all_gather", "gather", "all_gather_object", "all_reduce", "broadcast", "all_gather_into_tensor"]
    originals = {name: getattr(dist, name) for name in names}

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[0] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counted(name))
    try:
        kimi.export_adapter(bridge, model, lora, dst)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return counts[0]


def poison_adapters(model: list[Any]) -> None:
    for chunk in model:
        for name, param in chunk.named_parameters():
            if ".adapter." in name:
                param.data.fill_(float("nan"))


def checksum(model: list[Any]) -> str:
    digest = hashlib.sha256()
    for chunk in model:
        for name, param in sorted(chunk.named_parameters()):
            if ".adapter." in name:
                digest.update(param.data.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        a[k] is not None and b[k] is not None and a[k].dtype == b[k].dtype and torch.equal(a[k], b[k])
        for k in a
    )
