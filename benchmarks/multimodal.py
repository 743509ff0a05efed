"""Rollouts with images: bytes on the wire and seconds a sample, references against pixel tensors.

    python benchmarks/multimodal.py

Qwen3-VL's processor with its published settings, images of 1024 x 1024, a prompt of one turn, 512 sampled
tokens, one thread. With pixels: the sender decodes and preprocesses, and sends float32 patches beside the
ids, as raw bytes. With references: the sender sends URLs, the trainer decodes and preprocesses. Both end with
the same model inputs, which is checked. "wire" is packing and unpacking the message, without the network;
"all" is from the URLs to model inputs, both sides together; the best of five, by turns.
"""

from __future__ import annotations

import base64
import io
import time
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image
from transformers.models.qwen2_vl import Qwen2VLImageProcessor

from kimi_bridge.multimodal import MMRef, QwenVL, Sample, decode, encode, materialize, pack
from kimi_bridge.multimodal.images import load_image

SIDE, SAMPLED, PAD, ROUNDS = 1024, 512, 151655, 5
CASES = ((1, 1), (4, 1), (16, 1), (4, 8))


class Settings:
    """As much of a Qwen3VLProcessor as images need: no tokenizer has to be on this machine."""

    image_token_id = PAD
    image_processor = Qwen2VLImageProcessor(
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        size={"shortest_edge": 65536, "longest_edge": 16777216},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def main() -> None:
    torch.set_num_threads(1)
    processor = QwenVL(Settings())
    print(
        f"{'images of 1024 x 1024':32}{'MB on the wire':>20}{'s a sample, wire':>20}{'s a sample, all':>20}"
    )
    print("a sample, rollouts of one prompt" + "    pixels      refs" * 3)
    for kind in ("jpeg", "png"):
        for images, rollouts in CASES:
            samples = group(processor, kind, images, rollouts)
            pixels, references = measure(processor, samples)
            cells = [
                f"{one:10.{digits}f}{other:10.{digits}f}"
                for (one, other), digits in zip(zip(pixels, references, strict=True), (2, 3, 3), strict=True)
            ]
            print(f"{kind}, {images:2}, {rollouts}".ljust(32) + "".join(cells))


def measure(processor: QwenVL, samples: list[Sample]) -> list[tuple[float, float, float]]:
    """Megabytes, seconds a sample on the wire and in all, of both ways by turns; they are compared once."""
    measured: list[list[tuple[float, float, float]]] = [[], []]
    for turn in range(ROUNDS):
        results = []
        for number, way in enumerate((by_pixels, by_references)):
            begin = time.perf_counter()
            inputs, size, wire = way(processor, samples)
            seconds = time.perf_counter() - begin
            measured[number].append((size / 1e6, wire / len(samples), seconds / len(samples)))
            results.append(inputs if turn == 0 else None)
            del inputs
        if turn == 0:
            assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    return [tuple(map(min, zip(*runs, strict=True))) for runs in measured]  # type: ignore[misc]


def by_references(processor: QwenVL, samples: list[Sample]) -> tuple[dict[str, Any], int, float]:
    begin = time.perf_counter()
    message = encode(samples)
    arrived = decode(message)
    wire = time.perf_counter() - begin
    return materialize(pack(arrived), processor), len(message), wire


def by_pixels(processor: QwenVL, samples: list[Sample]) -> tuple[dict[str, Any], int, float]:
    """Each sample with its patches. The group's images are preprocessed once, which favours this way."""
    made = {ref.image: processor.patches(load_image(ref.image)) for s in samples for ref in s.refs}
    begin = time.perf_counter()
    wired = []
    for sample in samples:
        patches = torch.cat([made[ref.image][0] for ref in sample.refs])
        grids = [made[ref.image][1] for ref in sample.refs]
        wired.append((sample.ids.tobytes(), sample.logprobs.tobytes(), memoryview(patches.numpy()), grids))
    message = msgspec.msgpack.encode(wired)
    inputs = receive_pixels(message)
    return inputs, len(message), time.perf_counter() - begin


def receive_pixels(message: bytes) -> dict[str, Any]:
    arrived = msgspec.msgpack.decode(message)
    patches = [np.frombuffer(pixels, np.float32).reshape(-1, 1536) for _, _, pixels, _ in arrived]
    ids = np.concatenate([np.frombuffer(ids, np.int32) for ids, *_ in arrived])
    return {
        "input_ids": torch.from_numpy(ids.astype(np.int64))[None],
        "pixel_values": torch.from_numpy(np.concatenate(patches)),
        "image_grid_thw": torch.tensor([grid for *_, grids in arrived for grid in grids]),
    }


def group(processor: QwenVL, kind: str, images: int, rollouts: int) -> list[Sample]:
    urls = [picture(kind, seed) for seed in range(images)]
    count = processor.count_tokens(SIDE, SIDE)
    refs = tuple(MMRef(url, 64 + i * (count + 2), count) for i, url in enumerate(urls))
    ids = np.ones(64 + images * (count + 2) + SAMPLED, np.int32)
    for ref in refs:
        ids[ref.offset : ref.end] = PAD
    mask = np.arange(len(ids)) >= len(ids) - SAMPLED
    return [Sample(f"r{i}", ids, mask, np.full(len(ids), -0.5 * mask), refs) for i in range(rollouts)]


def picture(kind: str, seed: int) -> str:
    """Smooth shapes and some grain: about as large as a photograph, as JPEG of quality 90 or as PNG."""
    draw = np.random.default_rng(seed)
    coarse = Image.fromarray(draw.integers(0, 256, (48, 48, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC), np.float32)
    grain = smooth + draw.normal(0, 4, smooth.shape)
    out = io.BytesIO()
    Image.fromarray(grain.clip(0, 255).astype(np.uint8)).save(out, kind, quality=90)
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"


if __name__ == "__main__":
    main()
