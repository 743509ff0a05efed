"""Model inputs from references, when the trainer is about to run forward and not before."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from kimi_bridge.errors import MultimodalError
from kimi_bridge.multimodal.images import INLINE_ONLY, ImagePolicy, load_image
from kimi_bridge.multimodal.packing import PackedBatch
from kimi_bridge.multimodal.processors import Grid, Processor, mrope_positions
from kimi_bridge.multimodal.refs import Sample, abbreviated, check_placeholders

Patches = tuple[torch.Tensor, Grid]


def materialize(
    batch: PackedBatch, processor: Processor, images: ImagePolicy = INLINE_ONLY
) -> dict[str, Any]:
    """What the model's forward takes for one packed batch. Materializer keeps images in between."""
    return Materializer(processor, images)(batch)


class Materializer:
    """Makes model inputs of packed batches; `map(materializer, batches)` does so one batch at a time.

    One image is decoded at a time, and each image of a batch once, however often it is shown; the patches of
    inline images are kept for the next batches, up to `cache_bytes` with their URLs, the last used ones.
    """

    def __init__(
        self, processor: Processor, images: ImagePolicy = INLINE_ONLY, cache_bytes: int = 512 * 2**20
    ) -> None:
        self.processor = processor
        self.images = images
        self.cache_bytes = cache_bytes
        self._cache: OrderedDict[str, Patches] = OrderedDict()
        self._cached_bytes = 0

    def __call__(self, batch: PackedBatch) -> dict[str, Any]:
        """Model kwargs, on the CPU.

        `input_ids` int64 [1, tokens]; `position_ids` by the family's policy; float32 patches of all images
        and int64 [images, 3] grids, where there are images; `mm_token_type_ids` int64 [1, tokens] where the
        policy says so. There is no attention mask: transformers finds the samples by the positions, which
        it does only without a cache, so `use_cache` is False for the families that run in transformers.
        Raises MultimodalError, before anything is built, for placeholders that are not exactly the blocks,
        and for an image that is refused or has another number of tokens than its block.
        """
        samples = batch.samples()
        self._check(samples)
        inputs: dict[str, Any] = {"input_ids": torch.from_numpy(batch.ids.astype(np.int64))[None]}
        grids = self._add_patches(batch, inputs)
        if self.processor.policy.mm_token_type_ids:
            types = torch.from_numpy(batch.mm_token_type_ids.astype(np.int64))
            inputs["mm_token_type_ids"] = types[None]
        positions = torch.from_numpy(batch.position_ids)[None]
        if self.processor.policy.position_ids == "mrope":
            inputs["position_ids"] = torch.cat((positions, self._mrope(samples, grids)))[:, None]
            inputs["use_cache"] = False
        else:
            inputs["position_ids"] = positions
        return inputs

    def _check(self, samples: list[Sample]) -> None:
        if len(samples) > 1 and not self.processor.policy.packs:
            raise MultimodalError(
                f"{len(samples)} samples in one batch: this family's layers carry a state across them. "
                "Pack each alone."
            )
        for sample in samples:
            if len(sample.refs) > self.images.max_images:
                raise MultimodalError(
                    f"{sample.name}: {len(sample.refs)} images, the policy allows {self.images.max_images}."
                )
            check_placeholders(sample.name, sample.ids, sample.refs, self.processor.placeholder)

    def _add_patches(self, batch: PackedBatch, inputs: dict[str, Any]) -> list[Grid]:
        """Fills one tensor with the patches of all images, in the order of their blocks."""
        if not batch.refs:
            return []
        rows = np.array([ref.length for ref in batch.refs]) * self.processor.patches_per_token
        starts = np.cumsum(rows) - rows
        shown: dict[str, list[int]] = {}
        for number, ref in enumerate(batch.refs):
            shown.setdefault(ref.image, []).append(number)
        try:
            patches = torch.empty(int(rows.sum()), *self.processor.patch_shape)
        except RuntimeError as error:
            raise MultimodalError(
                f"{', '.join(batch.names)[:200]}: no memory for the patches of {int(rows.sum())} x "
                f"{list(self.processor.patch_shape)}: truncate the samples, or pack fewer ({error})."
            ) from error
        grids: list[Grid] = [(0, 0, 0)] * len(batch.refs)
        for url, numbers in shown.items():
            made, grid = self._patches(batch, url, numbers)
            for number in numbers:
                patches[starts[number] : starts[number] + rows[number]] = made
                grids[number] = grid
        inputs[self.processor.names[0]] = patches
        inputs[self.processor.names[1]] = torch.tensor(grids, dtype=torch.int64)
        return grids

    def _patches(self, batch: PackedBatch, url: str, numbers: list[int]) -> Patches:
        """The image's patches, once its number of tokens is known to be that of all its blocks."""
        if (kept := self._cache.get(url)) is not None:
            self._cache.move_to_end(url)
            self._check_count(batch, url, numbers, len(kept[0]) // self.processor.patches_per_token)
            return kept
        try:
            image = load_image(url, self.images)
            count = self.processor.count_tokens(*image.size)
        except MultimodalError as error:
            raise MultimodalError(f"{self._where(batch, numbers[0])}: {error}") from error
        self._check_count(batch, url, numbers, count)
        made = self.processor.patches(image)
        self._check_count(batch, url, numbers, len(made[0]) // self.processor.patches_per_token)
        self._keep(url, made)
        return made

    def _check_count(self, batch: PackedBatch, url: str, numbers: list[int], count: int) -> None:
        for number in numbers:
            if (length := batch.refs[number].length) != count:
                raise MultimodalError(
                    f"{self._where(batch, number)} has a block of {length} tokens and makes {count}: engine "
                    f"and trainer process it differently, or it is another image: {abbreviated(url)}"
                )

    def _where(self, batch: PackedBatch, number: int) -> str:
        """The sample and the image in it, for errors."""
        offset = batch.refs[number].offset
        sample = int(np.searchsorted(batch.cu_seqlens, offset, side="right")) - 1
        first = sum(ref.offset < batch.cu_seqlens[sample] for ref in batch.refs)
        return f"{batch.names[sample]}: image {number - first}"

    def _keep(self, url: str, made: Patches) -> None:
        size = _size(url, made)
        # What lies elsewhere may have changed by the next batch.
        if size > self.cache_bytes or url[:5].lower() != "data:":
            return
        self._cache[url] = made
        self._cached_bytes += size
        while self._cached_bytes > self.cache_bytes:
            self._cached_bytes -= _size(*self._cache.popitem(last=False))

    def _mrope(self, samples: list[Sample], grids: list[Grid]) -> torch.Tensor:
        """int64 [3, tokens]: every sample's own positions, one behind the other."""
        merge, done, pieces = round(self.processor.patches_per_token**0.5), 0, []
        for sample in samples:
            here = grids[done : done + len(sample.refs)]
            pieces.append(mrope_positions(len(sample), list(sample.refs), here, merge))
            done += len(here)
        return torch.cat(pieces, dim=1)


def _size(url: str, made: Patches) -> int:
    return made[0].nbytes + len(url)
