"""The layer spec for models without query compression (`q_lora_rank: null`)."""

from __future__ import annotations

import functools
from typing import Any

from megatron.bridge.models.deepseek.deepseek_v3_bridge import DeepSeekV3Bridge
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention


class DirectQueryAttention(MLASelfAttention):
    """MLA whose queries are projected straight from the hidden states.

    Megatron-Core 0.19 with `qk_layernorm` puts a norm into `linear_q_proj` then, which DeepSeek-V3 has only
    behind its query compression: the queries would be normalised twice.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return {**super()._resolve_qk_norm_config(submodules), "linear_q_proj": submodules.linear_q_proj}


def correct_direct_queries() -> None:
    """Makes Megatron-Bridge's DeepSeek-V3 bridge build models without query compression right. Idempotent.

    Kimi-VL is one, and so is Moonlight, which is plain DeepSeek-V3 and upstream's own to load. Upstream's
    issue: https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5261
    """
    original = DeepSeekV3Bridge.provider_bridge
    if getattr(original, "_kimi_bridge", False):
        return

    @functools.wraps(original)
    def provider_bridge(self: Any, hf_pretrained: Any) -> Any:
        provider = original(self, hf_pretrained)
        if provider.q_lora_rank is None:
            provider.transformer_layer_spec = direct_query_block_spec
        return provider

    provider_bridge._kimi_bridge = True  # type: ignore[attr-defined]
    DeepSeekV3Bridge.provider_bridge = provider_bridge


def leave_direct_queries() -> None:
    """Takes back what `correct_direct_queries` did."""
    if getattr(DeepSeekV3Bridge.provider_bridge, "_kimi_bridge", False):
        DeepSeekV3Bridge.provider_bridge = DeepSeekV3Bridge.provider_bridge.__wrapped__


def direct_query_block_spec(
    config: Any, use_transformer_engine: bool = True, vp_stage: int | None = None
) -> Any:
    """Megatron's decoder block spec with `DirectQueryAttention` in every layer."""
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=use_transformer_engine, vp_stage=vp_stage
    )
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention
        attention.module = DirectQueryAttention
        attention.submodules.q_layernorm = IdentityOp
    return block
