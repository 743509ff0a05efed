"""What the ranks run with SkyRL's worker. Each function runs on every rank; its result must pickle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

import kimi_bridge.megatron as kimi
from kimi_bridge.integrations import skyrl
from kimi_bridge.megatron.runtime import Layout
from tests.integrations import skyrl_worker
from tests.megatron.forward import CudaMeansCpu, local_spec_provider
from tests.megatron.lora_scenarios import randomize


@contextmanager
def plugin() -> Iterator[None]:
    """These ranks live on: what a scenario installs, it takes back."""
    kimi.unregister()
    skyrl.install()
    try:
        yield
    finally:
        skyrl.uninstall()


def make(src: str, layout: Layout, *more: str, lora: int = 0) -> Any:
    sizes = {"tp": layout.tp, "ep": layout.ep, "pp": layout.pp}
    arguments = skyrl_worker.overrides(src, *more, lora=lora, **sizes)
    return skyrl_worker.make(arguments, dist.get_rank(), dist.get_world_size())


def without(src: str) -> dict[str, str]:
    """SkyRL as it is. (The config class is this library's: a real checkpoint brings code for it.)"""
    kimi.unregister()
    worker = make(src, Layout())
    try:
        skyrl_worker.build(worker)
    except OSError as error:
        return {
            "bridge": type(worker.bridge._model_bridge).__name__,
            "provider": type(worker.provider).__name__,
            "error": str(error),
        }
    return {"error": ""}


def round_trip(src: str, dst: str, layout: Layout, as_bf16_base: bool) -> str:
    """The model that SkyRL builds holds the checkpoint."""
    with plugin():
        more = [f"trainer.policy.model.fake_int4_qat.bf16_base_path={src}"] if as_bf16_base else []
        worker = skyrl_worker.build(make(src, layout, *more))
        kimi.export_checkpoint(worker.bridge, worker.actor_module, dst)
        bridge = type(worker.bridge._model_bridge)
        return f"{bridge.__module__}.{bridge.__name__}"


def registered_late(src: str) -> str:
    """Another bridge takes the name after everything has been imported and installed."""
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
    from megatron.bridge.models.kimi_vl.kimi_k25_vl_bridge import KimiK25VLBridge
    from megatron.bridge.models.kimi_vl.modeling_kimi_k25_vl import KimiK25VLModel

    with plugin():
        worker = make(src, Layout())
        MegatronModelBridge.register_bridge(source="KimiK25ForConditionalGeneration", target=KimiK25VLModel)(
            KimiK25VLBridge
        )
        assert not kimi.is_registered()
        skyrl_worker.build(worker)
        return type(worker.bridge._model_bridge).__module__


def training_steps(src: str, dst: str, layout: Layout) -> dict[str, Any]:
    """SkyRL's policy update with its QAT, on the CPU's layer spec; then its adapter."""
    import megatron.core.optimizer as megatron_optimizer
    from megatron.core.extensions.transformer_engine import TEGroupedLinear
    from skyrl.backends.skyrl_train.workers.megatron import fake_int4_qat

    megatron_optimizer.USING_PYTORCH_OPTIMIZER = True
    # Compiling Megatron's fused activations would take most of a minute.
    torch._dynamo.config.disable = True
    used: list[int] = []
    masters = TEGroupedLinear._get_weight_tensors
    with plugin(), CudaMeansCpu():
        arguments = skyrl_worker.training(src, "trainer.gradient_checkpointing=false", ep=layout.ep)
        worker = skyrl_worker.make(arguments, dist.get_rank(), dist.get_world_size())
        init_configs = worker.init_configs

        def with_local_spec(*args: Any, **kwargs: Any) -> None:
            init_configs(*args, **kwargs)
            local_spec_provider(worker.provider, torch.bfloat16, grouped=True)
            grouped = worker.provider.transformer_layer_spec
            worker.provider.transformer_layer_spec = grouped_spec_with_qat(grouped, used)
            without_streams()

        worker.init_configs = with_local_spec
        worker.init_model(src, num_training_steps=10)
        generator = torch.Generator().manual_seed(dist.get_rank())
        data = skyrl_worker.batch(torch.randint(0, 1280, (4, 16), generator=generator), 8)
        before = skyrl_worker.log_probabilities(worker, data)
        frozen = [tensor.clone() for tensor in not_trained(worker.actor_module[0])]
        steps = skyrl_worker.train(worker, data, 2)
        after = skyrl_worker.log_probabilities(worker, data)
        still = not_trained(worker.actor_module[0])
        asyncio.run(worker._save_lora_adapters_and_sync(dst, Engine()))
    TEGroupedLinear._get_weight_tensors, fake_int4_qat._installed = masters, False
    return {
        "steps": steps,
        "gain": ((after - before) * data["advantages"]).mean().item(),
        "frozen": all(torch.equal(a, b) for a, b in zip(frozen, still, strict=True)),
        "fake quantized": sum(used),
    }


def not_trained(model: Any) -> list[torch.Tensor]:
    """Frozen parameters, and what the engine has of the buffers: the routers' expert_bias."""
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith(".expert_bias")]
    assert biases
    return [parameter for parameter in model.parameters() if not parameter.requires_grad] + biases


def grouped_spec_with_qat(grouped: Any, used: list[int]) -> Any:
    """Transformer Engine's grouped experts, expert by expert, with the weights that their GEMM would get."""
    from megatron.core.extensions.transformer_engine import TEGroupedLinear

    def spec(config: Any, vp_stage: int | None = None) -> Any:
        made = grouped(config, vp_stage=vp_stage)
        TEGroupedLinear.forward = expert_by_expert
        return made

    def expert_by_expert(linear: Any, hidden: torch.Tensor, m_splits: Any, **_kwargs: Any) -> Any:
        weights = linear._get_weight_tensors()
        used.append(sum(w is not getattr(linear, f"weight{i}") for i, w in enumerate(weights)))
        parts = hidden.split([int(count) for count in m_splits])
        products = [torch.nn.functional.linear(x, w) for x, w in zip(parts, weights, strict=True)]
        return torch.cat(products), None

    return spec


def without_streams() -> None:
    """Wrapping a model in DDP makes streams that wait for each other: PyTorch's own for a CPU do nothing."""
    torch.cuda.Stream = torch.cuda.current_stream = lambda *_args, **_kwargs: torch.cpu.Stream()
    torch.cuda.stream = lambda *_args: nullcontext()
    torch.cuda.empty_cache = lambda: None


def vision(src: str) -> None:
    with plugin():
        skyrl_worker.build(make(src, Layout()), language_model_only=False)


def adapters(src: str, dst: str, layout: Layout, targets: str) -> str:
    """The folder that SkyRL hands to vLLM, and this library's."""
    with plugin():
        worker = skyrl_worker.build(
            make(src, layout, f"trainer.policy.model.lora.target_modules={targets}", lora=8)
        )
        randomize(worker.actor_module)
        engine = Engine()
        asyncio.run(worker._save_lora_adapters_and_sync(f"{dst}/skyrl", engine))
        for target in ("peft", "vllm"):
            kimi.export_adapter(
                worker.bridge,
                worker.actor_module,
                worker.lora_cls,
                f"{dst}/{target}",
                target=target,
                expand_shared_experts=True,
            )
        return engine.loaded


class Engine:
    """Where SkyRL would send the request to load the folder."""

    loaded = ""

    async def update_named_weights(self, request: Any) -> None:
        self.loaded = request.lora_path


def extractor(src: str, layout: Layout, bucketed: bool) -> Any:
    from skyrl.backends.skyrl_train.workers.megatron.megatron_worker import MegatronWeightExtractor

    worker = skyrl_worker.build(make(src, layout))
    extractor = MegatronWeightExtractor(
        worker.bridge, worker.actor_module, enable_bucketing=bucketed, bucket_size_threshold_GB=1e-4
    )
    return worker, extractor


def sync(src: str, dst: str, layout: Layout, bucketed: bool) -> dict[str, Any]:
    """The weights that SkyRL would send, and this library's export of the same model."""
    with plugin():
        worker, source = extractor(src, layout, bucketed)
        metadata = source.get_weight_metadata(torch.bfloat16)
        sent = {}
        for chunk in source.extract_weights(torch.bfloat16):
            sent.update(zip(chunk.names, (tensor.clone() for tensor in chunk.tensors), strict=True))
        kimi.export_checkpoint(worker.bridge, worker.actor_module, dst, weight_dtype=torch.bfloat16)
        return {"metadata": metadata, "sent": sent if dist.get_rank() == 0 else {}}


def sync_of_codes(src: str) -> dict[str, Any]:
    """SkyRL without the guard casts them; with it, it does not."""
    with plugin():
        _, source = extractor(src, Layout(), True)
        guarded = type(source)._ensure_buckets_initialized
        type(source)._ensure_buckets_initialized = guarded.__wrapped__
        chunks = list(source.extract_weights(torch.bfloat16))
        type(source)._ensure_buckets_initialized = guarded
        dtypes = {
            str(tensor.dtype)
            for chunk in chunks
            for name, tensor in zip(chunk.names, chunk.tensors, strict=True)
            if name.endswith("weight_packed")
        }
        errors = []
        for method in (source.get_weight_metadata, lambda dtype: next(source.extract_weights(dtype))):
            try:
                method(torch.bfloat16)
            except kimi.bridge.KimiBridgeError as error:
                errors.append(str(error))
        return {"dtypes": sorted(dtypes), "errors": errors}


def fake_quantized_experts(src: str, layout: Layout, divisor: float, q_min: float) -> dict[str, Any]:
    """What the experts' GEMMs get under SkyRL's QAT, with the plugin and when it is taken back."""
    from megatron.core.extensions.transformer_engine import TEGroupedLinear
    from skyrl.backends.skyrl_train.workers.megatron import fake_int4_qat

    masters = TEGroupedLinear._get_weight_tensors
    with plugin():
        worker = skyrl_worker.build(make(src, layout, lora=8))
        # By itself: the plugin's check refuses amax/7.5 for a checkpoint that it changes.
        fake_int4_qat.install_fake_int4_qat(32, divisor, q_min)
        linears = [m for m in worker.actor_module[0].modules() if isinstance(m, TEGroupedLinear)]
        ours = [weight for linear in linears for weight in linear._get_weight_tensors()]
        name = (
            fake_int4_qat.fake_int4_quantize_ste.__module__,
            hasattr(fake_int4_qat.fake_int4_quantize_ste, "__wrapped__"),
        )
    theirs = [weight for linear in linears for weight in linear._get_weight_tensors()]
    plain = [weight for linear in linears for weight in masters(linear)]
    TEGroupedLinear._get_weight_tensors, fake_int4_qat._installed = masters, False
    return {
        "linears": len(linears),
        "weights": len(plain),
        "replaced": name[1],
        "restored": not hasattr(fake_int4_qat.fake_int4_quantize_ste, "__wrapped__"),
        "equal": all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)),
        "changed": sum(not torch.equal(a, b) for a, b in zip(theirs, plain, strict=True)),
    }
