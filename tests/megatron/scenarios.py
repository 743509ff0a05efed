"""What the four ranks run. Each function runs on every rank; its result must pickle."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.bridge.models.deepseek.deepseek_v3_bridge import DeepSeekV3Bridge

import kimi_bridge.megatron as kimi
from kimi_bridge.errors import KimiBridgeError
from kimi_bridge.int4 import KIMI_QAT, dequantize, requantize
from kimi_bridge.megatron import jobs, runtime, transfer
from kimi_bridge.megatron.runtime import Layout
from kimi_bridge.megatron.shards import local_shards
from tests.megatron.forward import CudaMeansCpu, local_spec_provider, log_probabilities
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


def padded_vocabulary(src: str, dst: str, layout: Layout) -> int:
    """The round trip of a model whose embeddings have more rows than the checkpoint's."""
    runtime.initialize(layout)
    bridge = AutoBridge.from_hf_pretrained(src)
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.should_pad_vocab, provider.make_vocab_size_divisible_by = True, 128
    model = runtime.build_model(provider, layout)
    poison_parameters(model)
    kimi.load_checkpoint(bridge, model)
    kimi.export_checkpoint(bridge, model, dst)
    return model[0].module.embedding.word_embeddings.weight.shape[0]


def through_megatron_checkpoint(src: str, megatron: str, dst: str, first: Layout, second: Layout) -> None:
    jobs.import_checkpoint(src, Path(megatron), first)
    jobs.export_megatron_checkpoint(src, Path(megatron), Path(dst), second)


def export_as(src: str, dst: str, layout: Layout, dtype: str) -> None:
    bridge, model = build(src, layout)
    kimi.export_checkpoint(bridge, model, dst, weight_dtype=getattr(torch, dtype))


def provider_fields(src: str, names: list[str]) -> dict[str, Any]:
    provider = AutoBridge.from_hf_pretrained(src).to_megatron_provider(load_weights=False)
    return {name: getattr(provider, name) for name in names}


def registration() -> dict[str, Any]:
    """Upstream's bridge registers last, then ours again; Kimi-VL has none upstream."""
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge, get_model_bridge
    from megatron.bridge.models.kimi_vl.kimi_k25_vl_bridge import KimiK25VLBridge
    from megatron.bridge.models.kimi_vl.modeling_kimi_k25_vl import KimiK25VLModel

    seen = {"kimi_vl": type(get_model_bridge("KimiVLForConditionalGeneration")).__name__}
    seen["first"] = type(get_model_bridge("KimiK25ForConditionalGeneration")).__name__
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


def parity(src: str, reference: str | None = None) -> dict[str, float]:
    """Megatron's forward against transformers' on the same weights, in float32."""
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
        theirs = reference_model(reference or src)(ids).logits.float().log_softmax(-1)
    entropy = -(theirs.exp() * theirs).sum(-1).mean()
    return {"difference": (ours - theirs).abs().max().item(), "entropy": entropy.item()}


def query_norms(src: str) -> dict[str, int]:
    """Norms before the queries: as this library makes Megatron-Bridge build them, and as it would itself."""
    corrected, found = DeepSeekV3Bridge.provider_bridge, {}
    for name, method in (("corrected", corrected), ("upstream", corrected.__wrapped__)):
        DeepSeekV3Bridge.provider_bridge = method
        try:
            _, model = build(src, Layout(), load=False)
        finally:
            DeepSeekV3Bridge.provider_bridge = corrected
        norms = [n for n, _ in model[0].named_parameters() if n.endswith("linear_q_proj.layer_norm_weight")]
        found[name] = len(norms)
    return found


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
    overwrite = Path(dst).exists()
    if dist.get_rank() == 3:
        for name, param in model[0].named_parameters():
            if name.endswith("linear_fc2.weight0"):
                param.data[0, 0] = float("nan")
    kimi.export_checkpoint(bridge, model, dst, overwrite=overwrite)


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

    runtime.initialize(Layout())
    bridge = AutoBridge.from_hf_pretrained(src)
    provider = bridge.to_megatron_provider()
    lora = LoRA(target_modules=["linear_proj"], dim=4)
    provider.register_pre_wrap_hook(lambda model: lora(model, training=True))
    kimi.export_checkpoint(bridge, runtime.build_model(provider, Layout()), dst)


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


def trainable(
    src: str,
    layout: Layout,
    *,
    recompute: bool = False,
    freeze: bool = False,
    dtype: torch.dtype | None = torch.float32,
) -> tuple[AutoBridge, list[Any]]:
    """A loaded model of the local spec that can take training steps on a CPU."""
    runtime.initialize(layout)
    bridge = AutoBridge.from_hf_pretrained(src)
    provider = bridge.to_megatron_provider()
    local_spec_provider(provider, dtype)
    if recompute:
        provider.recompute_granularity, provider.recompute_method = "full", "uniform"
        provider.recompute_num_layers = 1
    model = runtime.build_model(provider, layout)
    if freeze:
        for chunk in model:
            for name, param in chunk.named_parameters():
                param.requires_grad_(".mlp.experts." not in name)
    return bridge, model


def step_gradients(
    model: list[Any], seed: int, microbatches: int = 1
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a batch, accumulated over its microbatches."""
    total = 0.0
    for index in range(microbatches):
        loss = batch_loss(model[0], seed + index) / microbatches
        loss.backward()
        total += loss.item()
    return total, {n: p.grad.clone() for n, p in model[0].named_parameters() if p.grad is not None}


def qat_gradients(src: str, layout: Layout, recompute: bool, microbatches: int) -> dict[str, Any]:
    """The gradients under fake INT4 beside those of a model that holds the served values themselves."""
    bridge, model = trainable(src, layout, recompute=recompute)
    disturb_experts(model)
    masters = {n: p.detach().clone() for n, p in model[0].named_parameters()}
    report = kimi.enable_fake_int4(model)
    loss, gradients = step_gradients(model, 0, microbatches)
    unchanged = all(torch.equal(p, masters[n]) for n, p in model[0].named_parameters())
    kimi.disable_fake_int4(model)
    model[0].zero_grad(set_to_none=True)
    plain_loss, _ = step_gradients(model, 0, microbatches)
    model[0].zero_grad(set_to_none=True)
    served = served_by_hand(model[0], bridge)
    expected_loss, expected = step_gradients(model, 0, microbatches)
    return {
        "loss": loss,
        "expected_loss": expected_loss,
        "plain_loss": plain_loss,
        "unchanged": unchanged,
        "equal": gradients.keys() == expected.keys()
        and all(torch.equal(gradients[name], expected[name]) for name in expected),
        "expert_gradients": sum(".experts." in n and g.abs().sum().item() > 0 for n, g in gradients.items()),
        "served": served,
        "report": report,
        "text": str(report),
    }


def qat_exports_what_it_computed_with(src: str, dst: str) -> dict[str, Any]:
    """Full fine-tuning for a few steps; the values of the last forward against the export's."""
    bridge, model = trainable(src, Layout(), dtype=None)
    seen: dict[str, torch.Tensor] = {}
    for name, module in model[0].module.named_modules():
        if ".local_experts." in f".{name}" and name.endswith(("linear_fc1", "linear_fc2")):
            module.forward = recording(module, name, seen)
    report = kimi.enable_fake_int4(model)
    optimizer = torch.optim.SGD([p for p in model[0].parameters() if p.requires_grad], lr=0.5)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = batch_loss(model[0], 7)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    with torch.no_grad():
        batch_loss(model[0], 7)
    kimi.export_checkpoint(bridge, model, dst)
    return {"report": report, "losses": losses, "seen": seen if dist.get_rank() == 0 else None}


def recording(module: Any, name: str, seen: dict[str, torch.Tensor]) -> Any:
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen[name] = module.weight.detach().clone()
        return original(*args, **kwargs)

    return forward


def qat_frozen(src: str, layout: Layout, spec: str) -> dict[str, Any]:
    """Frozen experts: nothing is wrapped, and what was loaded from INT4 is left alone."""
    if spec == "te":
        _, model = build(src, layout)
        for chunk in model:
            chunk.requires_grad_(False)
    else:
        _, model = trainable(src, layout, freeze=True, dtype=None)
    before = {n: p.detach().clone() for n, p in model[0].named_parameters()}
    report = kimi.enable_fake_int4(model)
    changed = [n for n, p in model[0].named_parameters() if not torch.equal(p, before[n])]
    wrapped = [n for n, m in model[0].named_modules() if "forward" in m.__dict__]
    again = kimi.enable_fake_int4(model)
    return {"report": report, "again": again, "changed": changed, "wrapped": wrapped}


def qat_after_a_megatron_checkpoint(src: str, megatron: str, with_bridge: bool) -> Any:
    jobs.import_checkpoint(src, Path(megatron), Layout())
    bridge = AutoBridge.from_hf_pretrained(src)
    model = runtime.build_model(bridge.to_megatron_provider(load_weights=False), Layout())
    jobs.load_megatron(model, Path(megatron))
    return kimi.enable_fake_int4(model, bridge=bridge if with_bridge else None)


def qat_main_grad(src: str, layout: Layout) -> dict[str, Any]:
    """Megatron's DDP and distributed optimizer: main_grad is filled, masters move, no stale value is used."""
    import megatron.core.optimizer as megatron_optimizer
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    bridge, model = trainable(src, layout, dtype=torch.bfloat16)
    config = model[0].config if hasattr(model[0], "config") else model[0].module.config
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    model = [DistributedDataParallel(config, ddp_config, chunk) for chunk in model]
    report = kimi.enable_fake_int4(model)
    # The fused optimizer is a CUDA kernel; the distributed one around it is Megatron's own.
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = True
    settings = OptimizerConfig(lr=1e-3, bf16=True, use_distributed_optimizer=True, clip_grad=0.0)
    with CudaMeansCpu():
        optimizer = get_megatron_optimizer(settings, model)
    results = []
    for _ in range(3):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        batch_loss(model[0], 3).backward()
        model[0].finish_grad_sync()
        filled = sum(p.main_grad.abs().sum().item() > 0 for n, p in experts_of(model))
        before = {n: p.detach().clone() for n, p in experts_of(model)}
        with CudaMeansCpu():
            optimizer.step()
        moved = sum(not torch.equal(p, before[n]) for n, p in experts_of(model))
        results.append((filled, moved))
    with torch.no_grad():
        loss = batch_loss(model[0], 3).item()
        kimi.disable_fake_int4(model)
        served_by_hand(model[0], bridge)
        expected = batch_loss(model[0], 3).item()
    return {"report": report, "steps": results, "loss": loss, "expected": expected}


def qat_without_experts(src: str) -> None:
    _, model = trainable(src, Layout())
    for layer in model[0].decoder.layers if hasattr(model[0], "decoder") else model[0].module.decoder.layers:
        if hasattr(layer.mlp, "experts"):
            del layer.mlp.experts
    kimi.enable_fake_int4(model)


def experts_of(model: list[Any]) -> list[tuple[str, Any]]:
    return [(n, p) for chunk in model for n, p in chunk.named_parameters() if ".mlp.experts." in n]


def disturb_experts(model: list[Any]) -> None:
    """Training's work in one stroke: some groups change, most do not."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for _, param in experts_of(model):
            rows = torch.randint(0, len(param), (3,), generator=generator)
            param[rows] += 0.003 * torch.randn(3, param.shape[1], generator=generator).to(param.dtype)


def served_by_hand(model: Any, bridge: AutoBridge) -> int:
    """Writes what an engine would serve into the experts, from the public codec; how many weights changed."""
    reader = bridge.hf_pretrained.state.source.reader
    changed = 0
    with torch.no_grad():
        for shard in local_shards(bridge.get_conversion_tasks(transfer.unwrap([model])), reader):
            if not reader.is_triplet(shard.weight):
                continue
            reference = reader.int4(shard.weight, *shard.ranges(reader.shape(shard.weight)))
            served = dequantize(requantize(shard.tensor.to(reference.scale.dtype), reference, KIMI_QAT))
            changed += not torch.equal(served.to(shard.tensor.dtype), shard.tensor)
            shard.tensor.copy_(served)
    return changed


def batch_loss(model: Any, seed: int) -> torch.Tensor:
    """Next-token loss of a random batch, averaged."""
    ids = torch.randint(0, 1280, (2, 17), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(16).expand(2, 16)
    logits = model(ids[:, :-1], positions, None)
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def qat_pipeline(src: str, layout: Layout) -> dict[str, Any]:
    """Two pipeline stages under Megatron's own schedule, four microbatches in flight."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    # A global of Megatron's that a backward outside of a schedule has left in another shape.
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    bridge, model = trainable(src, layout)
    disturb_experts(model)
    report = kimi.enable_fake_int4(model)

    def gradients() -> tuple[list[float], dict[str, torch.Tensor]]:
        model[0].zero_grad(set_to_none=True)
        with CudaMeansCpu():
            losses = get_forward_backward_func()(
                forward_step_func=pipeline_step,
                data_iterator=iter(range(4)),
                model=model,
                num_microbatches=4,
                seq_length=16,
                micro_batch_size=2,
                forward_only=False,
            )
        found = {n: p.grad.clone() for n, p in model[0].named_parameters() if p.grad is not None}
        return [entry["loss"].item() for entry in losses], found

    losses, ours = gradients()
    kimi.disable_fake_int4(model)
    served_by_hand(model[0], bridge)
    expected_losses, expected = gradients()
    return {
        "report": report,
        "losses": losses,
        "expected_losses": expected_losses,
        "equal": ours.keys() == expected.keys() and all(torch.equal(ours[n], expected[n]) for n in expected),
        "expert_gradients": sum(".experts." in n for n in ours),
    }


def pipeline_step(batches: Any, model: Any) -> Any:
    ids = torch.randint(0, 1280, (2, 17), generator=torch.Generator().manual_seed(next(batches)))
    output = model(ids[:, :-1], torch.arange(16).expand(2, 16), None)

    def loss(logits: torch.Tensor) -> Any:
        value = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        return value, {"loss": value.detach()}

    return output, loss


def import_job(src: str, megatron: str, overwrite: bool) -> None:
    jobs.import_checkpoint(src, Path(megatron), Layout(), overwrite)


def export_job(src: str, megatron: str, dst: str, overwrite: bool) -> None:
    jobs.export_megatron_checkpoint(src, Path(megatron), Path(dst), Layout(), None, overwrite)
