"""`adapter_config.json`, read as untrusted input."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from peft import LoraConfig
from peft.utils.other import get_pattern_key

from kimi_bridge.checkpoint.shards import load_json
from kimi_bridge.errors import CheckpointError

CONFIG_NAME = "adapter_config.json"

# Kinds of adapters whose delta is not scale * B A, or not for every token.
_UNSUPPORTED = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "target_parameters",
    "layer_replication",
    "alora_invocation_tokens",
    "trainable_token_indices",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
)
_LARGEST = sys.float_info.max
# These begin with another base: what was trained is the difference to that one, unless it was converted.
_OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def read_config(folder: Path) -> LoraConfig:
    """The config of a plain LoRA.

    Raises:
        CheckpointError: no such file, another kind of adapter, a rank, alpha or pattern that makes no sense.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {CONFIG_NAME}: give the folder of a PEFT adapter.")
    content = load_json(path)
    kind = content.get("peft_type") if isinstance(content, dict) else None
    if kind != "LORA":
        raise CheckpointError(f"{path} describes a {kind} adapter: only LORA is supported.")
    for key in _UNSUPPORTED:
        if content.get(key):
            raise CheckpointError(f"{path} sets {key}, which is not supported: only plain LoRA is.")
    if content.get("bias", "none") != "none":
        raise CheckpointError(f"{path} sets bias={content['bias']!r}: only bias='none' is supported.")
    if str(content.get("init_lora_weights")).lower().startswith(_OTHER_BASE):
        raise CheckpointError(
            f"{path} sets init_lora_weights={content['init_lora_weights']!r}, whose adapter belongs to a base"
            " of its own: convert it to plain LoRA with peft when you save it."
        )
    _check_numbers(path, content)
    try:
        return LoraConfig.from_pretrained(str(folder))
    except Exception as error:  # whatever peft makes of a file that is not its own
        raise CheckpointError(f"{path} is no LoRA config ({error}): export the adapter again.") from error


def by_pattern(patterns: dict[str, Any] | None, name: str, default: float) -> Any:
    """A module's value of `rank_pattern` or `alpha_pattern`, as peft finds it."""
    return patterns.get(get_pattern_key(list(patterns), name), default) if patterns else default


def _check_numbers(path: Path, content: dict[str, Any]) -> None:
    ranks, alphas = [content.get("r", 8)], [content.get("lora_alpha", 8)]
    for key, values in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        patterns = content.get(key) or {}
        if not isinstance(patterns, dict):
            raise CheckpointError(f"{path} has a {key} that is no object: export the adapter again.")
        for pattern in patterns:
            try:
                re.compile(rf"(.*\.)?({pattern})$")
            except re.error as error:
                raise CheckpointError(
                    f"{path} has the key {pattern!r} in {key}, which is no regular expression ({error}):"
                    " correct it."
                ) from error
        values.extend(patterns.values())
    for rank in ranks:
        if type(rank) is not int or rank < 1:
            raise CheckpointError(f"{path} has the rank {rank!r}: ranks are whole numbers from 1 on.")
    for alpha in alphas:
        # An integer may be too large for a float.
        if type(alpha) not in (int, float) or not -_LARGEST <= alpha <= _LARGEST:
            raise CheckpointError(f"{path} has the alpha {alpha!r}, which is no number to scale with.")
