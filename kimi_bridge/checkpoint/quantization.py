"""Which modules of a checkpoint are INT4, by its quantization_config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PretrainedConfig

from kimi_bridge.checkpoint.families import TEXT_PREFIX, VISION_PREFIXES
from kimi_bridge.errors import CheckpointError

SUPPORTED = (
    "supported are compressed-tensors checkpoints in format pack-quantized with symmetric 4-bit int "
    "weights in groups, and no quantized activations"
)

# The modules of DeepSeek-V3 that are nn.Linear: what the target class "Linear" stands for. The router
# (`mlp.gate`), embeddings and norms are modules of other classes.
LINEAR_MODULES = frozenset(
    {
        "q_proj",
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "lm_head",
    }
)


@dataclass(frozen=True)
class Int4Quantization:
    """Group size, targets and ignore list, with compressed-tensors' own rules for matching names."""

    group_size: int
    targets: tuple[str, ...]
    ignore: tuple[str, ...] = ()
    _known: dict[str, bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    def is_int4(self, weight_name: str) -> bool:
        """By checkpoint name: `language_model.model.layers.3.mlp.experts.7.gate_proj.weight` is."""
        known = self._known.get(weight_name)
        if known is None:
            known = self._known[weight_name] = self._matches(weight_name)
        return known

    def _matches(self, weight_name: str) -> bool:
        module, _, parameter = weight_name.rpartition(".")
        if parameter != "weight" or module.startswith(VISION_PREFIXES):
            return False
        if module.rpartition(".")[2] not in LINEAR_MODULES:
            return False
        from compressed_tensors.utils.match import is_match

        # The quantization_config belongs to the text model, whose names have no prefix.
        return is_match(module.removeprefix(TEXT_PREFIX), _linear(), self.targets, self.ignore)


def read_quantization(config: dict[str, Any] | PretrainedConfig) -> Int4Quantization | None:
    """The INT4 settings of a config.json (as a dict) or of a loaded config; None when it has none.

    Looks at the top level and in text_config; where both state one, they must agree.
    Raises CheckpointError for any quantization other than symmetric INT4 groups.
    """
    values = config if isinstance(config, dict) else config.__dict__
    text = values.get("text_config")
    text_values = text if isinstance(text, dict) else getattr(text, "__dict__", {})
    found = [
        _parse(level["quantization_config"])
        for level in (text_values, values)
        if level.get("quantization_config") is not None
    ]
    if len(found) == 2 and found[0] != found[1]:
        raise CheckpointError(
            "config.json has two quantization_configs, in text_config and at the top level, that disagree: "
            "keep the one the checkpoint was written with."
        )
    return found[0] if found else None


def without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """A copy of a config.json's content for plain weights: no quantization_config on either level."""
    out = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(out.get("text_config"), dict):
        out["text_config"] = {k: v for k, v in out["text_config"].items() if k != "quantization_config"}
    return out


def with_dtype(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A copy of a config.json's content that states `dtype` wherever it states one."""
    stated = {key: str(dtype).removeprefix("torch.") for key in ("torch_dtype", "dtype")}
    out = {key: stated.get(key, value) for key, value in config.items()}
    if isinstance(out.get("text_config"), dict):
        out["text_config"] = {key: stated.get(key, value) for key, value in out["text_config"].items()}
    return out


def _parse(raw: Any) -> Int4Quantization:
    from compressed_tensors.quantization import QuantizationConfig

    values = raw.to_dict() if hasattr(raw, "to_dict") else raw
    if not isinstance(values, dict):
        raise CheckpointError(f"quantization_config in config.json is no object but {values!r}: {SUPPORTED}.")
    method = values.get("quant_method", "compressed-tensors")
    if method != "compressed-tensors":
        raise CheckpointError(f"quantization_config has quant_method {method!r}: {SUPPORTED}.")
    try:
        parsed = QuantizationConfig.model_validate(values)
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"quantization_config in config.json cannot be read ({reason}): {SUPPORTED}."
        ) from error
    schemes = list(parsed.config_groups.values())
    if parsed.format != "pack-quantized" or not schemes:
        raise CheckpointError(f"quantization_config has format {parsed.format!r}: {SUPPORTED}.")
    sizes = {_group_size(scheme) for scheme in schemes}
    if len(sizes) > 1:
        raise CheckpointError(
            f"quantization_config has groups of {sorted(sizes)}: one group size for all is supported."
        )
    targets = tuple(target for scheme in schemes for target in scheme.targets)
    return Int4Quantization(sizes.pop(), targets, tuple(parsed.ignore or ()))


def _group_size(scheme: Any) -> int:
    weights = scheme.weights
    if weights is None or scheme.input_activations is not None or scheme.output_activations is not None:
        raise CheckpointError(f"quantization_config quantizes more than weights, or none: {SUPPORTED}.")
    facts = {
        "num_bits": (weights.num_bits, 4),
        "type": (_text(weights.type), "int"),
        "symmetric": (weights.symmetric, True),
        "strategy": (_text(weights.strategy), "group"),
        "actorder": (_text(weights.actorder), None),
        "format": (_text(scheme.format) or "pack-quantized", "pack-quantized"),
    }
    wrong = [f"{key} {value!r}" for key, (value, wanted) in facts.items() if value != wanted]
    if wrong:
        raise CheckpointError(f"quantization_config has {', '.join(wrong)}: {SUPPORTED}.")
    if not weights.group_size or weights.group_size < 8 or weights.group_size % 8:
        raise CheckpointError(
            f"quantization_config has group_size {weights.group_size}: a positive multiple of 8 is supported."
        )
    return int(weights.group_size)


def _text(value: Any) -> str | None:
    """The plain string behind compressed-tensors' enums."""
    return getattr(value, "value", value)


_LINEAR: list[torch.nn.Module] = []


def _linear() -> torch.nn.Module:
    """One stand-in for every linear module of the model: matching by class looks at nothing else."""
    if not _LINEAR:
        _LINEAR.append(torch.nn.Linear(1, 1, device="meta"))
    return _LINEAR[0]
