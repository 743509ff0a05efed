"""Attention with the parts and the calls of the classes in DeepSeek-V3 checkpoints' modeling files.

Written for these tests from their surface (attributes, forward's arguments and three results, a rotary cache
that is asked for a length and indexed with position_ids); the real files need a transformers of version 4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RotaryCache(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", 100.0 ** (-torch.arange(0, width, 2) / width), persistent=False)

    def forward(self, x: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
        angles = torch.outer(torch.arange(seq_len), self.frequencies).repeat(1, 2)
        return angles.cos().to(x), angles.sin().to(x)


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor
) -> tuple[Tensor, Tensor]:
    cos, sin = cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1)

    def rotated(x: Tensor) -> Tensor:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        halves = torch.cat([first, second], dim=-1)
        return halves * cos + torch.cat([-second, first], dim=-1) * sin

    return rotated(q), rotated(k)


class DeepseekV3Attention(nn.Module):
    """The eager class: masks come from the model, softmax is its own."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.attention_dropout = 0.0
        self.num_heads = config.num_attention_heads
        self.q_lora_rank, self.kv_lora_rank = config.q_lora_rank, config.kv_lora_rank
        self.qk_rope_head_dim, self.qk_nope_head_dim = config.qk_rope_head_dim, config.qk_nope_head_dim
        self.v_head_dim = config.v_head_dim
        self.q_head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        self.is_causal = True
        hidden = config.hidden_size
        if self.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, self.num_heads * self.q_head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, self.q_lora_rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(self.q_lora_rank)
            self.q_b_proj = nn.Linear(self.q_lora_rank, self.num_heads * self.q_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.kv_lora_rank + self.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(self.kv_lora_rank)
        widths = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        self.kv_b_proj = nn.Linear(self.kv_lora_rank, widths, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.v_head_dim, hidden, bias=False)
        self.rotary_emb = RotaryCache(self.qk_rope_head_dim)
        self.softmax_scale = self.q_head_dim**-0.5

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_value: Any = None,
        output_attentions: bool = False,
        use_cache: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any]:
        batch, length, _ = hidden_states.shape
        if self.q_lora_rank is None:
            q = self.q_proj(hidden_states)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q = q.view(batch, length, self.num_heads, self.q_head_dim).transpose(1, 2)
        q_nope, q_pe = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        latent, k_pe = self.kv_a_proj_with_mqa(hidden_states).split(
            [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
        )
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, self.num_heads, -1)
        k_nope, value = kv.transpose(1, 2).split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        cos, sin = self.rotary_emb(value, seq_len=length)
        q_pe, k_pe = apply_rotary_pos_emb(q_pe, k_pe.unsqueeze(1), cos, sin, position_ids)
        key = torch.cat([k_nope, k_pe.expand_as(q_pe)], dim=-1)
        scores = torch.cat([q_nope, q_pe], dim=-1) @ key.mT * self.softmax_scale + attention_mask
        output = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, -1)
        return self.o_proj(output), None, past_key_value


class DeepseekV3FlashAttention2(DeepseekV3Attention):
    """What a config with flash attention picks; the parts are the same."""


class LatentFreeAttention(nn.Module):
    """A class of another kind that computes causal attention itself."""

    def __init__(self) -> None:
        super().__init__()
        self.is_causal = True
        self.qkv = nn.Linear(8, 24)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class Layers(nn.Module):
    """Two residual layers of such attention, with a model's 4-D mask."""

    def __init__(self, cls: type, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(cls(config, index) for index in range(2))

    def forward(self, states: Tensor, position_ids: Tensor, padding: Tensor | None = None) -> Tensor:
        length = states.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool).tril().expand(len(states), 1, -1, -1)
        if padding is not None:
            allowed = allowed & padding[:, None, None].bool()
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
        for layer in self.layers:
            states = states + layer(states, mask, position_ids)[0]
        return states
