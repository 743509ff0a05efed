"""The published config.json with its dimensions scaled down, and the tensors that any such config implies."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from kimi_bridge.checkpoint.config import ARCHITECTURE, KimiK25Config
from kimi_bridge.checkpoint.quantization import TEXT_PREFIX, read_quantization
from kimi_bridge.checkpoint.triplets import CODES_PER_WORD, part_names
from kimi_bridge.checkpoint.writer import TensorSpec
from kimi_bridge.errors import CheckpointError

# What the two sizes change in the text_config, and in the vision_config.
SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tiny": (
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "kv_lora_rank": 32,
            "moe_intermediate_size": 64,
            "n_routed_experts": 8,
            "num_attention_heads": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "vocab_size": 1280,
        },
        {
            "init_pos_emb_height": 8,
            "init_pos_emb_width": 8,
            "mm_hidden_size": 32,
            "vt_hidden_size": 32,
            "vt_intermediate_size": 64,
            "vt_num_attention_heads": 2,
            "vt_num_hidden_layers": 2,
        },
    ),
    "small": (
        {
            "hidden_size": 2048,
            "intermediate_size": 4096,
            "kv_lora_rank": 512,
            "moe_intermediate_size": 1024,
            "n_routed_experts": 8,
            "num_attention_heads": 16,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
            "num_key_value_heads": 16,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 20480,
        },
        {
            "init_pos_emb_height": 16,
            "init_pos_emb_width": 16,
            "mm_hidden_size": 288,
            "vt_hidden_size": 288,
            "vt_intermediate_size": 1088,
            "vt_num_attention_heads": 4,
            "vt_num_hidden_layers": 2,
        },
    ),
}

# Special tokens stand as far before the end of the vocabulary as in the published tokenizer.
TOKEN_IDS_FROM_END = {
    "bos_token_id": 256,
    "eos_token_id": 255,
    "media_placeholder_token_id": 235,
    "pad_token_id": 1,
}


def synthetic_config(size: str, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """config.json in the published form (transformers 4), without auto_map, for there are no code files.

    `overrides` replace values of text_config. Raises CheckpointError for an unknown size or a config
    that transformers refuses.
    """
    if size not in SIZES:
        raise CheckpointError(f"Unknown size {size!r}: choose from {', '.join(SIZES)}.")
    text_size, vision_size = SIZES[size]
    text = _TEXT | {"quantization_config": published_quantization_config()} | text_size | (overrides or {})
    ids = {key: text["vocab_size"] - back for key, back in TOKEN_IDS_FROM_END.items()}
    text |= {key: ids[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = {
        "architectures": [ARCHITECTURE],
        "dtype": "bfloat16",
        "ignore_index": -100,
        "model_type": KimiK25Config.model_type,
        **ids,
        "text_config": dict(sorted(text.items())),
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "vision_config": dict(
            sorted((_VISION | vision_size | {"text_hidden_size": text["hidden_size"]}).items())
        ),
    }
    KimiK25Config(**config)
    return dict(sorted(config.items()))


def checkpoint_specs(config: dict[str, Any]) -> list[TensorSpec]:
    """Every tensor of a checkpoint with this config.json, in the order of the model.

    INT4 weights, by the config's quantization_config, come as triplets. Raises CheckpointError for an
    INT4 weight whose width is not whole groups.
    """
    quantization = read_quantization(config)
    specs = []
    for name, dtype, shape in weight_specs(config):
        if quantization is None or not quantization.is_int4(name):
            specs.append(TensorSpec(name, dtype, shape))
            continue
        rows, columns = shape
        if columns % quantization.group_size:
            raise CheckpointError(
                f"{name} has rows of {columns}, which are not whole groups of {quantization.group_size}: "
                "choose a multiple."
            )
        packed, scale, stated = part_names(name)
        specs += [
            TensorSpec(packed, torch.int32, (rows, columns // CODES_PER_WORD)),
            TensorSpec(scale, dtype, (rows, columns // quantization.group_size)),
            TensorSpec(stated, torch.int32, (2,)),
        ]
    return specs


def weight_specs(config: dict[str, Any]) -> Iterator[TensorSpec]:
    """Every logical weight of a checkpoint with this config.json, INT4 weights as bfloat16 matrices."""
    text, vision = config["text_config"], config["vision_config"]
    for name, shape in _text_weights(text):
        # The router's bias is the one float32 tensor of the published checkpoint.
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        yield TensorSpec(TEXT_PREFIX + name, dtype, shape)
    for name, shape in (*_projector_weights(vision), *_vision_weights(vision)):
        yield TensorSpec(name, torch.bfloat16, shape)


_Named = Iterator[tuple[str, tuple[int, ...]]]


def _text_weights(text: dict[str, Any]) -> _Named:
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(text["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield from _attention_weights(prefix + "self_attn.", text)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        if layer < text["first_k_dense_replace"]:
            yield from _mlp_weights(prefix + "mlp.", hidden, text["intermediate_size"])
        else:
            yield from _moe_weights(prefix + "mlp.", text)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def _attention_weights(prefix: str, text: dict[str, Any]) -> _Named:
    hidden, heads, q_rank = text["hidden_size"], text["num_attention_heads"], text["q_lora_rank"]
    kv_rank, rope, nope = text["kv_lora_rank"], text["qk_rope_head_dim"], text["qk_nope_head_dim"]
    if q_rank is None:
        yield prefix + "q_proj.weight", (heads * (nope + rope), hidden)
    else:
        yield prefix + "q_a_proj.weight", (q_rank, hidden)
        yield prefix + "q_a_layernorm.weight", (q_rank,)
        yield prefix + "q_b_proj.weight", (heads * (nope + rope), q_rank)
    yield prefix + "kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden)
    yield prefix + "kv_a_layernorm.weight", (kv_rank,)
    yield prefix + "kv_b_proj.weight", (heads * (nope + text["v_head_dim"]), kv_rank)
    yield prefix + "o_proj.weight", (hidden, heads * text["v_head_dim"])


def _moe_weights(prefix: str, text: dict[str, Any]) -> _Named:
    hidden, width, experts = text["hidden_size"], text["moe_intermediate_size"], text["n_routed_experts"]
    yield prefix + "gate.weight", (experts, hidden)
    yield prefix + "gate.e_score_correction_bias", (experts,)
    for expert in range(experts):
        yield from _mlp_weights(f"{prefix}experts.{expert}.", hidden, width)
    yield from _mlp_weights(prefix + "shared_experts.", hidden, width * text["n_shared_experts"])


def _mlp_weights(prefix: str, hidden: int, width: int) -> _Named:
    yield prefix + "gate_proj.weight", (width, hidden)
    yield prefix + "up_proj.weight", (width, hidden)
    yield prefix + "down_proj.weight", (hidden, width)


def _projector_weights(vision: dict[str, Any]) -> _Named:
    hidden = vision["mm_hidden_size"]
    merged = hidden * prod(vision["merge_kernel_size"])
    yield from _both("mm_projector.pre_norm", (hidden,))
    yield from _both("mm_projector.proj.0", (merged, merged))
    yield from _both("mm_projector.proj.2", (vision["text_hidden_size"], merged))


def _vision_weights(vision: dict[str, Any]) -> _Named:
    hidden, width, patch = vision["vt_hidden_size"], vision["vt_intermediate_size"], vision["patch_size"]
    grid = (vision["init_pos_emb_height"], vision["init_pos_emb_width"])
    yield from _both("vision_tower.patch_embed.proj", (hidden, 3, patch, patch))
    yield "vision_tower.patch_embed.pos_emb.weight", (*grid, hidden)
    for block in range(vision["vt_num_hidden_layers"]):
        prefix = f"vision_tower.encoder.blocks.{block}."
        yield from _both(prefix + "norm0", (hidden,))
        yield from _both(prefix + "wqkv", (3 * hidden, hidden))
        yield from _both(prefix + "wo", (hidden, hidden))
        yield from _both(prefix + "norm1", (hidden,))
        yield from _both(prefix + "mlp.fc0", (width, hidden))
        yield from _both(prefix + "mlp.fc1", (hidden, width))
    yield from _both("vision_tower.encoder.final_layernorm", (hidden,))


def _both(module: str, shape: tuple[int, ...]) -> _Named:
    yield module + ".weight", shape
    yield module + ".bias", shape[:1]


def published_quantization_config() -> dict[str, Any]:
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 32,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    }
    group = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        ],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


# The published values that no size changes.
_TEXT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "dtype": "bfloat16",
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 262144,
    "model_type": "kimi_k2",
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 64.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
}

_VISION: dict[str, Any] = {
    "init_pos_emb_time": 4,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "model_type": "",
    "patch_size": 14,
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-05,
    "video_attn_type": "spatial_temporal",
}
