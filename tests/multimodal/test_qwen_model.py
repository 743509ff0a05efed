"""Training on a packed, shipped, materialised batch is training on each sample alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from kimi_bridge.multimodal import QwenVL, Sample, decode, encode, materialize, pack, truncate
from kimi_bridge.multimodal.refs import image_urls
from tests.multimodal import folders
from tests.multimodal.pictures import messages_with, picture_url
from tests.multimodal.test_qwen import eager, rollout

TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_vl_moe"])
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = folders.qwen_folder(tmp_path_factory.mktemp(request.param), request.param)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    # As initialised, hidden states hardly depend on anything: louder weights make leaks visible.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model, AutoProcessor.from_pretrained(folder)


def log_probabilities(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Of every token but the first, [tokens - 1]."""
    logits = model(**inputs).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, inputs["input_ids"][0, 1:, None])[:, 0]


def samples_and_eager(processor: Any, placeholder: int) -> tuple[list[Sample], list[dict[str, Any]]]:
    """Three rollouts: two images, the same one and another, text alone; the second is cut in an image."""
    shown, samples, alone = picture_url(80, 120, 1), [], []
    for number, urls in enumerate(([shown, picture_url(64, 64, 2)], [shown, picture_url(200, 90, 3)], [])):
        messages = messages_with(urls)
        made = dict(eager(processor, messages)) if urls else dict(text_only(processor, messages))
        sample = rollout(messages, made, placeholder, f"r{number}")
        if number == 1:
            whole, sample = sample, truncate(sample, sample.refs[1].offset + 5)
            assert len(sample.refs) == 1 < len(whole.refs)
            made = {k: v[:, : len(sample)] for k, v in made.items() if v.shape[:2] == (1, len(whole))}
            made |= eager_images(processor, [shown])
        made.pop("attention_mask", None)
        samples.append(sample)
        alone.append(made)
    return samples, alone


def text_only(processor: Any, messages: list[dict[str, Any]]) -> dict[str, Any]:
    text = processor.apply_chat_template(messages, tokenize=False)
    assert not list(image_urls(messages))
    return processor(text=[text], return_tensors="pt")


def eager_images(processor: Any, urls: list[str]) -> dict[str, Any]:
    made = eager(processor, messages_with(urls))
    return {name: made[name] for name in ("pixel_values", "image_grid_thw")}


def test_log_probabilities_and_gradients(setting: tuple[Any, Any]) -> None:
    model, hf_processor = setting
    processor = QwenVL(hf_processor)
    samples, alone = samples_and_eager(hf_processor, processor.placeholder)
    batch = pack(decode(encode(samples)))
    inputs = materialize(batch, processor)

    expected = [log_probabilities(model, made) for made in alone]
    got = log_probabilities(model, inputs)
    starts = batch.cu_seqlens
    for number, own in enumerate(expected):
        part = got[starts[number] : starts[number + 1] - 1]
        assert (part - own).abs().max() < TOLERANCE

    mask = torch.from_numpy(batch.loss_mask[1:].copy())
    got[mask].sum().backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for own, sample in zip(expected, samples, strict=True):
        own[torch.from_numpy(sample.loss_mask[1:].copy())].sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert name not in packed
            continue
        largest = parameter.grad.abs().max()
        assert (packed[name] - parameter.grad).abs().max() <= TOLERANCE * max(1.0, largest), name
    visual = [name for name in packed if ".visual." in name]
    assert visual
    assert all(packed[name].abs().max() > 0 for name in visual if name.endswith("proj.weight"))


def test_the_test_would_see_a_leak(setting: tuple[Any, Any]) -> None:
    """With one line of positions the samples attend to each other; wrong patches change what follows."""
    model, hf_processor = setting
    processor = QwenVL(hf_processor)
    samples, _ = samples_and_eager(hf_processor, processor.placeholder)
    inputs = materialize(pack(samples), processor)
    with torch.no_grad():
        sound = log_probabilities(model, inputs)
        leaking = inputs | {"position_ids": inputs["position_ids"].clone()}
        leaking["position_ids"][0, 0] = torch.arange(leaking["input_ids"].shape[1])
        other = inputs | {"pixel_values": inputs["pixel_values"].flip(0)}
        # transformers looks for packed samples only where it keeps no cache.
        cached = {name: value for name, value in inputs.items() if name != "use_cache"}
        for wrong in (leaking, other, cached):
            assert (log_probabilities(model, wrong) - sound).abs().max() > 100 * TOLERANCE


def test_qwen3_5_alone(tmp_path: Path) -> None:
    """Qwen3.5 takes one sample a batch: the same inputs as eager ones, so the same log-probabilities."""
    folder = folders.qwen_folder(tmp_path, "qwen3_5")
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    processor = QwenVL.from_folder(folder)
    hf_processor = AutoProcessor.from_pretrained(folder)
    messages = messages_with([picture_url(80, 120, 1), picture_url(64, 64, 2)])
    made = eager(hf_processor, messages)
    made.pop("attention_mask")
    sample = rollout(messages, made, processor.placeholder, "r")
    with torch.no_grad():
        expected = log_probabilities(model, made)
        got = log_probabilities(model, materialize(pack(decode(encode([sample]))), processor))
    assert (got - expected).abs().max() < TOLERANCE

    # Packed, its linear attention runs on from sample to sample: once this fails, packs may be True.
    both = pack([sample, sample])
    with torch.no_grad():
        packed = log_probabilities(model, materialize(both, QwenVL(hf_processor, "qwen3_vl")))
    assert (packed[len(sample) :] - got).abs().max() > 100 * TOLERANCE
