"""vLLM's answers as samples: those of the offline engine, and those of its HTTP generate endpoint.

Nothing of vLLM is imported: outputs are read by their attributes, HTTP bodies as the JSON they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kimi_bridge.errors import MultimodalError
from kimi_bridge.multimodal.refs import MMRef, Sample, build_mm_refs, image_urls

Counter = Callable[[str], int]

# What vLLM's HTTP answers say where they have no log-probability.
_NONE_TAKEN = -9999.0


def samples_from_output(
    output: Any,
    messages: Iterable[Mapping[str, Any]],
    placeholder: int,
    *,
    name: str | None = None,
    count: Counter | None = None,
) -> list[Sample]:
    """One sample for each completion of a RequestOutput of `LLM.chat` or `LLM.generate`.

    Its `prompt_token_ids` are expanded; vLLM 0.26 returns no placeholder ranges with them, newer ones may
    (`multi_modal_placeholders`, used where it is there). `count` gives an image's tokens by its URL and
    checks the runs. Log-probabilities need `SamplingParams(logprobs=0)` or more.
    """
    with _fields_of("RequestOutput (one, not the list of them)", name):
        name = name or str(output.request_id)
        completions, prompt = output.outputs, output.prompt_token_ids
    messages = list(messages)
    counts = None if count is None else [count(url) for url in image_urls(messages, name)]
    ranges = getattr(output, "multi_modal_placeholders", None)
    refs = build_mm_refs(messages, prompt, placeholder, ranges=ranges, counts=counts, sample=name)
    return [
        _sample(
            f"{name}/{completion.index}",
            prompt,
            completion.token_ids,
            refs,
            _of_output(completion, f"{name}/{completion.index}"),
        )
        for completion in completions
    ]


def samples_from_generate(
    request: Mapping[str, Any],
    response: Mapping[str, Any],
    messages: Iterable[Mapping[str, Any]],
    placeholder: int,
    *,
    name: str | None = None,
) -> list[Sample]:
    """One sample for each choice of a POST to /inference/v1/generate.

    `request` is its body, as POST /v1/chat/completions/render made it for the messages: token_ids, and
    features with the placeholder ranges. `response` is what came back, with `sampling_params.logprobs` set.
    """
    with _fields_of("request and answer of /inference/v1/generate", name):
        name = name or str(request.get("request_id"))
        refs = refs_from_render(request, messages, placeholder, name=name)
        samples = []
        for choice in response["choices"]:
            label = f"{name}/{choice['index']}"
            logprobs = [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or ()]
            samples.append(_sample(label, request["token_ids"], choice["token_ids"] or (), refs, logprobs))
        return samples


def refs_from_render(
    request: Mapping[str, Any],
    messages: Iterable[Mapping[str, Any]],
    placeholder: int,
    *,
    name: str = "sample",
) -> tuple[MMRef, ...]:
    """References for a body that vLLM's render endpoint made: its ranges are the engine's own."""
    with _fields_of("body of /v1/chat/completions/render", name):
        ranges = (request.get("features") or {}).get("mm_placeholders") or {}
        return build_mm_refs(messages, request["token_ids"], placeholder, ranges=ranges, sample=name)


@contextlib.contextmanager
def _fields_of(what: str, name: str | None) -> Iterator[None]:
    try:
        yield
    except (AttributeError, KeyError, TypeError) as error:
        raise MultimodalError(f"{name or 'sample'}: not vLLM's {what}: {error!r}.") from error


def _of_output(completion: Any, name: str) -> list[float]:
    taken = completion.logprobs or ()
    try:
        return [step[token].logprob for token, step in zip(completion.token_ids, taken, strict=bool(taken))]
    except (KeyError, ValueError) as error:
        raise MultimodalError(f"{name}: log-probabilities that are not those of the tokens.") from error


def _sample(
    name: str, prompt: Sequence[int], response: Sequence[int], refs: tuple[MMRef, ...], logprobs: list[float]
) -> Sample:
    if any(value <= _NONE_TAKEN for value in logprobs):
        raise MultimodalError(f"{name}: the engine took no log-probability of some tokens: drop the sample.")
    if len(logprobs) != len(response):
        raise MultimodalError(
            f"{name}: {len(logprobs)} log-probabilities for {len(response)} tokens: ask the engine for them "
            "(logprobs in its sampling parameters)."
        )
    mask = np.zeros(len(prompt) + len(response), bool)
    mask[len(prompt) :] = True
    given = np.zeros(len(mask), np.float32)
    given[len(prompt) :] = logprobs
    return Sample(name, [*prompt, *response], mask, given, refs)  # type: ignore[arg-type]
