"""Where the images of a rollout lie in the engine's expanded token ids. Pixels are no part of it.

Expanded ids are what the engine computed with: an image is a block of as many placeholder tokens as the
vision tower gives features. Logical ids hold one placeholder for it, as a chat template writes it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kimi_bridge.errors import MultimodalError

IMAGE_TYPE = 1
MAX_OFFSET = 2**31 - 1


@dataclass(frozen=True, slots=True)
class MMRef:
    """An image, by the URL that the messages gave, and the block of placeholder tokens that stands for it."""

    image: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length

    def moved(self, by: int) -> MMRef:
        return MMRef(self.image, self.offset + by, self.length)

    def __repr__(self) -> str:
        return f"MMRef(image={abbreviated(self.image)!r}, offset={self.offset}, length={self.length})"


@dataclass(frozen=True, eq=False)
class Sample:
    """One rollout: expanded ids, what to train on, what the engine's policy gave it, and its images.

    `ids` int32 [tokens]; `loss_mask` bool [tokens], False for the first token, which nothing predicts;
    `logprobs` float32 [tokens], the log-probability of the token itself, 0 (not NaN) where none was taken;
    `refs` in the order of the ids. `name` is what errors call the sample. Arrays are copied where they have
    another type, and made read-only. Raises MultimodalError for lengths, references or masks that do not fit.
    """

    name: str
    ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    refs: tuple[MMRef, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise MultimodalError(f"A sample is called {self.name!r}: give its name as text.")
        for field, dtype in (("ids", np.int32), ("loss_mask", np.bool_), ("logprobs", np.float32)):
            object.__setattr__(self, field, _vector(self.name, field, getattr(self, field), dtype))
        object.__setattr__(self, "refs", tuple(self.refs))
        lengths = (len(self.ids), len(self.loss_mask), len(self.logprobs))
        if len(set(lengths)) != 1:
            raise MultimodalError(
                f"{self.name}: {lengths[0]} ids, {lengths[1]} loss mask and {lengths[2]} log-probabilities: "
                "give one of each per token."
            )
        if len(self.ids) and self.loss_mask[0]:
            raise MultimodalError(f"{self.name}: loss on the first token, which nothing predicts: mask it.")
        # A NaN would outlive a mask that is multiplied; rounding may lift a probability of 1 above 1.
        if (odd := np.flatnonzero(~np.isfinite(self.logprobs) | (self.logprobs > 1e-3))).size:
            raise MultimodalError(
                f"{self.name}: token {odd[0]} has log-probability {self.logprobs[odd[0]]}: mask it and give "
                "0 where none was taken, and ask the engine for log-probabilities, not logits."
            )
        check_refs(self.name, self.refs, len(self.ids))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def mm_token_type_ids(self) -> NDArray[np.uint8]:
        """uint8 [tokens]: 1 on the blocks of images, 0 on text, as transformers' Qwen-VL models take it."""
        return token_types(self.refs, len(self.ids))

    @property
    def logical_length(self) -> int:
        """The tokens of the sample with one placeholder an image."""
        return len(self.ids) - sum(ref.length - 1 for ref in self.refs)


def build_mm_refs(
    messages: Iterable[Mapping[str, Any]],
    ids: ArrayLike,
    placeholder: int,
    *,
    ranges: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
    counts: Sequence[int] | None = None,
    sample: str = "sample",
) -> tuple[MMRef, ...]:
    """References for the `image_url` parts of the messages in an engine's expanded ids.

    By `ranges`, the engine's placeholder ranges: (offset, length) pairs, objects or dicts with these names,
    or a mapping of modalities to lists of them, as vLLM has them. Without ranges by runs of the placeholder
    token, which `counts`, the tokens of each image (see `Processor.count_tokens`), split where they touch
    and check where they do not.
    Raises MultimodalError, with the sample, the image and the counts, unless every image has exactly one
    block and every placeholder token belongs to one.
    """
    images = list(image_urls(messages, sample))
    tokens = _vector(sample, "ids", ids, np.int32)
    counts = None if counts is None else _counts(counts, sample)
    spans = _runs(tokens, placeholder) if ranges is None else _spans(ranges, sample)
    if ranges is None and counts is not None:
        spans = _split_by_counts(spans, images, counts, sample)
    if len(spans) != len(images):
        what = "runs of the placeholder token" if ranges is None else "placeholder ranges"
        raise MultimodalError(
            f"{sample}: {len(images)} images in the messages, {len(spans)} {what} in {len(tokens)} tokens "
            f"({_surplus(images, spans)}): pass the engine's ranges, or counts, and the messages it saw."
        )
    refs = tuple(MMRef(image, *span) for image, span in zip(images, spans, strict=True))
    check_refs(sample, refs, len(tokens))
    check_placeholders(sample, tokens, refs, placeholder)
    return refs


def image_urls(messages: Iterable[Mapping[str, Any]], sample: str = "sample") -> Iterator[str]:
    """The URLs of all images, in the order of the prompt. Raises MultimodalError for media of other kinds."""
    if not isinstance(messages, Iterable):
        raise MultimodalError(f"{sample}: messages are {type(messages).__name__}: give a list of them.")
    for message in messages:
        if not isinstance(message, Mapping):
            raise MultimodalError(f"{sample}: a message is {type(message).__name__}: give dicts.")
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if isinstance(content, Mapping) or not isinstance(content, Iterable):
            raise MultimodalError(
                f"{sample}: content is {type(content).__name__}: give text or a list of parts."
            )
        for part in content:
            if not isinstance(part, Mapping):
                continue
            kind = part.get("type", "text")
            if kind == "image_url":
                image = part.get("image_url")
                url = image.get("url") if isinstance(image, Mapping) else image
                if not isinstance(url, str):
                    raise MultimodalError(f"{sample}: an image_url part without a URL.")
                yield url
            elif any(word in str(kind) for word in ("image", "video", "audio", "file")):
                raise MultimodalError(f"{sample}: a {kind} part: give images as image_url parts.")


def check_refs(sample: str, refs: Iterable[MMRef], tokens: int) -> None:
    """Raises MultimodalError unless the blocks are in order, apart from each other and inside the sample."""
    end = 0
    for number, ref in enumerate(refs):
        sound = isinstance(ref, MMRef) and isinstance(ref.image, str)
        if not (sound and type(ref.offset) is type(ref.length) is int):
            raise MultimodalError(f"{sample}: reference {number} is no MMRef of a URL and two integers.")
        if ref.length < 1 or ref.offset < end or ref.end > tokens:
            raise MultimodalError(
                f"{sample}: image {number} at tokens {ref.offset} to {ref.end}, of {tokens} tokens, the "
                f"block before it ends at {end}: blocks follow each other, and hold one token at least."
            )
        end = ref.end


def check_placeholders(sample: str, ids: NDArray[np.int32], refs: Sequence[MMRef], placeholder: int) -> None:
    """Raises MultimodalError unless the blocks are exactly the placeholder tokens.

    A placeholder elsewhere is text that spells the token, or a token that the policy sampled: a model
    would take it for an image.
    """
    places, blocks = ids == placeholder, token_types(refs, len(ids)) == IMAGE_TYPE
    for number, ref in enumerate(refs):
        held = int(places[ref.offset : ref.end].sum())
        if held != ref.length:
            raise MultimodalError(
                f"{sample}: image {number} has {ref.length} tokens from {ref.offset} on, {held} of them "
                f"placeholders ({placeholder}): these are not the ids that the reference was made for."
            )
    if (stray := np.flatnonzero(places & ~blocks)).size:
        raise MultimodalError(
            f"{sample}: {stray.size} placeholder tokens ({placeholder}) belong to none of the {len(refs)} "
            f"images, the first is token {stray[0]}: drop the sample, or truncate it to {stray[0]} tokens."
        )


def token_types(refs: Iterable[MMRef], tokens: int) -> NDArray[np.uint8]:
    """uint8 [tokens]: 1 on the blocks of images."""
    types = np.zeros(tokens, np.uint8)
    for ref in refs:
        types[ref.offset : ref.end] = IMAGE_TYPE
    return types


def collapse(ids: ArrayLike, refs: Iterable[MMRef]) -> NDArray[np.int32]:
    """Logical ids: each block becomes one placeholder. What an engine is asked with, token in.

    Raises MultimodalError for references that do not fit the ids.
    """
    tokens, refs = _vector("collapse", "ids", ids, np.int32), tuple(refs)
    check_refs("collapse", refs, len(tokens))
    keep = np.ones(len(tokens), bool)
    for ref in refs:
        keep[ref.offset + 1 : ref.end] = False
    kept: NDArray[np.int32] = tokens[keep]
    return kept


def expand(
    logical: ArrayLike, placeholder: int, counts: Sequence[int], sample: str = "sample"
) -> tuple[NDArray[np.int32], list[tuple[int, int]]]:
    """Expanded ids and their (offset, length) ranges; `counts` are the tokens of each image.

    Raises MultimodalError unless there is one placeholder for each count, of 1 or more.
    """
    counts = _counts(counts, sample)
    tokens = _vector(sample, "ids", logical, np.int32)
    places = np.flatnonzero(tokens == placeholder)
    if len(places) != len(counts):
        raise MultimodalError(f"{sample}: {len(places)} placeholders for {len(counts)} images.")
    if len(tokens) + sum(counts) > MAX_OFFSET:
        raise MultimodalError(f"{sample}: images of {sum(counts)} tokens: more than {MAX_OFFSET} in all.")
    repeats = np.ones(len(tokens), np.int64)
    repeats[places] = counts
    starts = np.cumsum(repeats) - repeats
    return tokens.repeat(repeats), [(int(starts[p]), int(c)) for p, c in zip(places, counts, strict=True)]


def abbreviated(url: str) -> str:
    """The URL as errors and logs show it: an inline image is megabytes."""
    return url if len(url) <= 48 else f"{url[:32]}... ({len(url)} characters)"


def _vector(sample: str, field: str, values: ArrayLike, dtype: type) -> Any:
    try:
        given = np.asarray(values)
        if dtype is np.float32:
            given = given.astype(dtype, copy=False)
    except (TypeError, ValueError) as error:
        raise MultimodalError(f"{sample}: {field} are no vector of numbers: {error}.") from error
    if given.ndim != 1 or (given.size and dtype is np.int32 and given.dtype.kind not in "iu"):
        raise MultimodalError(f"{sample}: {field} of shape {list(given.shape)} and type {given.dtype}.")
    if given.size and dtype is np.int32 and not 0 <= int(given.min()) <= int(given.max()) <= MAX_OFFSET:
        raise MultimodalError(f"{sample}: {field} outside 0 to {MAX_OFFSET}.")
    if dtype is np.bool_ and not ((given == 0) | (given == 1)).all():
        raise MultimodalError(f"{sample}: {field} holds other than 0 and 1: weights go beside it.")
    vector: NDArray[Any] = given.astype(dtype, copy=False)
    if vector is given and vector.flags.writeable:
        vector = vector.copy()
    vector.flags.writeable = False
    return vector


def _counts(counts: Sequence[int], sample: str) -> list[int]:
    try:
        whole = [operator.index(count) for count in counts]
    except TypeError as error:
        raise MultimodalError(f"{sample}: counts are no list of integers: {error}.") from error
    if any(count < 1 for count in whole):
        raise MultimodalError(f"{sample}: an image of {min(whole)} tokens: give counts of 1 or more.")
    return whole


def _spans(ranges: Any, sample: str) -> list[tuple[int, int]]:
    if isinstance(ranges, Mapping):
        if odd := [items for items in ranges.values() if items and not isinstance(items, Iterable)]:
            raise MultimodalError(f"{sample}: placeholder ranges are {odd[0]!r}: give lists of them.")
        held = {modality: list(items) for modality, items in ranges.items() if items}
        if len(held) > 1:
            raise MultimodalError(
                f"{sample}: placeholder ranges of {', '.join(held)}: images alone are read."
            )
        ranges = next(iter(held.values()), [])
    if not isinstance(ranges, Iterable):
        raise MultimodalError(f"{sample}: placeholder ranges are {ranges!r}: give a list of them.")
    return sorted(_span(item, sample) for item in ranges)


def _span(item: Any, sample: str) -> tuple[int, int]:
    if isinstance(item, Mapping):
        offset, length = item.get("offset"), item.get("length")
    elif isinstance(item, Sequence) and len(item) == 2:
        offset, length = item
    else:
        offset, length = getattr(item, "offset", None), getattr(item, "length", None)
    if not (isinstance(offset, int) and isinstance(length, int)):
        raise MultimodalError(f"{sample}: {item!r} is no placeholder range: it needs an offset and a length.")
    return offset, length


def _runs(ids: NDArray[np.int32], placeholder: int) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], ids == placeholder, [0])).astype(np.int8)))
    return [(int(start), int(end - start)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _split_by_counts(
    runs: list[tuple[int, int]], images: list[str], counts: Sequence[int], sample: str
) -> list[tuple[int, int]]:
    """The runs cut into blocks of the counts, which must end where the runs end."""
    if len(counts) != len(images):
        raise MultimodalError(f"{sample}: {len(counts)} counts for {len(images)} images.")
    spans: list[tuple[int, int]] = []
    for offset, length in runs:
        end = offset + length
        while offset < end and len(spans) < len(images):
            spans.append((offset, counts[len(spans)]))
            offset += spans[-1][1]
        if offset != end:
            number = len(spans) - 1
            raise MultimodalError(
                f"{sample}: the run of {length} placeholders that ends at token {end} is not filled exactly "
                f"by the counts up to image {number} ({', '.join(map(str, counts[: number + 1]))})."
            )
    return spans


def _surplus(images: list[str], spans: list[tuple[int, int]]) -> str:
    if len(images) > len(spans):
        number = len(spans)
        return f"image {number} has no block: {abbreviated(images[number])}"
    offset, length = spans[len(images)]
    return f"no image for the {length} tokens from {offset} on"
