"""Qwen-VL's inputs from references are those that transformers' own processor and models make eagerly."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoProcessor

from kimi_bridge.errors import MultimodalError
from kimi_bridge.multimodal import (
    QwenVL,
    Sample,
    build_mm_refs,
    decode,
    encode,
    load_image,
    load_processor,
    materialize,
    pack,
    truncate,
)
from kimi_bridge.multimodal.refs import image_urls
from tests.multimodal import folders
from tests.multimodal.pictures import messages_with, picture, picture_url, random_sizes

MODELS = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


@pytest.fixture(scope="module")
def hf_processor(qwen_folder: Path) -> Any:
    return AutoProcessor.from_pretrained(qwen_folder)


@pytest.fixture(scope="module")
def qwen(hf_processor: Any) -> QwenVL:
    return QwenVL(hf_processor)


def eager(hf_processor: Any, messages: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """What a trainer that holds images as images would do."""
    # transformers rewrites image parts in place.
    text = hf_processor.apply_chat_template(copy.deepcopy(messages), tokenize=False)
    images = [load_image(url) for url in image_urls(messages)]
    return hf_processor(text=[text], images=images, return_tensors="pt")


def rollout(
    messages: list[dict[str, Any]], made: dict[str, torch.Tensor], placeholder: int, name: str
) -> Sample:
    ids = made["input_ids"][0].numpy()
    refs = build_mm_refs(messages, ids, placeholder, sample=name)
    mask = np.arange(len(ids)) > len(ids) // 2
    return Sample(name, ids, mask, np.zeros(len(ids)), refs)


def conversations(count: int, seed: int, longest: int = 700) -> list[list[dict[str, Any]]]:
    draw = np.random.default_rng(seed)
    sizes = iter(random_sizes(8 * count, seed, longest))
    return [
        messages_with([picture_url(*next(sizes), seed + i) for i in range(int(draw.integers(1, 4)))])
        for _ in range(count)
    ]


def test_patches_grids_and_counts(qwen: QwenVL, hf_processor: Any) -> None:
    sizes = [(1, 1), (16, 16), (32, 33), (199, 1), (1024, 1024), (3000, 500), *random_sizes(24, 3, 800)]
    for number, (width, height) in enumerate(sizes):
        image = picture(width, height, number)
        expected = hf_processor.image_processor(images=[image], return_tensors="pt")
        patches, grid = qwen.patches(image)
        assert torch.equal(patches, expected["pixel_values"])
        assert list(grid) == expected["image_grid_thw"][0].tolist()
        tokens = hf_processor(text=["<|image_pad|>"], images=[image])["input_ids"][0]
        assert qwen.count_tokens(width, height) == len(tokens) == len(patches) // 4


def test_an_image_too_narrow_for_the_model(qwen: QwenVL) -> None:
    with pytest.raises(MultimodalError, match="201 x 1 pixels: absolute aspect ratio"):
        qwen.count_tokens(201, 1)


def test_inputs_are_the_eager_ones_after_cut_packing_and_wire(qwen: QwenVL, hf_processor: Any) -> None:
    made, samples = [], []
    for number, messages in enumerate(conversations(5, 20)):
        made.append(eager(hf_processor, messages))
        samples.append(rollout(messages, made[-1], qwen.placeholder, f"r{number}"))
    for number in (1, 3):  # cut into the last image, and into the text behind it
        last = samples[number].refs[-1]
        samples[number] = truncate(samples[number], last.offset + 1 if number == 1 else last.end + 3)
    batch = pack(decode(encode(samples)))
    inputs = materialize(batch, qwen)

    grids = [m["image_grid_thw"][: len(s.refs)] for m, s in zip(made, samples, strict=True)]
    pixels = [m["pixel_values"][: int(g.prod(-1).sum())] for m, g in zip(made, grids, strict=True)]
    assert torch.equal(inputs["image_grid_thw"], torch.cat(grids))
    assert torch.equal(inputs["pixel_values"], torch.cat(pixels))
    for name in ("input_ids", "mm_token_type_ids"):
        expected = torch.cat([m[name][0, : len(s)] for m, s in zip(made, samples, strict=True)])
        assert torch.equal(inputs[name], expected[None].long())


@pytest.mark.parametrize("model_type", MODELS)
def test_positions_are_the_models_own(
    model_type: str, hf_processor: Any, qwen: QwenVL, tmp_path: Path
) -> None:
    """Against get_rope_index of each model, with blocks that begin, end and follow each other everywhere."""
    config = AutoConfig.from_pretrained(folders.qwen_folder(tmp_path, model_type))
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    made = [eager(hf_processor, messages) for messages in conversations(4, 40)]
    first = made[0]
    start = int((first["input_ids"][0] == qwen.placeholder).nonzero()[0])
    for key in ("input_ids", "mm_token_type_ids"):  # a sample that begins with its block
        first[key] = first[key][:, start:]
    samples = []
    for number, inputs in enumerate(made):
        ids = inputs["input_ids"][0].numpy()
        urls = [picture_url(*load_size(grid), number) for grid in inputs["image_grid_thw"]]
        refs = build_mm_refs(messages_with(urls), ids, qwen.placeholder)
        samples.append(Sample(str(number), ids, ids < 0, np.zeros(len(ids)), refs))
    positions = materialize(pack(samples), qwen)["position_ids"]
    expected = []
    for inputs in made:
        names = ("input_ids", "mm_token_type_ids", "image_grid_thw")
        three, _ = model.get_rope_index(**{name: inputs[name] for name in names})
        text = torch.arange(three.shape[-1]).expand(1, 1, -1)
        expected.append(torch.cat((text, three)))
    assert torch.equal(positions, torch.cat(expected, dim=-1))


def load_size(grid: torch.Tensor) -> tuple[int, int]:
    """An image that has this grid."""
    return int(grid[2]) * 16, int(grid[1]) * 16


@pytest.mark.parametrize("model_type", MODELS)
def test_what_is_deferred_is_what_the_language_model_takes(model_type: str, tmp_path: Path) -> None:
    """Behind the merge, and nothing else that is as long as the sequence."""
    folder = folders.qwen_folder(tmp_path, model_type)
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.from_pretrained(folder))
    taken = set(inspect.signature(type(model.language_model).forward.__wrapped__).parameters)
    others = {
        "self",
        "input_ids",
        "attention_mask",
        "past_key_values",
        "use_cache",
        "cache_position",
        "kwargs",
    }
    assert taken - others == set(load_processor(folder).policy.deferred)


def test_policies(hf_processor: Any, qwen_folder: Path, tmp_path: Path) -> None:
    assert load_processor(qwen_folder).policy.packs
    processor = load_processor(folders.qwen_folder(tmp_path / "a", "qwen3_5"))
    sample = Sample("s", [1, 2], [False, True], [0, 0])
    assert set(materialize(pack([sample]), processor)) == {
        "input_ids",
        "mm_token_type_ids",
        "position_ids",
        "use_cache",
    }
    with pytest.raises(MultimodalError, match="Pack each alone"):
        materialize(pack([sample, sample]), processor)
    with pytest.raises(MultimodalError, match="qwen2_vl is no Qwen family here"):
        QwenVL(hf_processor, "qwen2_vl")
    folder = folders.qwen_folder(tmp_path / "b")
    config = folders.qwen_config("qwen3_vl")
    folders.write(folder / "config.json", config | {"image_token_id": 7})
    with pytest.raises(MultimodalError, match="image token is 7, the tokenizer's 262"):
        load_processor(folder)
    folders.write(folder / "config.json", {"model_type": "llava"})
    with pytest.raises(MultimodalError, match="of type llava"):
        load_processor(folder)
    (folder / "config.json").write_text("[")
    with pytest.raises(MultimodalError, match="cannot be read"):
        load_processor(folder)
