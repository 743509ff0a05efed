"""From references to inputs: what is checked before forward, decoded how often, and kept how long."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import kimi_bridge.multimodal.materializer as module
from kimi_bridge.errors import MultimodalError
from kimi_bridge.multimodal import (
    ImagePolicy,
    KimiK25,
    Materializer,
    MMRef,
    Sample,
    decode,
    encode,
    expand,
    load_image,
    load_processor,
    materialize,
    pack,
)
from tests.multimodal import folders
from tests.multimodal.pictures import data_url, encoded, picture, picture_url

PAD = 7
KIMI = KimiK25.from_settings(folders.KIMI_PREPROCESSOR["media_proc_cfg"], PAD)
A, B, C = picture_url(100, 60, 1), picture_url(57, 200, 2), picture_url(30, 30, 3)


def shown(name: str, *urls: str) -> Sample:
    counts = [KIMI.count_tokens(*load_image(url).size) for url in urls]
    logical = [1, *(token for _ in urls for token in (2, PAD)), 3, 4]
    ids, ranges = expand(logical, PAD, counts)
    refs = tuple(MMRef(url, *span) for url, span in zip(urls, ranges, strict=True))
    return Sample(name, ids, np.arange(len(ids)) > 2, np.zeros(len(ids)), refs)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The URLs that were decoded, in their order."""
    urls = []

    def counting(url: str, policy: ImagePolicy) -> object:
        urls.append(url)
        return load_image(url, policy)

    monkeypatch.setattr(module, "load_image", counting)
    return urls


def test_kimi_inputs() -> None:
    samples = [shown("a", A, B), shown("text"), shown("b", B, B, C)]
    batch = pack(decode(encode(samples)))
    inputs = materialize(batch, KIMI)
    assert set(inputs) == {"input_ids", "position_ids", "pixel_values", "grid_thws"}
    made = [KIMI.patches(load_image(url)) for url in (A, B, B, B, C)]
    assert torch.equal(inputs["pixel_values"], torch.cat([patches for patches, _ in made]))
    assert inputs["grid_thws"].tolist() == [list(grid) for _, grid in made]
    assert inputs["input_ids"].tolist() == [[t for s in samples for t in s.ids.tolist()]]
    assert inputs["position_ids"].tolist() == [[p for s in samples for p in range(len(s))]]
    assert inputs["pixel_values"].shape[1:] == (3, 14, 14)
    assert (inputs["input_ids"] == PAD).sum() * 4 == len(inputs["pixel_values"])


def test_text_alone_has_no_patches() -> None:
    assert set(materialize(pack([shown("text")]), KIMI)) == {"input_ids", "position_ids"}


def test_each_image_is_decoded_once(decoded: list[str]) -> None:
    group = [shown(f"r{i}", A, B) for i in range(8)]
    materializer = Materializer(KIMI)
    first = materializer(pack(group))
    assert decoded == [A, B]
    second = materializer(pack(group[:2]))
    assert decoded == [A, B]
    assert torch.equal(first["pixel_values"][: len(second["pixel_values"])], second["pixel_values"])
    materialize(pack(group), KIMI)
    assert decoded == [A, B] * 2


def test_inputs_are_the_callers_own() -> None:
    """A trainer may write into its inputs: what is kept is not theirs."""
    materializer = Materializer(KIMI)
    batch = pack([shown("a", A)])
    first = materializer(batch)["pixel_values"]
    expected = first.clone()
    first.zero_()
    assert torch.equal(materializer(batch)["pixel_values"], expected)


def test_the_cache_is_bounded_and_keeps_what_was_used_last(decoded: list[str]) -> None:
    sizes = [KIMI.patches(load_image(url))[0].nbytes + len(url) for url in (A, B)]
    materializer = Materializer(KIMI, cache_bytes=sum(sizes))
    batches = {url: pack([shown("s", url)]) for url in (A, B, C)}
    for url in (A, B, A, C, A):  # C throws out B
        materializer(batches[url])
    assert decoded == [A, B, C]
    materializer(batches[B])
    assert decoded == [A, B, C, B]
    assert materializer._cached_bytes <= materializer.cache_bytes
    without = Materializer(KIMI, cache_bytes=0)
    without(batches[A])
    without(batches[A])
    assert decoded[4:] == [A, A]


def test_files_are_read_again(tmp_path: Path, decoded: list[str]) -> None:
    (tmp_path / "a.png").write_bytes(encoded(picture(100, 60, 1)))
    url = f"file://{tmp_path}/a.png"
    inline = shown("s", A)
    sample = Sample("s", inline.ids, inline.loss_mask, inline.logprobs, (MMRef(url, *span(inline)),))
    materializer = Materializer(KIMI, ImagePolicy(folders=(tmp_path,)))
    materializer(pack([sample]))
    (tmp_path / "a.png").write_bytes(encoded(picture(300, 300, 1)))
    with pytest.raises(MultimodalError, match="s: image 0 has a block of 12 tokens and makes 121"):
        materializer(pack([sample]))
    with pytest.raises(MultimodalError, match=r"s: image 0: file.*policy's folders"):
        materialize(pack([sample]), KIMI)


def span(sample: Sample) -> tuple[int, int]:
    return sample.refs[0].offset, sample.refs[0].length


@pytest.mark.parametrize("keep", [True, False])
def test_another_number_of_tokens_never_trains(keep: bool) -> None:
    """The same block with another image, also where that image is kept from an earlier batch."""
    sample = shown("second", A, B)
    swapped = tuple(MMRef(C if i else A, ref.offset, ref.length) for i, ref in enumerate(sample.refs))
    wrong = Sample("second", sample.ids, sample.loss_mask, sample.logprobs, swapped)
    materializer = Materializer(KIMI, cache_bytes=2**30 if keep else 0)
    materializer(pack([shown("c", C)]))
    with pytest.raises(MultimodalError, match="second: image 1 has a block of 24 tokens and makes 4"):
        materializer(pack([shown("first", A), wrong]))


def test_placeholders_outside_of_blocks_never_train() -> None:
    sample = shown("s", A)
    sampled = Sample("s", np.append(sample.ids, PAD), np.append(sample.loss_mask, True),
                     np.append(sample.logprobs, 0.0), sample.refs)  # fmt: skip
    with pytest.raises(
        MultimodalError,
        match=r"s: 1 placeholder tokens .7. belong to none of the 1 images, the first is token 16",
    ):
        materialize(pack([shown("other"), sampled]), KIMI)
    moved = Sample("s", sample.ids, sample.loss_mask, sample.logprobs, (sample.refs[0].moved(-1),))
    with pytest.raises(MultimodalError, match="12 tokens from 1 on, 11 of them"):
        materialize(pack([moved]), KIMI)


def test_limits_hold() -> None:
    many = shown("many", *[C] * 5)
    with pytest.raises(MultimodalError, match="many: 5 images, the policy allows 4"):
        materialize(pack([shown("few", C), many]), KIMI, ImagePolicy(max_images=4))
    with pytest.raises(MultimodalError, match=r"s: image 0: .*policy allows 5999"):
        materialize(pack([shown("s", A)]), KIMI, ImagePolicy(max_pixels=5999))
    broken = data_url(encoded(picture(100, 60, 1))[:-40])
    sample = shown("s", A)
    refs = (MMRef(broken, *span(sample)),)
    with pytest.raises(MultimodalError, match=r"s: image 0: .*the image is broken"):
        materialize(pack([Sample("s", sample.ids, sample.loss_mask, sample.logprobs, refs)]), KIMI)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fixed_output_tokens": 64}, "fixed_output_tokens"),
        ({"patch_size": None}, "cannot be followed"),
        ({"patch_size": True}, "cannot be followed"),
        ({"merge_kernel_size": [2, 3]}, "cannot be followed"),
        ({"image_std": [0.5, 0.5, 0]}, "cannot be followed"),
        ({"image_mean": "none"}, "media_proc_cfg"),
    ],
)
def test_settings_that_cannot_be_followed(change: dict, message: str) -> None:
    settings = folders.KIMI_PREPROCESSOR["media_proc_cfg"] | change
    with pytest.raises(MultimodalError, match=message):
        KimiK25.from_settings(settings, PAD)


def test_kimi_from_its_folder(kimi_folder: Path, tmp_path: Path) -> None:
    processor = load_processor(kimi_folder)
    assert isinstance(processor, KimiK25)
    assert (processor.patch_limit, processor.side_limit, processor.merge) == (16384, 512, 2)
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k25", "media_placeholder_token_id": 7}')
    with pytest.raises(MultimodalError, match=r"preprocessor_config.json cannot be read"):
        load_processor(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(MultimodalError, match="no media_proc_cfg"):
        load_processor(tmp_path)


def test_a_block_larger_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine bytes of a message claim kilobytes of patches."""

    def full(*shape: int) -> torch.Tensor:
        raise RuntimeError(f"can't allocate {shape}")

    batch = pack([shown("a", A)])
    monkeypatch.setattr(module.torch, "empty", full)
    with pytest.raises(MultimodalError, match=r"^a: no memory for the patches of .*truncate the samples"):
        materialize(batch, KIMI)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{}"),
        ("preprocessor_config.json", "[]"),
        ("preprocessor_config.json", json.dumps(folders.QWEN_PREPROCESSOR | {"merge_size": 0})),
        ("config.json", "[" * 100000),
    ],
)
def test_broken_qwen_folders(name: str, text: str, tmp_path: Path) -> None:
    folders.qwen_folder(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(MultimodalError, match=re.escape(str(tmp_path))):
        load_processor(tmp_path)


def test_kimi_settings_without_numbers() -> None:
    settings = folders.KIMI_PREPROCESSOR["media_proc_cfg"] | {"image_std": [float("nan")] * 3}
    with pytest.raises(MultimodalError, match="cannot be followed"):
        KimiK25.from_settings(settings, PAD)
