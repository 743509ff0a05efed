"""The engine is the reference: vLLM's own processors, loader and render endpoint, on a CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kimi_bridge.errors import MultimodalError
from kimi_bridge.multimodal import (
    KimiK25,
    QwenVL,
    Sample,
    build_mm_refs,
    decode,
    encode,
    load_image,
    load_processor,
    materialize,
    pack,
    refs_from_render,
    samples_from_generate,
    samples_from_output,
    truncate,
)
from tests.multimodal import vllm_render
from tests.multimodal.pictures import data_url, encoded, messages_with, picture, picture_url, random_sizes

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM (.venv-vllm): make test-vllm"
)


@pytest.fixture(scope="module")
def kimi(kimi_folder: Path) -> tuple[KimiK25, vllm_render.Renderer]:
    return KimiK25.from_folder(kimi_folder), vllm_render.Renderer(kimi_folder)


@pytest.fixture(scope="module")
def qwen(qwen_folder: Path) -> tuple[QwenVL, vllm_render.Renderer]:
    return QwenVL.from_folder(qwen_folder), vllm_render.Renderer(qwen_folder)


def reference_kimi(kimi_folder: Path) -> Any:
    """vLLM's image processor, made from the checkpoint folder the way vLLM makes it."""
    from vllm.transformers_utils.processor import get_image_processor
    from vllm.transformers_utils.processors.kimi_k25_vision_fused import KimiK25FusedVisionProcessor

    return get_image_processor(str(kimi_folder), processor_cls_overrides=KimiK25FusedVisionProcessor)


def test_kimi_patches_grids_and_counts(kimi: tuple[KimiK25, Any], kimi_folder: Path) -> None:
    processor, reference = kimi[0], reference_kimi(kimi_folder)
    sizes = [
        (1, 1),
        (13, 14),
        (28, 28),
        (29, 27),
        (1024, 1024),
        (1, 300),
        (300, 1),
        (2000, 1500),
        *random_sizes(40, 1, 900),
    ]
    for number, (width, height) in enumerate(sizes):
        image = picture(width, height, number)
        media = {"type": "image", "image": image}
        expected = reference.preprocess([dict(media)], return_tensors="pt")
        patches, grid = processor.patches(image)
        assert list(grid) == expected["grid_thws"][0].tolist()
        assert torch.equal(patches, expected["pixel_values"])
        assert processor.count_tokens(width, height) == reference.media_tokens_calculator(dict(media))


def test_kimi_counts_of_sizes_beyond_every_limit(kimi: tuple[KimiK25, Any], kimi_folder: Path) -> None:
    """Only the arithmetic: sizes that would be too large to decode in a test."""
    from vllm.transformers_utils.processors.kimi_k25_vision_fused import navit_resize_image

    processor, settings = kimi[0], reference_kimi(kimi_folder).media_proc_cfg
    draw = np.random.default_rng(2)
    sizes = [*np.exp(draw.uniform(0, np.log(60000), (3000, 2))).astype(int).tolist(), [7168, 14], [7169, 14]]
    names = ("patch_size", "merge_kernel_size", "in_patch_limit", "patch_limit_on_one_side")
    for width, height in sizes:
        expected = navit_resize_image(width, height, *(settings[name] for name in names), None)
        assert processor.resized(width, height) == (expected["new_width"], expected["new_height"])
        assert processor.count_tokens(width, height) == expected["num_tokens"]


@pytest.mark.parametrize("family", ["kimi", "qwen"])
def test_rendered_prompts_become_the_engines_tensors(
    family: str, kimi: tuple[KimiK25, Any], qwen: tuple[QwenVL, Any]
) -> None:
    """From the HTTP body to model inputs: ids, ranges, patches and grids are the engine's, also after a cut,
    packing and the wire."""
    processor, renderer = {"kimi": kimi, "qwen": qwen}[family]
    samples, bodies = [], []
    for number in range(3):
        draw = np.random.default_rng(number)
        urls = [picture_url(*draw.integers(60, 500, 2), seed) for seed in range(2 + number)]
        if number:
            urls[1] = samples[0].refs[0].image  # the same image again
        messages = messages_with(urls)
        bodies.append(body := renderer.render(messages))
        refs = refs_from_render(body, messages, processor.placeholder, name=str(number))
        assert refs == build_mm_refs(messages, body["token_ids"], processor.placeholder)
        counts = [processor.count_tokens(*load_image(url).size) for url in urls]
        assert refs == build_mm_refs(messages, body["token_ids"], processor.placeholder, counts=counts)
        ids = np.array(body["token_ids"])
        samples.append(Sample(str(number), ids, ids < 0, np.zeros(len(ids)), refs))
    cut = samples[1].refs[-1].offset + 1
    samples[1] = truncate(samples[1], cut)
    assert len(samples[1]) == cut - 1

    inputs = materialize(pack(decode(encode(samples))), processor)
    items = [vllm_render.tensors(body)[: len(s.refs)] for body, s in zip(bodies, samples, strict=True)]
    patches, grids = processor.names
    expected = [item for per_sample in items for item in per_sample]
    assert torch.equal(inputs[patches], torch.cat([item[patches] for item in expected]))
    assert torch.equal(inputs[grids], torch.stack([item[grids] for item in expected]))
    ids = [
        id_ for body, sample in zip(bodies, samples, strict=True) for id_ in body["token_ids"][: len(sample)]
    ]
    assert inputs["input_ids"].tolist() == [ids]


def test_adjacent_images_do_not_touch(kimi: tuple[KimiK25, Any], qwen: tuple[QwenVL, Any]) -> None:
    """Both templates put tokens between blocks, so runs are enough even without a text between images."""
    for processor, renderer in (kimi, qwen):
        messages = messages_with([picture_url(64, 64, 1), picture_url(64, 96, 2)], ["", ""])
        body = renderer.render(messages)
        first, second = build_mm_refs(messages, body["token_ids"], processor.placeholder)
        assert first.end < second.offset


def test_a_prompt_that_spells_the_placeholder_is_refused(qwen: tuple[QwenVL, Any]) -> None:
    """vLLM takes the first placeholders of the prompt for the images, whoever wrote them."""
    processor, renderer = qwen
    messages = messages_with([picture_url(64, 64)], ["<|image_pad|> "])
    body = renderer.render(messages)
    with pytest.raises(MultimodalError, match="placeholder"):
        refs_from_render(body, messages, processor.placeholder)


def test_the_classes_of_vllms_answers(qwen: tuple[QwenVL, Any]) -> None:
    """RequestOutput and GenerateResponse, as vLLM's own classes, with tokens that no model sampled."""
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionLogProbs,
        ChatCompletionLogProbsContent,
    )
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
        GenerateResponse,
        GenerateResponseChoice,
    )
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput

    processor, renderer = qwen
    messages = messages_with([picture_url(64, 64, 1), picture_url(200, 96, 2)])
    body = renderer.render(messages)
    prompt = body["token_ids"]
    taken = [{11: Logprob(-1.5, rank=2), 3: Logprob(-0.1, rank=1)}, {12: Logprob(-2.5)}]
    completion = CompletionOutput(0, "", [11, 12], -4.0, taken)
    output = RequestOutput("7", None, prompt, None, [completion], finished=True)
    (offline,) = samples_from_output(output, messages, processor.placeholder)

    content = [ChatCompletionLogProbsContent(token="x", logprob=value) for value in (-1.5, -2.5)]
    logprobs = ChatCompletionLogProbs(content=content)
    choice = GenerateResponseChoice(index=0, token_ids=[11, 12], logprobs=logprobs)
    response = GenerateResponse(request_id="7", choices=[choice]).model_dump(mode="json")
    (online,) = samples_from_generate(body, response, messages, processor.placeholder, name="7")
    for sample in (offline, online):
        assert sample.name == "7/0"
        assert sample.ids.tolist() == [*prompt, 11, 12]
        assert sample.logprobs[-2:].tolist() == [-1.5, -2.5]
        assert sample.refs == refs_from_render(body, messages, processor.placeholder)

    choice.logprobs.content[1] = ChatCompletionLogProbsContent(token="x")
    response = GenerateResponse(choices=[choice]).model_dump(mode="json")
    with pytest.raises(MultimodalError, match="7/0: the engine took no log-probability"):
        samples_from_generate(body, response, messages, processor.placeholder, name="7")


def odd_images() -> dict[str, bytes]:
    base = picture(60, 40, 5)
    alpha = base.copy()
    alpha.putalpha(Image.linear_gradient("L").resize(base.size))
    frames = [picture(60, 40, seed) for seed in range(3)]
    palette = base.quantize(32)
    images = {
        "png": encoded(base),
        "jpeg": encoded(base, "JPEG", quality=70),
        "webp": encoded(base, "WEBP"),
        "bmp": encoded(base, "BMP"),
        "grey": encoded(base.convert("L")),
        "bits": encoded(base.convert("1")),
        "grey alpha": encoded(alpha.convert("LA")),
        "alpha": encoded(alpha),
        "webp alpha": encoded(alpha, "WEBP", lossless=True),
        "palette": encoded(palette),
        "palette with a transparent colour": encoded(palette, transparency=3),
        "palette with alpha": encoded(alpha.quantize(32, method=Image.Quantize.FASTOCTREE)),
        "rgb with a transparent colour": encoded(base, transparency=base.getpixel((3, 3))),
        "grey with a transparent colour": encoded(
            base.convert("L"), transparency=base.convert("L").getpixel((0, 0))
        ),
        "sixteen bits": encoded(Image.fromarray(np.arange(2400, dtype=np.uint16).reshape(40, 60) * 27)),
        "cmyk": encoded(base.convert("CMYK"), "JPEG"),
        "animated gif": encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "animated webp": encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        "animated png": encoded(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        "mpo": encoded(frames[0], "MPO", save_all=True, append_images=frames[1:]),
    }
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        for kind in ("JPEG", "PNG", "WEBP"):
            images[f"{kind} turned {orientation}"] = encoded(base, kind, exif=exif)
    images["exif that is none"] = encoded(base, "JPEG", exif=b"Exif\0\0nonsense")
    return images


@pytest.mark.parametrize("name", odd_images())
def test_images_are_loaded_as_the_engine_loads_them(name: str) -> None:
    data = odd_images()[name]
    expected, got = vllm_render.load_image(data), load_image(data_url(data))
    assert (got.mode, got.size) == ("RGB", expected.size)
    assert np.array_equal(np.asarray(got), np.asarray(expected))


def test_broken_images_are_refused_where_the_engine_refuses_them() -> None:
    whole = (
        encoded(picture(80, 80, 1)),
        encoded(picture(80, 80, 1), "JPEG"),
        encoded(picture(80, 80, 1), "WEBP"),
    )
    for data in whole:
        broken = [data[:cut] for cut in (0, 1, 10, 40, len(data) // 2)] + [b"\0" * 100, data[::-1]]
        for part in broken:
            with pytest.raises(Exception):  # noqa: B017, PT011
                vllm_render.load_image(part)
            with pytest.raises(MultimodalError):
                load_image(data_url(part))


def test_load_processor_finds_both(kimi_folder: Path, qwen_folder: Path) -> None:
    assert isinstance(load_processor(kimi_folder), KimiK25)
    assert isinstance(load_processor(qwen_folder), QwenVL)
