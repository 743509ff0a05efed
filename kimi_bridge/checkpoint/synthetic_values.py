"""What the published config.json of each family says, and what the small sizes change of it.

Kimi K2.5's is the published file. Kimi-VL's text_config and vision_config are those of
moonshotai/Kimi-VL-A3B-Instruct; the names of its tensors are those of vLLM's `kimi_vl.py` and `moonvit.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Values:
    """Values of config.json (`top`), text_config and vision_config.

    `sizes` are what a size changes in text_config and vision_config, `bias_dtype` is that of the router's
    bias. The special tokens' ids, None here, follow from the size of the vocabulary.
    """

    top: dict[str, Any]
    text: dict[str, Any]
    vision: dict[str, Any]
    sizes: dict[str, tuple[dict[str, Any], dict[str, Any]]]
    bias_dtype: torch.dtype


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


_K25_SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
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

_K25_TEXT: dict[str, Any] = {
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

_K25_VISION: dict[str, Any] = {
    "init_pos_emb_time": 4,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "model_type": "",
    "patch_size": 14,
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-05,
    "text_hidden_size": 7168,
    "video_attn_type": "spatial_temporal",
}

_K25_TOP: dict[str, Any] = {
    "bos_token_id": None,
    "dtype": "bfloat16",
    "eos_token_id": None,
    "ignore_index": -100,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
}

# "small" has the widths of Kimi-VL-A3B but for the dense layer's and the tower's.
_VL_SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tiny": (
        {**_K25_SIZES["tiny"][0], "q_lora_rank": None},
        {
            "hidden_size": 32,
            "init_pos_emb_height": 8,
            "init_pos_emb_width": 8,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
        },
    ),
    "small": (
        {**_K25_SIZES["small"][0], "moe_intermediate_size": 1408, "q_lora_rank": None},
        {
            "hidden_size": 288,
            "init_pos_emb_height": 16,
            "init_pos_emb_width": 16,
            "intermediate_size": 1088,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
        },
    ),
}

_VL_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "model_type": "deepseek_v3",
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 800000.0,
    "routed_scaling_factor": 2.446,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
}

_VL_VISION: dict[str, Any] = {
    "merge_kernel_size": [2, 2],
    "model_type": "moonvit",
    "patch_size": 14,
    "torch_dtype": "bfloat16",
}

_VL_TOP: dict[str, Any] = {"ignore_index": -100, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}

VALUES = {
    "kimi_k25": Values(
        _K25_TOP,
        _K25_TEXT | {"quantization_config": published_quantization_config()},
        _K25_VISION,
        _K25_SIZES,
        torch.float32,
    ),
    "kimi_vl": Values(_VL_TOP, _VL_TEXT, _VL_VISION, _VL_SIZES, torch.bfloat16),
}
"""By model_type."""
