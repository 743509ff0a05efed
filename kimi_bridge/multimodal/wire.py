"""Samples as bytes: msgpack through msgspec, no pixels, and every image once.

An inline image travels as the bytes it encodes, which is a quarter less than its base64, and comes back
as the same URL. What arrives is checked like any other untrusted data.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kimi_bridge.errors import MultimodalError
from kimi_bridge.multimodal.refs import MMRef, Sample, abbreviated

VERSION = 1


class _Image(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The URL is `text` and then the base64 of `data`."""

    text: str
    data: bytes


class _Sample(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Vectors as little-endian bytes: int32, uint8, float32. A reference is image number, offset, length."""

    name: str
    ids: bytes
    loss_mask: bytes
    logprobs: bytes
    refs: list[tuple[int, int, int]]


class _Batch(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    version: int
    images: list[_Image]
    samples: list[_Sample]


def encode(samples: Sequence[Sample]) -> bytes:
    """One message for any number of samples; an image that several of them show is in it once.

    Raises MultimodalError for a name or URL that is no text (JSON can smuggle in halves of characters).
    """
    numbers: dict[str, int] = {}
    wired = []
    for sample in samples:
        refs = [(numbers.setdefault(ref.image, len(numbers)), ref.offset, ref.length) for ref in sample.refs]
        vectors = (_bytes(sample.ids, "<i4"), _bytes(sample.loss_mask, "u1"), _bytes(sample.logprobs, "<f4"))
        wired.append(_Sample(sample.name, *vectors, refs))
    try:
        return msgspec.msgpack.encode(_Batch(VERSION, [_wire_image(url) for url in numbers], wired))
    except UnicodeEncodeError as error:
        odd = next(s for s in samples if not all(map(_is_text, (s.name, *(ref.image for ref in s.refs)))))
        raise MultimodalError(f"{odd.name!r}: its name or one of its images is no text: {error}") from error


def decode(message: bytes) -> list[Sample]:
    """What `encode` was given. Raises MultimodalError for another version, and for a damaged message."""
    if not isinstance(message, bytes | bytearray | memoryview):
        raise MultimodalError(f"{type(message).__name__} is no rollout message: give the bytes of `encode`.")
    try:
        parts = msgspec.msgpack.decode(message, type=list[msgspec.Raw])
        version = msgspec.msgpack.decode(parts[0], type=int) if parts else None
        if version != VERSION:
            raise MultimodalError(
                f"A rollout message of version {version}, this side reads {VERSION}: run the same release."
            )
        batch = msgspec.msgpack.decode(message, type=_Batch)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise MultimodalError(f"No rollout message, or a damaged one: {error}") from error
    urls = [_url(image) for image in batch.images]
    return [_sample(wired, urls) for wired in batch.samples]


def _is_text(value: str) -> bool:
    return value.encode(errors="ignore").decode() == value


def _wire_image(url: str) -> _Image:
    head, comma, text = url.partition(",")
    if comma and head[:5].lower() == "data:" and head.endswith(";base64"):
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            return _Image(url, b"")
        # Base64 can be spelled in other ways than ours; such a URL travels as it is.
        if base64.b64encode(data).decode() == text:
            return _Image(head + comma, data)
    return _Image(url, b"")


def _url(image: _Image) -> str:
    return image.text + base64.b64encode(image.data).decode() if image.data else image.text


def _sample(wired: _Sample, urls: list[str]) -> Sample:
    vectors = []
    for field, data, dtype in (
        ("ids", wired.ids, "<i4"),
        ("loss_mask", wired.loss_mask, "u1"),
        ("logprobs", wired.logprobs, "<f4"),
    ):
        if len(data) % np.dtype(dtype).itemsize:
            raise MultimodalError(
                f"{abbreviated(wired.name)}: {field} of {len(data)} bytes: a damaged message."
            )
        vectors.append(np.frombuffer(data, dtype))
    for number, offset, length in wired.refs:
        if not (0 <= number < len(urls) and 0 <= offset < 2**31 and 0 < length < 2**31):
            raise MultimodalError(
                f"{abbreviated(wired.name)}: reference to image {number} of {len(urls)}, {length} tokens "
                f"from {offset} on: a damaged message."
            )
    refs = tuple(MMRef(urls[number], offset, length) for number, offset, length in wired.refs)
    ids, loss_mask, logprobs = vectors
    return Sample(wired.name, ids, loss_mask, logprobs, refs)


def _bytes(vector: NDArray, dtype: str) -> bytes:
    return vector.astype(dtype, copy=False).tobytes()
