"""Kimi K2.5: patches for MoonViT by the settings of the checkpoint's preprocessor, without its code.

The arithmetic is that of vLLM 0.26 (transformers_utils/processors/kimi_k25_vision_fused.py), bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image

from kimi_bridge.errors import MultimodalError
from kimi_bridge.multimodal.processors import ForwardPolicy, Grid, read_json


@dataclass(frozen=True)
class KimiK25:
    """The `media_proc_cfg` of preprocessor_config.json, as far as it concerns images, and the media token.

    An image is made smaller, never larger, until it has at most about `patch_limit` patches and no side of
    more than `side_limit`; black is added below and to the right up to whole tokens of `merge` x `merge`
    patches.
    """

    placeholder: int
    patch_size: int
    merge: int
    patch_limit: int
    side_limit: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    policy: ClassVar[ForwardPolicy] = ForwardPolicy(
        position_ids="plain", mm_token_type_ids=False, packs=True, deferred=("inputs_embeds",)
    )
    # Megatron-Bridge's KimiK25VLModel calls the grids image_grid_thw.
    names: ClassVar[tuple[str, str]] = ("pixel_values", "grid_thws")

    @property
    def patches_per_token(self) -> int:
        return self.merge**2

    @property
    def patch_shape(self) -> tuple[int, int, int]:
        return (3, self.patch_size, self.patch_size)

    @classmethod
    def from_folder(cls, folder: Path) -> KimiK25:
        """By config.json and preprocessor_config.json. Raises MultimodalError for settings unlike these."""
        placeholder = read_json(folder / "config.json").get("media_placeholder_token_id")
        path = folder / "preprocessor_config.json"
        settings = read_json(path).get("media_proc_cfg")
        if not isinstance(settings, dict) or type(placeholder) is not int:
            raise MultimodalError(f"{path} or config.json: no media_proc_cfg, or no media token id.")
        return cls.from_settings(settings, placeholder)

    @classmethod
    def from_settings(cls, settings: dict[str, Any], placeholder: int) -> KimiK25:
        """By the content of `media_proc_cfg`."""
        if settings.get("fixed_output_tokens") is not None:
            raise MultimodalError("media_proc_cfg: fixed_output_tokens is set, which no released model does.")
        try:
            merge = settings["merge_kernel_size"]
            sides = set(merge) if isinstance(merge, list | tuple) else {merge}
            numbers = [settings[k] for k in ("patch_size", "in_patch_limit", "patch_limit_on_one_side")]
            numbers += sides
            mean, std = (tuple(float(v) for v in settings[k]) for k in ("image_mean", "image_std"))
        except (KeyError, TypeError, ValueError) as error:
            raise MultimodalError(f"media_proc_cfg: {error!r}.") from error
        sound = len(sides) == 1 and all(type(n) is int and n > 0 for n in numbers)
        if not (sound and len(mean) == len(std) == 3 and all(std) and math.isfinite(sum(mean + std))):
            raise MultimodalError(f"media_proc_cfg: {settings} cannot be followed.")
        patch_size, patch_limit, side_limit, merge = numbers
        return cls(placeholder, patch_size, merge, patch_limit, side_limit, mean, std)

    def count_tokens(self, width: int, height: int) -> int:
        """The placeholder tokens of an image of that size."""
        cell = self.patch_size * self.merge
        return math.prod(-(-side // cell) for side in self.resized(width, height))

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after resizing, before padding."""
        patch, longest = self.patch_size, self.side_limit * self.patch_size
        patches = max(1.0, width // patch) * max(1.0, height // patch)
        scale = min(1.0, math.sqrt(self.patch_limit / patches), longest / width, longest / height)
        new_width, new_height = (min(max(1, int(side * scale)), longest) for side in (width, height))
        return new_width, new_height

    def patches(self, image: Image.Image) -> tuple[torch.Tensor, Grid]:
        """Float32 [patches, 3, patch_size, patch_size] and the grid."""
        patch, cell = self.patch_size, self.patch_size * self.merge
        size = self.resized(*image.size)
        small = np.asarray(image.resize(size, Image.Resampling.BICUBIC))
        rows, columns = (-(-side // cell) * self.merge for side in (size[1], size[0]))
        padded = np.zeros((rows * patch, columns * patch, 3), np.uint8)
        padded[: size[1], : size[0]] = small
        cells = padded.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
        # One look-up per colour, so that every value is rounded as the reference's table is.
        values = self._normalized()
        out = np.empty((rows * columns, 3, patch, patch), np.float32)
        for colour in range(3):
            np.take(values[colour], cells[:, :, colour].reshape(-1, patch, patch), out=out[:, colour])
        return torch.from_numpy(out), (1, rows, columns)

    def _normalized(self) -> np.ndarray:
        """Float32 [3, 256]: what each byte becomes, by colour."""
        levels = np.arange(256, dtype=np.float32) / np.float32(255.0)
        mean, std = (np.asarray(values, np.float32)[:, None] for values in (self.mean, self.std))
        return (levels - mean) * (np.float32(1.0) / std)
