"""The attention classes that DeepSeek-V3 checkpoints bring along, which do not use transformers' interface.

Moonlight's, Kimi-VL's and Kimi K2's modeling files have `DeepseekV3Attention` and `DeepseekV3FlashAttention2`
with attention and rotary cache of their own. What replaces their forward is built from the parts that such a
module has, whatever its class is called.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kimi_bridge.errors import KimiBridgeError

_PARTS = (
    "num_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "softmax_scale",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "kv_b_proj",
    "o_proj",
    "rotary_emb",
)
_COMPRESSED = ("q_a_proj", "q_a_layernorm", "q_b_proj")


def remote_attention_classes(model: nn.Module) -> list[type]:
    """Classes of decoder attention in the model that compute attention without transformers' interface.

    Raises KimiBridgeError for one that is not MLA as DeepSeek-V3's remote code has it.
    """
    found: dict[type, None] = {}
    for module in model.modules():
        if _is_decoder_attention(module) and not _uses_interface(type(module)):
            if missing := _missing(module):
                raise KimiBridgeError(
                    f"{type(module).__name__} computes attention by itself and is not DeepSeek-V3's (no "
                    f"{', '.join(missing)}): load the model with transformers' own class instead."
                )
            found[type(module)] = None
    return list(found)


def sharded_forward(cls: type, attention: Callable[[nn.Module], Callable[..., Any]]) -> Callable[..., Any]:
    """A forward for `cls` over a part of the sequence; `attention(module)` is the function that attends.

    hidden_states [batch, part, hidden] and global position_ids [batch, part] -> the class's own three
    results: output, None, the cache it was given.
    """
    rotate = _globals(cls)["apply_rotary_pos_emb"]

    @functools.wraps(cls.forward)  # type: ignore[attr-defined]
    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_value: Any = None,
        output_attentions: bool = False,
        use_cache: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any]:
        if position_ids is None:
            raise KimiBridgeError(f"{cls.__name__} needs the position_ids of its part of the sequence.")
        if past_key_value is not None and past_key_value.get_seq_length(self.layer_idx):
            raise KimiBridgeError(
                f"{cls.__name__} is sharded for training: call transformers_ulysses.undo() before generating."
            )
        query, key, value = _project(self, hidden_states, position_ids, rotate)
        if attention_mask is not None and attention_mask.ndim == 4:
            # The model made it causal for this part alone; its last row still tells what is padding.
            attention_mask = attention_mask[:, 0, -1] == 0
        output, _ = attention(self)(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.softmax_scale,
            position_ids=position_ids,
            **kwargs,
        )
        return self.o_proj(output.flatten(2)), None, past_key_value

    return forward


def _project(
    module: Any, hidden_states: Tensor, position_ids: Tensor, rotate: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Multi-head latent attention's queries, keys and values (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    All [batch, heads, part, width].
    """
    if getattr(module, "q_lora_rank", None) is None:
        query = module.q_proj(hidden_states)
    else:
        query = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden_states)))
    own, rotary = module.qk_nope_head_dim, module.qk_rope_head_dim
    query = query.unflatten(-1, (module.num_heads, own + rotary)).transpose(1, 2)
    latent, key_rotary = module.kv_a_proj_with_mqa(hidden_states).split([module.kv_lora_rank, rotary], dim=-1)
    expanded = module.kv_b_proj(module.kv_a_layernorm(latent))
    expanded = expanded.unflatten(-1, (module.num_heads, own + module.v_head_dim)).transpose(1, 2)
    key, value = expanded.split([own, module.v_head_dim], dim=-1)

    # The class's table must reach to the last position of this part, not only over its length.
    cos, sin = module.rotary_emb(value, seq_len=int(position_ids.max()) + 1)
    query, query_rotary = query.split([own, rotary], dim=-1)
    query_rotary, key_rotary = rotate(query_rotary, key_rotary.unsqueeze(1), cos, sin, position_ids)
    key_rotary = key_rotary.expand(-1, module.num_heads, -1, -1)
    return torch.cat([query, query_rotary], dim=-1), torch.cat([key, key_rotary], dim=-1), value


def _is_decoder_attention(module: nn.Module) -> bool:
    """Causal, or with the layer number that a decoder's cache needs; not the layer around it."""
    causal = getattr(module, "is_causal", None)
    named = "Attention" in type(module).__name__ and hasattr(module, "layer_idx")
    return causal is True or (causal is None and named)


def _uses_interface(cls: Any) -> bool:
    return "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(cls.forward).__code__.co_names


def _missing(module: nn.Module) -> list[str]:
    query = _COMPRESSED if getattr(module, "q_lora_rank", None) is not None else ("q_proj",)
    missing = [name for name in (*_PARTS, *query) if not hasattr(module, name)]
    if "apply_rotary_pos_emb" not in _globals(type(module)):
        missing.append("apply_rotary_pos_emb beside the class")
    elif "position_ids" not in inspect.signature(_globals(type(module))["apply_rotary_pos_emb"]).parameters:
        missing.append("position_ids in apply_rotary_pos_emb")
    rotary: Any = getattr(module, "rotary_emb", None)
    if rotary is not None and "seq_len" not in inspect.signature(rotary.forward).parameters:
        missing.append("seq_len in rotary_emb")
    return missing


def _globals(cls: Any) -> dict[str, Any]:
    return inspect.unwrap(cls.forward).__globals__
