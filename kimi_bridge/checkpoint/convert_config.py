"""config.json of a converted checkpoint."""

from __future__ import annotations

import copy
from typing import Any

from kimi_bridge.checkpoint.quantization import without_quantization
from kimi_bridge.checkpoint.synthetic_values import published_quantization_config
from kimi_bridge.errors import CheckpointError


def quantized_config(
    config: dict[str, Any], reference: dict[str, Any] | None, group_size: int
) -> dict[str, Any]:
    """`config` with the reference's quantization_config, where it has it, or else the published one."""
    config = without_quantization(copy.deepcopy(config))
    if reference is None:
        quantization = published_quantization_config()
        quantization["config_groups"]["group_0"]["weights"]["group_size"] = group_size
        _into_text(config, quantization)
        return config
    for level, into in ((reference, config), (_text(reference), _text(config))):
        if level.get("quantization_config") is not None:
            into["quantization_config"] = copy.deepcopy(level["quantization_config"])
    if reference == without_quantization(reference):
        raise CheckpointError("The reference has no quantization_config: give an INT4 checkpoint.")
    config["text_config"] = dict(sorted(_text(config).items()))
    return config


def truncated_config(config: dict[str, Any], layers: int, experts: int | None) -> dict[str, Any]:
    """`config` for the first layers and experts alone.

    Raises CheckpointError for numbers that the model does not have.
    """
    config = copy.deepcopy(config)
    text = _text(config)
    _check_range("layers", layers, text.get("num_hidden_layers"))
    # moe_layer_freq and layer_types may be lists with an entry per layer.
    for key, value in text.items():
        if isinstance(value, list) and len(value) == text["num_hidden_layers"]:
            text[key] = value[:layers]
    text["num_hidden_layers"] = layers
    # Layers for multi-token prediction come after the others, and are cut off with them.
    if text.get("num_nextn_predict_layers"):
        text["num_nextn_predict_layers"] = 0
    if experts is not None:
        _check_range("experts", experts, text.get("n_routed_experts"))
        text["n_routed_experts"] = experts
        _shrink_routing(text, experts)
    return config


def _shrink_routing(text: dict[str, Any], experts: int) -> None:
    """Top-k and expert groups such that routing is possible."""
    if text.get("n_group"):
        # A group is rated by its two best experts.
        possible = [
            n for n in range(1, text["n_group"] + 1) if experts % n == 0 and (n == 1 or experts // n >= 2)
        ]
        text["n_group"] = possible[-1]
        text["topk_group"] = min(text.get("topk_group") or 1, text["n_group"])
        reachable = experts // text["n_group"] * text["topk_group"]
    else:
        reachable = experts
    text["num_experts_per_tok"] = min(text["num_experts_per_tok"], reachable)


def _check_range(what: str, wanted: int, there: Any) -> None:
    if not isinstance(there, int):
        raise CheckpointError(f"text_config in config.json does not say how many {what} there are.")
    if not 1 <= wanted <= there:
        raise CheckpointError(
            f"{wanted} {what} were asked for: the checkpoint has {there}, ask for 1 to {there}."
        )


def _text(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError("config.json has no text_config: use the one published with the weights.")
    return text


def _into_text(config: dict[str, Any], quantization: dict[str, Any]) -> None:
    config["text_config"] = dict(sorted((_text(config) | {"quantization_config": quantization}).items()))
