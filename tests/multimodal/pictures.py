"""Images with content of their own, as data URLs, and messages that show them."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth waves with some noise: resizing and normalising meet every value."""
    draw = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [
        np.sin(x * draw.uniform(0.01, 0.2) + y * draw.uniform(0.01, 0.2) + draw.uniform(0, 6)) for _ in "rgb"
    ]
    values = 127.5 + 110 * np.stack(waves, axis=-1) + draw.normal(0, 12, (height, width, 3))
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def picture_url(width: int, height: int, seed: int = 0) -> str:
    return data_url(encoded(picture(width, height, seed)))


def messages_with(urls: Sequence[str], texts: Sequence[str] = ()) -> list[dict[str, Any]]:
    """One user message: a text, an image, a text, an image ..."""
    parts: list[dict[str, Any]] = []
    for number, url in enumerate(urls):
        text = texts[number] if number < len(texts) else f"image {number}: "
        parts += [
            {"type": "text", "text": text},
            {"type": "image_url", "image_url": {"url": url}},
        ]
    return [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]},
    ]


def random_sizes(count: int, seed: int, longest: int) -> list[tuple[int, int]]:
    """Sizes of all magnitudes up to the longest side, with sides of no shape in particular."""
    draw = np.random.default_rng(seed)
    sides = np.exp(draw.uniform(np.log(4), np.log(longest), (count, 2))).astype(int)
    return [(int(w), int(h)) for w, h in sides if max(w, h) <= 150 * min(w, h)]
