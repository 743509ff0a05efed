"""What config.json may say, for the Megatron model to be the model that it describes."""

from __future__ import annotations

import math
from typing import Any

from kimi_bridge.errors import CheckpointError

# Megatron-Bridge's DeepSeek-V3 provider reads none of these: it builds the one kind there is.
_ONLY = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "moe_layer_freq": 1,
    "attention_bias": False,
}
_COUNTS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
)
_PUBLISHED = "Use the config.json that was published with the weights."


def check_text_config(config: Any) -> None:
    """Raises CheckpointError for a `text_config` that Megatron would build otherwise, or cannot build."""
    for key, value in _ONLY.items():
        if (found := getattr(config, key, value)) != value:
            raise _wrong(key, found, f"the Megatron model has {value!r} alone")
    for key in _COUNTS:
        found = getattr(config, key)
        if type(found) is not int or found < 1:
            raise _wrong(key, found, "it is a number from 1 on")
    dense = config.first_k_dense_replace
    if type(dense) is not int or not 0 <= dense <= config.num_hidden_layers:
        raise _wrong("first_k_dense_replace", dense, "it is a number of layers")
    if config.n_routed_experts % config.n_group or config.topk_group > config.n_group:
        raise _wrong("n_group", config.n_group, "experts are in equal groups, topk_group at most all of them")
    rope = config.rope_parameters or {}
    if (kind := rope.get("rope_type", "default")) not in ("default", "yarn"):
        raise _wrong("rope_scaling", kind, "the Megatron model has none or yarn")
    numbers = {"rope_theta": rope.get("rope_theta"), "routed_scaling_factor": config.routed_scaling_factor}
    for key, found in numbers.items():
        if not isinstance(found, int | float) or not 0 < found < math.inf:
            raise _wrong(key, found, "it is a finite number above 0")


def _wrong(key: str, found: Any, why: str) -> CheckpointError:
    return CheckpointError(f"text_config.{key} is {found!r} in config.json: {why}. {_PUBLISHED}")
