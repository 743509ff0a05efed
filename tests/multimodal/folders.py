"""Checkpoint folders without weights: config, tokenizer, chat template and published preprocessor settings.

The numbers of the preprocessors are those of Qwen/Qwen3-VL-8B-Instruct and moonshotai/Kimi-K2.5
(`preprocessor_config.json`); tokenizers and text dimensions are small.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kimi_bridge.checkpoint.synthetic_config import synthetic_config
from kimi_bridge.checkpoint.synthetic_tokenizer import save_tokenizer

QWEN_PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 2,
    "patch_size": 16,
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "temporal_patch_size": 2,
}
QWEN_VIDEO_PREPROCESSOR = QWEN_PREPROCESSOR | {
    "size": {"longest_edge": 25165824, "shortest_edge": 4096},
    "video_processor_type": "Qwen3VLVideoProcessor",
}
KIMI_PREPROCESSOR: dict[str, Any] = {
    "auto_map": {
        "AutoImageProcessor": "kimi_k25_vision_processing.KimiK25VisionProcessor",
        "AutoProcessor": "kimi_k25_processor.KimiK25Processor",
    },
    "media_proc_cfg": {
        "fixed_output_tokens": None,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "in_patch_limit": 16384,
        "in_patch_limit_each_frame": 4096,
        "in_patch_limit_video": None,
        "max_num_frames_each_video": None,
        "merge_kernel_size": 2,
        "patch_limit_on_one_side": 512,
        "patch_size": 14,
        "sample_fps": 2.0,
        "temporal_merge_kernel_size": 4,
        "timestamp_mode": "hh:mm:ss.fff",
    },
}
QWEN_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
QWEN_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}
{{ part.text }}
{%- else -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""


def qwen_folder(folder: Path, model_type: str = "qwen3_vl") -> Path:
    """config.json of a tiny model with real patch sizes, tokenizer, template and both preprocessors."""
    folder.mkdir(parents=True, exist_ok=True)
    save_qwen_tokenizer(folder)
    write(folder / "config.json", qwen_config(model_type))
    write(folder / "preprocessor_config.json", QWEN_PREPROCESSOR)
    write(folder / "video_preprocessor_config.json", QWEN_VIDEO_PREPROCESSOR)
    return folder


def kimi_folder(folder: Path) -> Path:
    """The published config with a synthetic tokenizer's media token, and the preprocessor settings."""
    folder.mkdir(parents=True, exist_ok=True)
    config = synthetic_config("tiny")
    save_tokenizer(folder, config["text_config"]["vocab_size"])
    write(folder / "config.json", config)
    write(folder / "preprocessor_config.json", KIMI_PREPROCESSOR)
    return folder


def qwen_config(model_type: str) -> dict[str, Any]:
    """What transformers' AutoConfig takes for a model of two layers and a vision tower of two blocks."""
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "num_position_embeddings": 256,
        "out_hidden_size": 64,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    text: dict[str, Any] = {
        "head_dim": 32,
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": 65536,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    }
    if model_type.startswith("qwen3_vl"):
        vision["deepstack_visual_indexes"] = [0, 1]
        sections = {"mrope_section": [8, 4, 4], "mrope_interleaved": True}
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000000.0} | sections
    else:
        text |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2}
        text |= {"linear_num_value_heads": 2, "layer_types": ["linear_attention", "full_attention"]}
        sections = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000000.0} | sections
    if model_type.endswith("_moe"):
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        text |= {"shared_expert_intermediate_size": 32}
    architecture = {
        "qwen3_vl": "Qwen3VLForConditionalGeneration",
        "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
        "qwen3_5": "Qwen3_5ForConditionalGeneration",
        "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    }[model_type]
    tokens = {name.strip("<|>") + "_token_id": 256 + i for i, name in enumerate(QWEN_SPECIAL)}
    return {
        "architectures": [architecture],
        "dtype": "float32",
        "image_token_id": tokens["image_pad_token_id"],
        "model_type": model_type,
        "text_config": text | {"model_type": f"{model_type}_text"},
        "tie_word_embeddings": False,
        "video_token_id": tokens["video_pad_token_id"],
        "vision_config": vision
        | {"model_type": f"{model_type}_vision" if "3_5" in model_type else model_type},
        "vision_end_token_id": tokens["vision_end_token_id"],
        "vision_start_token_id": tokens["vision_start_token_id"],
    }


def save_qwen_tokenizer(folder: Path) -> None:
    """One token a byte, then the special tokens of Qwen."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in QWEN_SPECIAL])
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "chat_template.jinja").write_text(QWEN_TEMPLATE)
    write(
        folder / "tokenizer_config.json",
        {
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
