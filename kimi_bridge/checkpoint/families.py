"""The families of checkpoints that this library reads: a row each. What no row says is the same for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kimi_bridge.errors import CheckpointError

TEXT_PREFIX = "language_model."
VISION_TOWER = "vision_tower."


@dataclass(frozen=True)
class Family:
    """A DeepSeek-V3 text model under `language_model.`, a MoonViT tower, and a projector between them.

    `model_type` and `architecture` are what config.json says, `projector` is what the names of its tensors
    begin with, `linears` the names of its two layers, and `vision_key` what the names of the tower's
    dimensions in vision_config begin with.
    """

    title: str
    model_type: str
    architecture: str
    projector: str
    linears: tuple[str, str]
    vision_key: str


_ROWS = (
    Family(
        "Kimi K2.5",
        "kimi_k25",
        "KimiK25ForConditionalGeneration",
        "mm_projector.",
        ("proj.0", "proj.2"),
        "vt_",
    ),
    Family(
        "Kimi-VL",
        "kimi_vl",
        "KimiVLForConditionalGeneration",
        "multi_modal_projector.",
        ("linear_1", "linear_2"),
        "",
    ),
)

FAMILIES = {family.model_type: family for family in _ROWS}
"""By model_type."""

VISION_PREFIXES = (VISION_TOWER, *(family.projector for family in _ROWS))
"""Names of tensors that no trainer touches begin with one of these."""


def is_carried(name: str) -> bool:
    """Whether a tensor goes from checkpoint to checkpoint as it is, and into no trainer.

    The vision side's do, and the rotary frequencies, which follow from the config, that some checkpoints keep
    beside the weights (Moonlight's does: https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/1838).
    """
    return name.startswith(VISION_PREFIXES) or name.endswith(".rotary_emb.inv_freq")


def family_of(model_type: Any, where: str = "config.json") -> Family:
    """The row of a model_type. Raises CheckpointError for one that this library does not read."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = " and ".join(map(repr, FAMILIES))
        raise CheckpointError(
            f"{where} has model_type {model_type!r}: this library reads {known} checkpoints only."
        )
    return family
