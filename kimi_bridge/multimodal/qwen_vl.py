"""Qwen3-VL, Qwen3.5 and their MoE models: patches from transformers' own image processor."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image

from kimi_bridge.errors import MultimodalError
from kimi_bridge.multimodal.processors import ForwardPolicy, Grid, read_json

# DeepStack adds features of images in the first layers too, at the places of their blocks.
_QWEN3_VL = ForwardPolicy(
    position_ids="mrope",
    mm_token_type_ids=True,
    packs=True,
    deferred=("inputs_embeds", "position_ids", "visual_pos_masks", "deepstack_visual_embeds"),
)
# Gated DeltaNet layers carry a state from token to token. Without the kernels that reset it between
# samples, transformers 5.12 lets it run on into the next one and says nothing.
_QWEN3_5 = ForwardPolicy(
    position_ids="mrope", mm_token_type_ids=True, packs=False, deferred=("inputs_embeds", "position_ids")
)
POLICIES = {"qwen3_vl": _QWEN3_VL, "qwen3_vl_moe": _QWEN3_VL, "qwen3_5": _QWEN3_5, "qwen3_5_moe": _QWEN3_5}


class QwenVL:
    """Around a `Qwen3VLProcessor` as `AutoProcessor` gives it; its own settings decide everything."""

    names: ClassVar[tuple[str, str]] = ("pixel_values", "image_grid_thw")

    def __init__(self, processor: Any, model_type: str = "qwen3_vl") -> None:
        if model_type not in POLICIES:
            raise MultimodalError(f"{model_type} is no Qwen family here: {', '.join(POLICIES)}.")
        self.policy = POLICIES[model_type]
        self.image_processor = processor.image_processor
        self.placeholder = int(processor.image_token_id)
        self.merge = int(self.image_processor.merge_size)
        self.patches_per_token = self.merge**2
        frames, patch = self.image_processor.temporal_patch_size, self.image_processor.patch_size
        self.patch_shape = (3 * frames * patch * patch,)
        if min(self.merge, frames, patch) < 1:
            raise MultimodalError(
                f"merge_size {self.merge}, frames {frames}, patch_size {patch}: give 1 or more."
            )

    @classmethod
    def from_folder(cls, folder: Path) -> QwenVL:
        """By the checkpoint's tokenizer and preprocessor files."""
        from transformers import AutoProcessor

        config = read_json(folder / "config.json")
        try:
            hf_processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
            processor = cls(hf_processor, str(config.get("model_type")))
        except Exception as error:  # On broken files transformers raises nearly anything.
            raise MultimodalError(f"{folder}: transformers makes no processor of it: {error!r}") from error
        if config.get("image_token_id") != processor.placeholder:
            raise MultimodalError(
                f"{folder}: the config's image token is {config.get('image_token_id')}, the tokenizer's "
                f"{processor.placeholder}: these files are not of one checkpoint."
            )
        return processor

    def count_tokens(self, width: int, height: int) -> int:
        """The placeholder tokens of an image of that size. Raises MultimodalError for one too narrow."""
        try:
            patches = self.image_processor.get_number_of_image_patches(height, width, {})
        except ValueError as error:
            raise MultimodalError(f"An image of {width} x {height} pixels: {error}.") from error
        return patches // self.patches_per_token

    def patches(self, image: Image.Image) -> tuple[torch.Tensor, Grid]:
        """Float32 [patches, 3 * temporal * patch * patch] and the grid."""
        made = self.image_processor(images=[image], return_tensors="pt")
        grid = tuple(made["image_grid_thw"][0].tolist())
        assert made["pixel_values"].shape == (prod(grid), *self.patch_shape)
        return made["pixel_values"], grid
