"""A forward pass of the real Megatron model on a CPU: the local layer spec without CUDA kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.module import MegatronModule


class CausalAttention(MegatronModule):
    """Core attention for MLA's 192-wide q and k and 128-wide v, which 0.19's own does not take."""

    def __init__(self, config: Any, *_args: Any, softmax_scale: float | None = None, **_kwargs: Any):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> Any:
        """[sequence, batch, heads, width] each -> [sequence, batch, heads * v width]."""
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def local_spec_provider(provider: Any, dtype: torch.dtype | None = None) -> None:
    """Sets a provider to the local spec, without fused kernels, in `dtype` (default: as it is)."""
    provider.transformer_layer_spec = partial(_local_spec)
    provider.moe_grouped_gemm = False
    provider.moe_permute_fusion = False
    provider.bias_activation_fusion = False
    provider.bias_dropout_fusion = False
    provider.masked_softmax_fusion = False
    provider.cross_entropy_loss_fusion = False
    provider.persist_layer_norm = False
    provider.moe_shared_expert_overlap = False
    if dtype is not None:
        provider.params_dtype = dtype
        provider.bf16 = dtype == torch.bfloat16


def _local_spec(config: Any, vp_stage: int | None = None) -> Any:
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = CausalAttention
    return spec
