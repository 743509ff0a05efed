"""Small models of transformers, the same on every rank, and batches for them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

VOCABULARY = 96
MLA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "max_position_embeddings": 512,
}

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "initializer_range": 0.2,
}


def deepseek(q_lora_rank: int | None, **changes: Any) -> nn.Module:
    """DeepSeek-V3's architecture; its weights are large enough that attention is not uniform."""
    torch.manual_seed(1)
    config = DeepseekV3Config(
        **{**MLA, "q_lora_rank": q_lora_rank, "initializer_range": 0.2, **changes},
        attn_implementation="sdpa",
    )
    return DeepseekV3ForCausalLM(config)


def llama(heads: int, key_value_heads: int) -> nn.Module:
    torch.manual_seed(1)
    heads_and_width = {
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "hidden_size": 8 * heads,
    }
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **heads_and_width}, attn_implementation="sdpa"))


def batch(kind: str, length: int) -> dict[str, Tensor]:
    """`input_ids`, `labels`, and what marks packing or padding: plain, packed, rows, right or left."""
    generator = torch.Generator().manual_seed(2)
    rows = 1 if kind in ("plain", "packed") else 2
    made = {"input_ids": torch.randint(1, VOCABULARY, (rows, length), generator=generator)}
    made["labels"] = made["input_ids"].masked_fill(torch.rand(rows, length, generator=generator) < 0.2, -100)
    if kind in ("packed", "packed rows"):
        # Sequences of several lengths, one of a single token, none of which ends at a shard's boundary.
        cuts = [(0, 7, 8, 23, length), (0, 13, 30, 31, length)][:rows]
        positions = [torch.cat([torch.arange(b - a) for a, b in pairwise(c)]) for c in cuts]
        made["position_ids"] = torch.stack(positions)
        made["labels"][made["position_ids"] == 0] = -100
    if kind in ("right", "left"):
        mask = torch.ones(rows, length, dtype=torch.long)
        mask[0, 11:] = 0
        made["attention_mask"] = mask = mask.flip(1) if kind == "left" else mask
        made["labels"][mask == 0] = -100
        # Nothing comes before the first token that could predict it; transformers would ask the padding.
        made["labels"][mask.cumsum(1) == 1] = -100
    return made
