"""What the four ranks run. Each function runs on every rank; its result must pickle."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge

import kimi_bridge.megatron as kimi
from kimi_bridge.errors import KimiBridgeError
from kimi_bridge.megatron import jobs, runtime
from kimi_bridge.megatron.runtime import Layout
from tests.megatron.forward import local_spec_provider, log_probabilities
from tests.megatron.ranks import join
from tests.megatron.reference import reference_model


def build(
    src: str | Path, layout: Layout, spec: str = "te", load: bool = True
) -> tuple[AutoBridge, list[Any]]:
    runtime.initialize(layout)
    bridge = AutoBridge.from_hf_pretrained(str(src))
    provider = bridge.to_megatron_provider(load_weights=load)
    if spec == "local":
        local_spec_provider(provider)
    return bridge, runtime.build_model(provider, layout)


def poison_parameters(model: list[Any]) -> None:
    """Whatever a load leaves alone becomes visible."""
    for chunk in model:
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
            if tensor.is_floating_point() and "rotary" not in name:
                tensor.data.fill_(float("nan"))


def round_trip(src: str, dst: str, layout: Layout, spec: str = "te") -> None:
    bridge, model = build(src, layout, spec, load=False)
    poison_parameters(model)
    kimi.load_checkpoint(bridge, model)
    kimi.export_checkpoint(bridge, model, dst)


def through_megatron_checkpoint(src: str, megatron: str, dst: str, first: Layout, second: Layout) -> None:
    jobs.import_checkpoint(src, Path(megatron), first)
    jobs.export_megatron_checkpoint(src, Path(megatron), Path(dst), second)


def provider_fields(src: str, names: list[str]) -> dict[str, Any]:
    provider = AutoBridge.from_hf_pretrained(src).to_megatron_provider(load_weights=False)
    return {name: getattr(provider, name) for name in names}


def registration() -> dict[str, Any]:
    """Upstream's bridge registers last, then ours again."""
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge, get_model_bridge
    from megatron.bridge.models.kimi_vl.kimi_k25_vl_bridge import KimiK25VLBridge
    from megatron.bridge.models.kimi_vl.modeling_kimi_k25_vl import KimiK25VLModel

    seen = {"first": type(get_model_bridge("KimiK25ForConditionalGeneration")).__name__}
    kimi.assert_registered()
    MegatronModelBridge.register_bridge(source="KimiK25ForConditionalGeneration", target=KimiK25VLModel)(
        KimiK25VLBridge
    )
    try:
        kimi.assert_registered()
    except KimiBridgeError as error:
        seen["error"] = str(error)
    kimi.register()
    kimi.assert_registered()
    seen["last"] = type(get_model_bridge("KimiK25ForConditionalGeneration")).__name__
    return seen


def parity(src: str) -> dict[str, float]:
    """Megatron's forward against transformers' on the same checkpoint, in float32."""
    runtime.initialize(Layout())
    bridge = AutoBridge.from_hf_pretrained(src)
    provider = bridge.to_megatron_provider(load_weights=False)
    local_spec_provider(provider, torch.float32)
    model = runtime.build_model(provider, Layout())
    poison_parameters(model)
    kimi.load_checkpoint(bridge, model)
    ids = torch.randint(0, 1280, (2, 48), generator=torch.Generator().manual_seed(0))
    ours = log_probabilities(model[0], ids)
    with torch.no_grad():
        theirs = reference_model(src)(ids).logits.float().log_softmax(-1)
    entropy = -(theirs.exp() * theirs).sum(-1).mean()
    return {"difference": (ours - theirs).abs().max().item(), "entropy": entropy.item()}


def changed_groups(src: str, dst: str, layout: Layout) -> dict[str, Any]:
    """One row of one expert's gate_proj and one norm are changed before the export."""
    bridge, model = build(src, layout)
    for chunk in model:
        for name, param in chunk.named_parameters():
            if name.endswith("layers.2.mlp.experts.linear_fc1.weight0") and layout == Layout():
                param.data[3, 32:64] += 0.01
            if name.endswith("decoder.final_layernorm.weight"):
                param.data[5] = 2.0
    kimi.export_checkpoint(bridge, model, dst)
    return {"value": model[0].module.decoder.layers[2].mlp.experts.linear_fc1.weight0.data[3].clone()}


def plain_export(src: str, dst: str, layout: Layout, dtype: torch.dtype) -> None:
    bridge, model = build(src, layout)
    kimi.export_checkpoint(bridge, model, dst, weight_dtype=dtype)


def plain_api(src: str, dst: str) -> dict[str, Any]:
    """What others call: AutoBridge's own methods, nothing of ours but the registration."""
    runtime.initialize(Layout(ep=2, etp=1))
    bridge = AutoBridge.from_hf_pretrained(src)
    provider = bridge.to_megatron_provider(load_weights=False)
    model = runtime.build_model(provider, Layout(ep=2, etp=1))
    poison_parameters(model)
    bridge.load_hf_weights(model)
    names = sorted(name for name, _ in bridge.export_hf_weights(model, cpu=True, show_progress=False))
    bridge.save_hf_pretrained(model, dst, show_progress=False)
    tasks = bridge.get_conversion_tasks(model)
    streamed = sorted(name for name, _ in bridge.export_hf_weights(model, conversion_tasks=tasks))
    return {"names": names, "streamed": streamed, "none_tasks": sum(task is None for task in tasks)}


def import_and_export_ckpt(src: str, megatron: str, dst: str, rendezvous: str) -> None:
    """AutoBridge.import_ckpt and export_ckpt as they are; the second makes a process group of its own."""
    runtime.initialize(Layout())
    AutoBridge.import_ckpt(src, megatron)
    rank = dist.get_rank()
    runtime.shutdown()
    try:
        if rank == 0:
            AutoBridge.from_hf_pretrained(src).export_ckpt(megatron, dst, show_progress=False)
    finally:
        join(rank, rendezvous)
        dist.barrier()


def nan_on_one_rank(src: str, dst: str, layout: Layout) -> None:
    bridge, model = build(src, layout)
    if dist.get_rank() == 3:
        for name, param in model[0].named_parameters():
            if name.endswith("linear_fc2.weight0"):
                param.data[0, 0] = float("nan")
    kimi.export_checkpoint(bridge, model, dst)


def export_over(src: str, dst: str) -> None:
    bridge, model = build(src, Layout())
    kimi.export_checkpoint(bridge, model, dst)


def unmapped_parameter(src: str) -> None:
    bridge, model = build(src, Layout(), load=False)
    model[0].module.decoder.layers[0].extra = torch.nn.Parameter(torch.zeros(3))
    kimi.load_checkpoint(bridge, model)


def fewer_layers(src: str) -> None:
    runtime.initialize(Layout())
    bridge = AutoBridge.from_hf_pretrained(src)
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.num_layers, provider.moe_layer_freq = 2, [0, 1]
    kimi.load_checkpoint(bridge, runtime.build_model(provider, Layout()))


def wider_model(src: str) -> None:
    runtime.initialize(Layout())
    bridge = AutoBridge.from_hf_pretrained(src)
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.ffn_hidden_size = 512
    kimi.load_checkpoint(bridge, runtime.build_model(provider, Layout()))


def just_load(src: str, layout: Layout) -> None:
    _, _ = build(src, layout)


def adapters(src: str, dst: str) -> None:
    from megatron.bridge.peft.lora import LoRA

    bridge, model = build(src, Layout())
    model = [LoRA(target_modules=["linear_proj"], dim=4)(chunk, training=True) for chunk in model]
    kimi.export_checkpoint(bridge, model, dst)


def vision_request(src: str) -> None:
    bridge = AutoBridge.from_hf_pretrained(src)
    bridge._model_bridge.mapping_registry().hf_to_megatron_lookup("vision_tower.patch_embed.proj.weight")


def text_only(src: str, language_model_only: bool) -> None:
    config = AutoBridge.from_hf_pretrained(src).hf_pretrained.config
    kimi.ensure_text_only(config, language_model_only=language_model_only)


def bytes_read(src: str, layout: Layout) -> tuple[int, int]:
    """Bytes of tensors that this rank's load read, and those of the whole text model."""
    runtime.initialize(layout)
    bridge = AutoBridge.from_hf_pretrained(src)
    model = runtime.build_model(bridge.to_megatron_provider(load_weights=False), layout)
    reader = bridge.hf_pretrained.state.source.reader
    before = reader.bytes_read
    kimi.load_checkpoint(bridge, model)
    total = sum(reader.info(name).nbytes for name in reader.names() if name.startswith("language_model."))
    return reader.bytes_read - before, total


def buckets(src: str, layout: Layout, bucket_bytes: int) -> list[Any]:
    """(names, bytes) of each bucket, and a digest of all that came."""
    bridge, model = build(src, layout)
    seen, digest = [], {}
    for bucket in kimi.iter_int4_weights(bridge, model, bucket_bytes=bucket_bytes):
        seen.append((len(bucket), sum(tensor.nbytes for _, tensor in bucket)))
        for name, tensor in bucket:
            assert name not in digest, name
            digest[name] = hashlib.sha256(
                tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            ).hexdigest()
    return [seen, digest]


def collectives(src: str, dst: str, layout: Layout) -> int:
    """How many collectives an export takes on this rank."""
    bridge, model = build(src, layout)
    names = (
        "all_gather",
        "all_gather_object",
        "all_gather_into_tensor",
        "all_reduce",
        "gather",
        "broadcast",
        "barrier",
    )
    count = 0

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return function(*args, **kwargs)

        return call

    originals = {name: getattr(dist, name) for name in names}
    try:
        for name, function in originals.items():
            setattr(dist, name, counted(function))
        kimi.export_checkpoint(bridge, model, dst)
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
    return count
