"""Process groups and model construction, on GPUs and, for conversions and tests, on a CPU.

Converting a checkpoint needs Megatron's modules and their sharding, but no arithmetic, so a host
without a GPU can do it: the production layer spec with Transformer Engine's grouped experts is built,
loaded, exported and saved under gloo. `enable_cpu` holds all that this takes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.models.model_provider import ModelProviderMixin
from megatron.core import parallel_state

from kimi_bridge.errors import KimiBridgeError
from kimi_bridge.megatron.collective import on_every_rank


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks. `etp` None means the same as `tp`, Megatron's default."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    vp: int | None = None

    def __str__(self) -> str:
        parts = [f"TP {self.tp}", f"EP {self.ep}", f"PP {self.pp}"]
        if self.etp is not None:
            parts.insert(1, f"ETP {self.etp}")
        if self.vp is not None:
            parts.append(f"VP {self.vp}")
        return " x ".join(parts)


def initialize(layout: Layout) -> None:
    """Joins the process group (torchrun's, or one of this process alone) and lays out Megatron's groups.

    Called again, it replaces the model-parallel groups; the process group stays.

    Raises:
        KimiBridgeError: the world size cannot hold the layout.
    """
    if not torch.cuda.is_available():
        enable_cpu()
    if not dist.is_initialized():
        _init_process_group()
    _check_fits(layout, dist.get_world_size())
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    if torch.cuda.is_available():
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(0)


def shutdown() -> None:
    """Leaves Megatron's groups and the process group, where they exist."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def configure(provider: Any, layout: Layout) -> Any:
    """Sets the layout on a provider of `AutoBridge.to_megatron_provider`.

    A number of layers that the pipeline stages do not divide (Kimi K2.5 has 61) goes to the first stage.
    Returns the finalized provider.

    Raises:
        KimiBridgeError: heads, experts or layers that the layout does not divide.
    """
    _check_model(provider, layout)
    provider.tensor_model_parallel_size = layout.tp
    provider.pipeline_model_parallel_size = layout.pp
    provider.expert_model_parallel_size = layout.ep
    provider.expert_tensor_parallel_size = layout.etp if layout.etp is not None else layout.tp
    provider.virtual_pipeline_model_parallel_size = layout.vp
    provider.sequence_parallel = False
    provider.pipeline_dtype = provider.params_dtype
    if provider.num_layers % (layout.pp * (layout.vp or 1)):
        provider.num_layers_in_first_pipeline_stage = _layers_of_first_stage(provider.num_layers, layout)
    provider.finalize()
    return provider


def build_model(provider: Any, layout: Layout) -> list[torch.nn.Module]:
    """This rank's model chunks (one per virtual stage), built for `layout`, without DDP.

    `initialize(layout)` must have been called. Weights are loaded if the provider was made with
    `to_megatron_provider(load_weights=True)`.
    """
    return configure(provider, layout).provide_distributed_model(wrap_with_ddp=False)


@functools.cache
def enable_cpu() -> None:
    """Lets Megatron and Transformer Engine build, load, export and save models without CUDA.

    Only for a process on a host without a GPU; nothing here makes Transformer Engine's kernels run.
    Each line answers one question that the libraries ask CUDA while they build or save a model.
    """
    if torch.cuda.is_available():
        raise KimiBridgeError("enable_cpu() is for hosts without a GPU; CUDA is available here.")
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    # Megatron uses current_device() as the `device` of new tensors, and compares devices with it.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    # Saving a checkpoint stores the RNG state and waits for copies; the CPU's state is all there is.
    torch.cuda.get_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    torch.cuda.synchronize = lambda *_args, **_kwargs: None
    # Initial values (of adapters, say) are drawn from CUDA's generators; here the CPU's draws them.
    CudaRNGStatesTracker.fork = lambda *_args, **_kwargs: nullcontext()  # type: ignore[method-assign]
    # Transformer Engine's constructors refuse to run without CUDA and need it for nothing else.
    TransformerEngineBaseModule.__init__ = _as_if_cuda(TransformerEngineBaseModule.__init__)
    ModelProviderMixin.provide_distributed_model = _with_cpu_settings(  # type: ignore[method-assign]
        ModelProviderMixin.provide_distributed_model
    )


# Settings under which a model can be built on a CPU. They hold while it is built and are then put back,
# so that a checkpoint saved here tells a trainer nothing of the CPU.
_ON_CPU = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "moe_token_dispatcher_type": "allgather",
    "moe_shared_expert_overlap": False,
}


def _with_cpu_settings(build: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def wrapped(provider: Any, *args: Any, **kwargs: Any) -> Any:
        originals = {name: getattr(provider, name) for name in _ON_CPU}
        for name, value in _ON_CPU.items():
            setattr(provider, name, value)
        try:
            return build(provider, *args, **{**kwargs, "use_cpu_initialization": True})
        finally:
            for name, value in originals.items():
                setattr(provider, name, value)

    return wrapped


def _as_if_cuda(constructor: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(constructor)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        is_available = torch.cuda.is_available
        torch.cuda.is_available = lambda: True
        try:
            constructor(*args, **kwargs)
        finally:
            torch.cuda.is_available = is_available

    return wrapped


def _init_process_group() -> None:
    if "RANK" not in os.environ:
        # One process, no torchrun: a store in memory needs no free port.
        store = dist.HashStore()
        dist.init_process_group(_backend(), store=store, rank=0, world_size=1)
        return
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(gpu_of(local_rank, torch.cuda.device_count()))
    dist.init_process_group(_backend())


def gpu_of(local_rank: int, gpus: int) -> int:
    """The index of a process's GPU. Processes share one only where NCCL was told to allow it.

    Raises:
        KimiBridgeError: more processes than GPUs, and NCCL_MULTI_RANK_GPU_ENABLE is not 1.
    """
    if local_rank >= gpus and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        raise KimiBridgeError(
            f"Local rank {local_rank} has no GPU of its own: {gpus} visible here. Start torchrun with"
            f" --nproc_per_node {gpus} at most. To try a layout out, ranks may share a GPU: set"
            " NCCL_MULTI_RANK_GPU_ENABLE=1, which NCCL 2.30.7 has and 2.29.7 has not."
        )
    return local_rank % gpus


def _backend() -> str:
    # Both, on GPUs: objects and CPU tensors go through gloo while weights go through NCCL.
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _check_fits(layout: Layout, world_size: int) -> None:
    if layout.vp is not None and layout.pp == 1:
        fault = f"VP {layout.vp} needs pipeline stages: use --pp 2 or more, or leave --vp out."
        raise on_every_rank(KimiBridgeError(fault))
    dense, expert = layout.tp * layout.pp, (layout.etp or layout.tp) * layout.ep * layout.pp
    for name, ranks in (("TP x PP", dense), ("expert TP x EP x PP", expert)):
        if world_size % ranks:
            fault = (
                f"{layout} does not fit {world_size} process(es): {name} = {ranks} must divide their number."
                f" Start torchrun with --nproc_per_node {max(dense, expert)}, or use a smaller layout."
            )
            raise on_every_rank(KimiBridgeError(fault))


def _check_model(provider: Any, layout: Layout) -> None:
    heads, experts, topk = (
        provider.num_attention_heads,
        provider.num_moe_experts or 0,
        provider.moe_router_topk,
    )
    fault = None
    if heads % layout.tp:
        fault = f"{heads} attention heads do not divide over TP {layout.tp}: use a --tp that divides them."
    elif experts % layout.ep:
        fault = f"{experts} experts do not divide over EP {layout.ep}: use an --ep that divides them."
    elif experts and topk > experts:
        fault = f"config.json routes each token to {topk} of {experts} experts: correct num_experts_per_tok."
    if fault:
        raise on_every_rank(KimiBridgeError(fault))


def _layers_of_first_stage(num_layers: int, layout: Layout) -> int:
    """The size of the first stage that leaves equal ones and is nearest to them."""
    if layout.vp is not None:
        stages = f"{layout.pp} x {layout.vp} virtual stages"
        fault = f"{num_layers} layers do not divide into {stages}: leave --vp out."
        raise on_every_rank(KimiBridgeError(fault))
    if num_layers < layout.pp:
        fault = f"{num_layers} layers cannot fill {layout.pp} pipeline stages: use a smaller --pp."
        raise on_every_rank(KimiBridgeError(fault))
    floor = num_layers // layout.pp
    choices = [num_layers - per_stage * (layout.pp - 1) for per_stage in (floor, floor + 1)]
    return min((first for first in choices if first > 0), key=lambda first: abs(first - floor))
