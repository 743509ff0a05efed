"""The published config.json with its dimensions scaled down, and the tensors that any such config implies."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from kimi_bridge.checkpoint.config import CONFIG_CLASSES
from kimi_bridge.checkpoint.families import FAMILIES, TEXT_PREFIX, VISION_TOWER, Family, family_of
from kimi_bridge.checkpoint.quantization import read_quantization
from kimi_bridge.checkpoint.synthetic_values import VALUES
from kimi_bridge.checkpoint.triplets import CODES_PER_WORD, part_names
from kimi_bridge.checkpoint.writer import TensorSpec
from kimi_bridge.errors import CheckpointError

# Special tokens stand as far before the end of the vocabulary as in the published tokenizer.
TOKEN_IDS_FROM_END = {
    "bos_token_id": 256,
    "eos_token_id": 255,
    "media_placeholder_token_id": 235,
    "pad_token_id": 1,
}


def synthetic_config(
    size: str, overrides: dict[str, Any] | None = None, family: str = "kimi_k25"
) -> dict[str, Any]:
    """config.json in the published form (transformers 4), without auto_map, for there are no code files.

    `family` is its model_type; `overrides` replace values of text_config. Raises CheckpointError for an
    unknown size or family, or a config that transformers refuses.
    """
    if family not in VALUES:
        raise CheckpointError(f"Unknown family {family!r}: choose from {', '.join(VALUES)}.")
    values = VALUES[family]
    if size not in values.sizes:
        raise CheckpointError(f"Unknown size {size!r}: choose from {', '.join(values.sizes)}.")
    text_size, vision_size = values.sizes[size]
    text = values.text | text_size | (overrides or {})
    vision = values.vision | vision_size
    if "text_hidden_size" in vision:
        vision["text_hidden_size"] = text["hidden_size"]
    ids = {key: text["vocab_size"] - back for key, back in TOKEN_IDS_FROM_END.items()}
    text |= {key: ids[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = values.top | {
        "architectures": [FAMILIES[family].architecture],
        "media_placeholder_token_id": ids["media_placeholder_token_id"],
        "model_type": family,
        "text_config": dict(sorted(text.items())),
        "vision_config": dict(sorted(vision.items())),
    }
    config |= {key: ids[key] for key, value in values.top.items() if value is None}
    CONFIG_CLASSES[family](**config)
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
    family = family_of(config.get("model_type"))
    text, vision = config["text_config"], config.get("vision_config")
    for name, shape in _text_weights(text):
        is_bias = name.endswith("e_score_correction_bias")
        dtype = VALUES[family.model_type].bias_dtype if is_bias else torch.bfloat16
        yield TensorSpec(TEXT_PREFIX + name, dtype, shape)
    if vision is None:
        return
    hidden = vision[f"{family.vision_key}hidden_size"]
    for name, shape in (
        *_projector_weights(family, hidden, config),
        *_vision_weights(family, hidden, vision),
    ):
        yield TensorSpec(name, torch.bfloat16, shape)


def text_weight_names(config: dict[str, Any]) -> list[str]:
    """The text model's logical weights, by this config.json; none where it describes no model."""
    try:
        names = [TEXT_PREFIX + name for name, _ in _text_weights(config["text_config"])]
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return []
    return names[:-1] if config.get("tie_word_embeddings") else names


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


def _projector_weights(family: Family, hidden: int, config: dict[str, Any]) -> _Named:
    vision, (first, second) = config["vision_config"], family.linears
    merged = hidden * prod(vision["merge_kernel_size"])
    yield from _both(f"{family.projector}pre_norm", (hidden,))
    yield from _both(f"{family.projector}{first}", (merged, merged))
    yield from _both(f"{family.projector}{second}", (config["text_config"]["hidden_size"], merged))


def _vision_weights(family: Family, hidden: int, vision: dict[str, Any]) -> _Named:
    width, patch = vision[f"{family.vision_key}intermediate_size"], vision["patch_size"]
    grid = (vision["init_pos_emb_height"], vision["init_pos_emb_width"])
    yield from _both(f"{VISION_TOWER}patch_embed.proj", (hidden, 3, patch, patch))
    yield f"{VISION_TOWER}patch_embed.pos_emb.weight", (*grid, hidden)
    for block in range(vision[f"{family.vision_key}num_hidden_layers"]):
        prefix = f"{VISION_TOWER}encoder.blocks.{block}."
        yield from _both(prefix + "norm0", (hidden,))
        yield from _both(prefix + "wqkv", (3 * hidden, hidden))
        yield from _both(prefix + "wo", (hidden, hidden))
        yield from _both(prefix + "norm1", (hidden,))
        yield from _both(prefix + "mlp.fc0", (width, hidden))
        yield from _both(prefix + "mlp.fc1", (hidden, width))
    yield from _both(f"{VISION_TOWER}encoder.final_layernorm", (hidden,))


def _both(module: str, shape: tuple[int, ...]) -> _Named:
    yield module + ".weight", shape
    yield module + ".bias", shape[:1]
