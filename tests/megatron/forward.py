"""A forward pass of the real Megatron model on a CPU: the local layer spec without CUDA kernels."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEGroupedLinear
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, random
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils
from torch.overrides import TorchFunctionMode


class CausalAttention(MegatronModule):
    """Core attention for MLA's 192-wide q and k and 128-wide v, which 0.19's own does not take."""

    def __init__(self, config: Any, *_args: Any, softmax_scale: float | None = None, **_kwargs: Any):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> Any:
        """[sequence, batch, heads, width] each -> [sequence, batch, heads * v width]."""
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.softmax_scale
        )
        return out.permute(2, 0, 1, 3).flatten(2)


class CudaMeansCpu(TorchFunctionMode):
    """Megatron's optimizer and pipeline schedule expect CUDA of a few scalars and type names."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


def log_probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """[batch, sequence] -> [batch, sequence, vocabulary], float32."""
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    logits = gather_from_tensor_model_parallel_region(model(ids, positions, None).float())
    return logits.log_softmax(-1)


def local_spec_provider(provider: Any, dtype: torch.dtype | None = None, grouped: bool = False) -> None:
    """Sets a provider to the local spec, without fused kernels, in `dtype` (default: as it is).

    `grouped` takes Transformer Engine's grouped experts, whose one GEMM is done expert by expert here.
    """
    # The router's GEMM would go through Transformer Engine although the layers do not.
    moe_utils.te_general_gemm = None
    # Recomputation saves and restores CUDA's random state; there is only the CPU's here.
    random._get_cuda_rng_state = lambda **_kwargs: None
    random._set_cuda_rng_state = lambda *_args, **_kwargs: None
    # DDP asks which stream it is on, to wait for it.
    torch.cuda.current_stream = lambda *_args, **_kwargs: None
    make = _grouped_spec if grouped else _local_spec
    provider.transformer_layer_spec = functools.partial(make, provider.transformer_layer_spec)
    provider.moe_grouped_gemm = grouped
    provider.moe_permute_fusion = False
    provider.bias_activation_fusion = False
    provider.bias_dropout_fusion = False
    provider.masked_softmax_fusion = False
    provider.cross_entropy_loss_fusion = False
    provider.persist_layer_norm = False
    provider.moe_shared_expert_overlap = False
    provider.moe_token_dispatcher_type = "allgather"
    provider.gradient_accumulation_fusion = False
    provider.use_cpu_initialization = True
    if dtype is not None:
        provider.params_dtype = dtype
        provider.bf16 = dtype == torch.bfloat16


def _local_spec(production: Any, config: Any, vp_stage: int | None = None) -> Any:
    """The bridge's own layers, of Megatron's local modules instead of Transformer Engine's."""
    spec = production(config, use_transformer_engine=False, vp_stage=vp_stage)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = CausalAttention
    return spec


def _grouped_spec(production: Any, config: Any, vp_stage: int | None = None) -> Any:
    TEGroupedLinear.forward = _expert_by_expert
    spec = _local_spec(production, config, vp_stage)
    for layer in spec.layer_specs:
        mlp = layer.submodules.mlp
        if isinstance(mlp, functools.partial) and "submodules" in mlp.keywords:
            experts = TESpecProvider().grouped_mlp_modules(True)
            if hasattr(mlp.keywords["submodules"], "experts"):
                submodules = dataclasses.replace(mlp.keywords["submodules"], experts=experts)
                layer.submodules.mlp = functools.partial(mlp.func, submodules=submodules)
    return spec


def _expert_by_expert(linear: Any, hidden: torch.Tensor, m_splits: Any, **_kwargs: Any) -> Any:
    parts = hidden.split([int(count) for count in m_splits])
    weights = [getattr(linear, f"weight{i}") for i in range(linear.num_gemms)]
    return torch.cat([torch.nn.functional.linear(x, w) for x, w in zip(parts, weights, strict=True)]), None
