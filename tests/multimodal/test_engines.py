"""What vLLM said of prompts with images becomes samples.

Recorded by record_vllm.py (`render_*`, on a CPU) and by tests/gpu/test_vllm_multimodal.py (the others, on an
H200; of the `generate_*` the first 16 tokens).
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from kimi_bridge.errors import MultimodalError
from kimi_bridge.multimodal import (
    Sample,
    build_mm_refs,
    collapse,
    expand,
    load_image,
    load_processor,
    materialize,
    pack,
    refs_from_render,
    samples_from_generate,
    samples_from_output,
)
from kimi_bridge.multimodal.refs import image_urls
from tests.multimodal import folders

DATA = Path(__file__).parents[1] / "data" / "multimodal"


@pytest.fixture(params=["qwen3_vl", "kimi_k25"])
def rendered(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    """The family's processor, and the body that vLLM's render endpoint made for the generate endpoint."""
    make = folders.kimi_folder if request.param == "kimi_k25" else folders.qwen_folder
    record = json.loads((DATA / f"render_{request.param}.json").read_text())
    return load_processor(make(tmp_path)), record


def test_ranges_runs_and_counts_agree(rendered: tuple[Any, dict[str, Any]]) -> None:
    processor, record = rendered
    messages, ids = record["messages"], record["request"]["token_ids"]
    refs = refs_from_render(record["request"], messages, processor.placeholder)
    counts = [processor.count_tokens(*load_image(url).size) for url in image_urls(messages)]
    assert [ref.length for ref in refs] == counts
    assert [ref.image for ref in refs] == list(image_urls(messages))
    assert refs == build_mm_refs(messages, ids, processor.placeholder)
    assert refs == build_mm_refs(messages, ids, processor.placeholder, counts=counts)
    assert len(collapse(ids, refs)) == len(ids) - sum(counts) + len(counts)


def test_collapsed_ids_are_the_templates(rendered: tuple[Any, dict[str, Any]], tmp_path: Path) -> None:
    processor, record = rendered
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    messages, ids = record["messages"], record["request"]["token_ids"]
    template = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    refs = refs_from_render(record["request"], messages, processor.placeholder)
    assert collapse(ids, refs).tolist() == template
    expanded, ranges = expand(template, processor.placeholder, [ref.length for ref in refs])
    assert expanded.tolist() == ids
    assert ranges == [(ref.offset, ref.length) for ref in refs]


def test_http_request_and_response(rendered: tuple[Any, dict[str, Any]]) -> None:
    """The body is vLLM's; the response has the fields of its GenerateResponse, and tokens made up here."""
    processor, record = rendered
    content = [{"token": "x", "logprob": -0.5, "bytes": None, "top_logprobs": []}] * 2
    response = {
        "request_id": "r",
        "choices": [
            {
                "index": i,
                "token_ids": [40 + i, 41],
                "logprobs": {"content": content},
                "finish_reason": "length",
            }
            for i in range(2)
        ],
    }
    request, messages = record["request"], record["messages"]
    samples = samples_from_generate(request, response, messages, processor.placeholder, name="p")
    prompt = request["token_ids"]
    for number, sample in enumerate(samples):
        assert sample.name == f"p/{number}"
        assert sample.ids.tolist() == [*prompt, 40 + number, 41]
        assert sample.loss_mask.tolist() == [False] * len(prompt) + [True] * 2
        assert sample.logprobs.tolist() == [0.0] * len(prompt) + [-0.5] * 2
    inputs = materialize(pack(samples), processor)
    assert len(inputs[processor.names[1]]) == 6
    response["choices"][1]["logprobs"] = {"content": [content[0], content[0] | {"logprob": -9999.0}]}
    with pytest.raises(MultimodalError, match="p/1: the engine took no log-probability"):
        samples_from_generate(request, response, messages, processor.placeholder, name="p")
    del response["choices"][0]["logprobs"]
    with pytest.raises(MultimodalError, match="p/0: 0 log-probabilities for 2 tokens"):
        samples_from_generate(request, response, messages, processor.placeholder, name="p")


def test_offline_output(rendered: tuple[Any, dict[str, Any]]) -> None:
    """An object with RequestOutput's fields: vLLM 0.26 gives expanded ids without ranges."""
    processor, record = rendered
    prompt, messages = record["request"]["token_ids"], record["messages"]
    steps = [{50: SimpleNamespace(logprob=-0.25)}, {51: SimpleNamespace(logprob=-4.0)}]
    completion = SimpleNamespace(index=0, token_ids=[50, 51], logprobs=steps)
    output = SimpleNamespace(request_id="7", prompt_token_ids=prompt, outputs=[completion])

    def count(url: str) -> int:
        return processor.count_tokens(*load_image(url).size)

    (sample,) = samples_from_output(output, messages, processor.placeholder, count=count)
    assert sample.name == "7/0"
    assert sample.logprobs[-2:].tolist() == [-0.25, -4.0]
    assert sample.refs == refs_from_render(record["request"], messages, processor.placeholder)
    completion.logprobs = steps[::-1]
    with pytest.raises(MultimodalError, match="7/0: log-probabilities that are not"):
        samples_from_output(output, messages, processor.placeholder)
    completion.logprobs = None
    with pytest.raises(MultimodalError, match="0 log-probabilities for 2 tokens"):
        samples_from_output(output, messages, processor.placeholder)
    output.multi_modal_placeholders = {"image": [{"offset": 0, "length": 3}]}
    with pytest.raises(MultimodalError, match="3 images in the messages, 1 placeholder ranges"):
        samples_from_output(output, messages, processor.placeholder)


PROMPT = {"token_ids": [1, 2]}
TAKEN = {"index": 0, "token_ids": [3], "logprobs": {"content": [{"logprob": -1.0}]}}


@pytest.mark.parametrize(
    ("request_body", "response"),
    [
        (PROMPT, {"error": {"message": "overloaded"}}),
        (PROMPT, []),
        (PROMPT, {"choices": None}),
        (PROMPT, {"choices": [{"token_ids": [3]}]}),
        (PROMPT, {"choices": [TAKEN | {"logprobs": {"content": [{"logprob": None}]}}]}),
        (PROMPT, {"choices": [TAKEN | {"logprobs": {"content": [{}]}}]}),
        (PROMPT, {"choices": [TAKEN | {"token_ids": ["x"]}]}),
        (PROMPT, {"choices": [TAKEN | {"token_ids": [1.5]}]}),
        ({}, {"choices": [TAKEN]}),
        ([], {"choices": [TAKEN]}),
    ],
)
def test_answers_that_are_none(request_body: Any, response: Any) -> None:
    with pytest.raises(MultimodalError, match=r"^r"):
        samples_from_generate(request_body, response, [], 9, name="r")


def test_the_list_of_outputs() -> None:
    with pytest.raises(MultimodalError, match=r"RequestOutput \(one, not the list of them\)"):
        samples_from_output([SimpleNamespace()], [], 9)


def test_messages_of_another_prompt(rendered: tuple[Any, dict[str, Any]]) -> None:
    processor, record = rendered
    with pytest.raises(MultimodalError, match="roll: 2 images in the messages, 3 placeholder ranges"):
        refs_from_render(record["request"], record["messages"][:2], processor.placeholder, name="roll")


def test_recorded_generate_answers(tmp_path: Path) -> None:
    record = json.loads((DATA / "generate_qwen3_vl.json").read_text())
    processor = load_processor(folders.qwen_folder(tmp_path))
    for answer in record["answers"]:
        samples = samples_from_generate(
            answer["request"], answer["response"], answer["messages"], processor.placeholder
        )
        check(samples, answer["messages"], processor)


@pytest.mark.parametrize("family", ["qwen3_vl", "kimi_k25"])
def test_recorded_offline_outputs(family: str, tmp_path: Path) -> None:
    record = json.loads((DATA / f"offline_{family}.json").read_text())
    folder = {"qwen3_vl": folders.qwen_folder, "kimi_k25": folders.kimi_folder}[family](tmp_path)
    if family == "kimi_k25":
        # It was recorded with a larger vocabulary.
        config = json.loads((folder / "config.json").read_text())
        folders.write(folder / "config.json", config | {"media_placeholder_token_id": record["placeholder"]})
    processor = load_processor(folder)
    for answer in record["answers"]:
        output = SimpleNamespace(
            request_id="r",
            prompt_token_ids=answer["output"]["prompt_token_ids"],
            outputs=[completion(**fields) for fields in answer["output"]["outputs"]],
        )
        samples = samples_from_output(output, answer["messages"], processor.placeholder)
        check(samples, answer["messages"], processor)


def completion(index: int, token_ids: list[int], logprobs: list[dict[str, float]]) -> SimpleNamespace:
    steps = [
        {int(token): SimpleNamespace(logprob=value) for token, value in step.items()} for step in logprobs
    ]
    return SimpleNamespace(index=index, token_ids=token_ids, logprobs=steps)


def check(samples: list[Sample], messages: list[dict[str, Any]], processor: Any) -> None:
    counts = [processor.count_tokens(*load_image(url).size) for url in image_urls(messages)]
    assert samples
    for sample in samples:
        assert [ref.length for ref in sample.refs] == counts
        assert sample.loss_mask.sum() > 0
        assert (sample.logprobs[sample.loss_mask] < 0).all()
    assert len(materialize(pack(samples), processor)[processor.names[1]]) == len(samples) * len(counts)
