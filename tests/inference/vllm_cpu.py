"""The real vLLM without a GPU: its Kimi models and their LoRA managers are built and loaded, not run.

vLLM's GPU wheel has no kernels for a CPU. What is replaced is what only kernels need: the platform is an
out-of-tree one (vLLM's own notion) that names an MLA backend, and the experts get their Triton kernel object
by hand, which is built and never launched.
"""

from __future__ import annotations

import socket
from functools import cache
from pathlib import Path
from typing import Any

import torch


class NoPrefill:
    """Stands for FlashAttention, which cannot be imported without a GPU."""

    def __init__(self, **_: Any) -> None: ...


@cache
def use_cpu() -> None:
    """Once per process, before anything of vLLM looks for a platform."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import PlatformEnum

    class Platform(CpuPlatform):
        _enum = PlatformEnum.OOT

        @classmethod
        def get_attn_backend_cls(cls, *_: Any, **__: Any) -> str:
            return "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend"

    vllm.platforms._current_platform = Platform()
    import vllm.utils.torch_utils

    # Asked of the platform when that module is imported, which importing CpuPlatform did.
    vllm.utils.torch_utils.PIN_MEMORY = False
    from vllm.v1.attention.backends.mla.prefill import registry

    registry.register_mla_prefill_backend(
        registry.MLAPrefillBackendEnum.FLASH_ATTN, f"{NoPrefill.__module__}.NoPrefill"
    )


def engine_config(folder: Path, **settings: Any) -> Any:
    """vLLM's config for a checkpoint folder. Making it loads vLLM's plugins, as every vLLM process does."""
    use_cpu()
    from vllm.engine.arg_utils import EngineArgs

    defaults = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "enable_lora": True,
        "max_lora_rank": 8,
        "max_loras": 1,
        "max_cpu_loras": 2,
        "language_model_only": True,
    }
    return EngineArgs(model=str(folder), **(defaults | settings)).create_engine_config()


def build_model(config: Any, rank: int = 0, world: int = 1, port: int | None = None) -> Any:
    """The config's model with all its layers and uninitialised weights."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.model_loader.utils import get_model_architecture

    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            address = f"tcp://127.0.0.1:{port or free_port()}"
            init_distributed_environment(world, rank, address, rank, "gloo")
            initialize_model_parallel(world)
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = get_model_architecture(config.model_config)[0](vllm_config=config)
            for layer in model.modules():
                if isinstance(layer, RoutedExperts):
                    method = layer.quant_method
                    method.unquantized_backend = UnquantizedMoeBackend.TRITON
                    method.experts_cls = TritonExperts
                    method._setup_kernel(layer, layer.w13_weight, layer.w2_weight)
        finally:
            torch.set_default_dtype(dtype)
    return model


def build_worker(config: Any, model: Any) -> Any:
    """What `collective_rpc` would reach: the extension on a worker whose runner passed vLLM's LoRA gate."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    from kimi_bridge.inference import WorkerExtension

    worker = WorkerExtension()
    worker.model_runner = LoRAModelRunnerMixin()
    with set_current_vllm_config(config):
        worker.model_runner.load_lora_model(model, config, torch.device("cpu"))
    return worker


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def buffers(worker: Any) -> dict[str, list[torch.Tensor]]:
    """What the layers compute with, in the first adapter slot."""
    found = {}
    for name, module in worker.model_runner.lora_manager._adapter_manager.modules.items():
        names = ("lora_a_stacked", "lora_b_stacked")
        if hasattr(module, "w13_lora_a_stacked"):
            names = tuple(f"{w}_lora_{m}_stacked" for w in ("w13", "w2") for m in "ab")
        found[name] = [stack[0].clone() for kind in names for stack in getattr(module, kind)]
    return found
