"""The configs of Kimi K2.5 and Kimi-VL checkpoints, read without remote code.

Importing this module registers their classes with transformers' AutoConfig.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, DeepseekV3Config, PretrainedConfig

from kimi_bridge.checkpoint.families import FAMILIES
from kimi_bridge.checkpoint.quantization import Int4Quantization, read_quantization
from kimi_bridge.errors import CheckpointError

__all__ = ["Int4Quantization", "KimiConfig", "KimiK25Config", "KimiVLConfig", "read_quantization"]

# What from_pretrained adds to the content of the file; none of it belongs into the next file.
_NOT_IN_THE_FILE = ("name_or_path", "attn_implementation", "experts_implementation")


class KimiConfig(PretrainedConfig):
    """A family's config: `text_config` is a DeepseekV3Config, `vision_config` stays the dict it is.

    The file's own keys are kept: what is written back is the file as it was read, with the changes
    made to this object since (so `model_type: kimi_k2`, `auto_map`, keys unknown to transformers and the
    quantization_config all survive). `rope_scaling` and `rope_theta` are always written, because
    transformers 4 knows nothing of `rope_parameters`.
    Raises CheckpointError for another architecture, and for a missing or unusable text_config.
    """

    sub_configs: ClassVar[dict[str, type[PretrainedConfig]]] = {"text_config": DeepseekV3Config}
    has_no_defaults_at_init = True

    def __init__(
        self,
        text_config: dict[str, Any] | PretrainedConfig | None = None,
        vision_config: dict[str, Any] | PretrainedConfig | None = None,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        _check_architecture(kwargs.get("architectures"), FAMILIES[self.model_type].architecture)
        text, vision = _text_values(text_config), _as_dict(vision_config)
        source = {k: v for k, v in kwargs.items() if k not in _NOT_IN_THE_FILE and not k.startswith("_")}
        source |= {"tie_word_embeddings": tie_word_embeddings, "text_config": text}
        if vision is not None:
            source["vision_config"] = vision
        self._source = copy.deepcopy(source)
        self.text_config = _deepseek_config(text)
        self.vision_config = copy.deepcopy(vision)
        self.tie_word_embeddings = tie_word_embeddings
        with _plain_config_errors("config.json"):
            super().__init__(**copy.deepcopy(kwargs))

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json: as it was read, plus whatever was changed since."""
        fresh = type(self)(**copy.deepcopy(self._source))
        out = _with_changes(self._source, self._flat(), fresh._flat())
        source_text = self._source["text_config"]
        text = _with_changes(source_text, self.text_config.to_dict(), fresh.text_config.to_dict())
        out["text_config"] = _with_both_rope_forms(
            text, source_text, self.text_config.rope_parameters, fresh.text_config.rope_parameters
        )
        self.dict_dtype_to_str(out)
        return out

    def to_diff_dict(self) -> dict[str, Any]:
        """The same as to_dict: the file states every value it was read with."""
        return self.to_dict()

    def _flat(self) -> dict[str, Any]:
        """Every attribute as transformers would write it, without the two sub-configs' own merging."""
        flat = super().to_dict()
        flat.pop("text_config")
        return {k: v for k, v in flat.items() if not k.startswith("_")}


class KimiK25Config(KimiConfig):
    """`KimiConfig` of Kimi-K2.5, K2.6 and K2.7-Code."""

    model_type = "kimi_k25"
    # Said in each class: transformers 5 makes an __init__ for one whose body has none.
    __init__ = KimiConfig.__init__


class KimiVLConfig(KimiConfig):
    """`KimiConfig` of Kimi-VL-A3B."""

    model_type = "kimi_vl"
    __init__ = KimiConfig.__init__


CONFIG_CLASSES: dict[str, type[KimiConfig]] = {
    config.model_type: config for config in (KimiK25Config, KimiVLConfig)
}


def _as_dict(config: Any) -> Any:
    return config.to_dict() if isinstance(config, PretrainedConfig) else config


def _check_architecture(architectures: Any, expected: str) -> None:
    if architectures and list(architectures) != [expected]:
        raise CheckpointError(
            f"config.json names the architecture {', '.join(map(str, architectures))}: its model_type "
            f"belongs to {expected}; use the config.json that was published with the weights."
        )


def _text_values(text_config: Any) -> dict[str, Any]:
    text = _as_dict(text_config)
    if not isinstance(text, dict) or not text:
        raise CheckpointError(
            "config.json has no text_config: Kimi K2.5 and Kimi-VL keep the language model's settings "
            "there; use the config.json that was published with the weights."
        )
    return text


def _deepseek_config(text: dict[str, Any]) -> DeepseekV3Config:
    """Builds the DeepseekV3Config under its own model_type; to_dict puts the file's model_type back."""
    values = {k: v for k, v in copy.deepcopy(text).items() if k != "model_type"}
    # MLA has no key-value heads; transformers' default for the key would be another model's.
    values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
    with _plain_config_errors("text_config in config.json"):
        return DeepseekV3Config(**values)


@contextmanager
def _plain_config_errors(where: str) -> Iterator[None]:
    """Turns what transformers makes of a wrong value into one sentence."""
    try:
        yield
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{where} has a value that cannot be ({reason}): correct it.") from error


def _with_changes(source: dict[str, Any], now: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
    """`source` with every key set to its new value, or removed, where `now` differs from `fresh`."""
    out = {k: v for k, v in copy.deepcopy(source).items() if k in now or k not in fresh}
    out.update({k: v for k, v in now.items() if k not in fresh or fresh[k] != v})
    return out


def _with_both_rope_forms(
    text: dict[str, Any], source: dict[str, Any], now: Any, fresh: Any
) -> dict[str, Any]:
    """`text` with rope_theta and rope_scaling (transformers 4); rope_parameters (5) if the file had them."""
    if "rope_parameters" not in source:
        text.pop("rope_parameters", None)
    if not now or ("rope_scaling" in source and now == fresh):
        return text
    scaling = {k: v for k, v in now.items() if k != "rope_theta"}
    text["rope_theta"] = now["rope_theta"]
    text["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    return text


for _model_type, _config in CONFIG_CLASSES.items():
    AutoConfig.register(_model_type, _config, exist_ok=True)
