"""Images found in expanded ids, by ranges, by runs and by counts; and everything that does not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kimi_bridge.errors import MultimodalError
from kimi_bridge.multimodal import MMRef, Sample, build_mm_refs, collapse, decode, encode, expand
from tests.multimodal.pictures import messages_with

PAD = 9
A, B = "data:image/png;base64,AAAA", "data:image/png;base64,BBBB"
IDS = [1, 2, PAD, PAD, PAD, 3, PAD, 4]


def test_runs() -> None:
    assert build_mm_refs(messages_with([A, B]), IDS, PAD) == (MMRef(A, 2, 3), MMRef(B, 6, 1))


@pytest.mark.parametrize(
    "ranges",
    [
        [(2, 3), (6, 1)],
        [(6, 1), (2, 3)],
        [{"offset": 2, "length": 3}, {"offset": 6, "length": 1}],
        {"image": [SimpleNamespace(offset=2, length=3), SimpleNamespace(offset=6, length=1)]},
        {"vision_chunk": [[2, 3], [6, 1]], "audio": []},
    ],
)
def test_ranges_of_every_form(ranges: object) -> None:
    assert build_mm_refs(messages_with([A, B]), IDS, PAD, ranges=ranges) == (MMRef(A, 2, 3), MMRef(B, 6, 1))


def test_touching_blocks_need_ranges_or_counts() -> None:
    ids = [1, *[PAD] * 5, 2]
    messages = messages_with([A, B])
    expected = (MMRef(A, 1, 2), MMRef(B, 3, 3))
    assert build_mm_refs(messages, ids, PAD, ranges=[(1, 2), (3, 3)]) == expected
    assert build_mm_refs(messages, ids, PAD, counts=[2, 3]) == expected
    with pytest.raises(
        MultimodalError, match=r"rollout 7: 2 images in the messages, 1 runs.*image 1 has no block"
    ):
        build_mm_refs(messages, ids, PAD, sample="rollout 7")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"counts": [4, 1]}, "run of 3 placeholders that ends at token 5.*up to image 0"),
        ({"counts": [3, 2]}, "run of 1 placeholders that ends at token 7"),
        ({"counts": [3]}, "1 counts for 2 images"),
        ({"ranges": [(2, 3)]}, "2 images in the messages, 1 placeholder ranges"),
        ({"ranges": [(2, 3), (6, 1), (7, 1)]}, "no image for the 1 tokens from 7 on"),
        ({"ranges": [(2, 4), (6, 1)]}, "image 0 has 4 tokens from 2 on, 3 of them placeholders"),
        (
            {"ranges": [(2, 2), (6, 1)]},
            "1 placeholder tokens .9. belong to none of the 2 images, the first is token 4",
        ),
        ({"ranges": [(2, 3), (6, 9)]}, "image 1 at tokens 6 to 15, of 8 tokens"),
        ({"ranges": [(2, 3), (4, 1)]}, "the block before it ends at 5"),
        ({"ranges": [(2, 3), (-2, 1)]}, "image 0 at tokens -2"),
        ({"ranges": [(2, 3), "ab"]}, "no placeholder range"),
        ({"ranges": {"image": [(2, 3)], "video": [(6, 1)]}}, "ranges of image, video"),
    ],
)
def test_what_does_not_fit_is_named(arguments: dict, message: str) -> None:
    with pytest.raises(MultimodalError, match=f"s1: .*{message}"):
        build_mm_refs(messages_with([A, B]), IDS, PAD, sample="s1", **arguments)


def test_a_sampled_placeholder_is_named_with_the_place_to_cut_at() -> None:
    with pytest.raises(MultimodalError, match="truncate it to 8 tokens"):
        build_mm_refs(messages_with([A, B]), [*IDS, PAD, 5], PAD, ranges=[(2, 3), (6, 1)])


@pytest.mark.parametrize(
    "part", [{"type": "video_url", "video_url": {"url": A}}, {"type": "input_audio"}, {"type": "image_url"}]
)
def test_other_media_are_refused(part: dict) -> None:
    with pytest.raises(MultimodalError, match="part"):
        build_mm_refs([{"role": "user", "content": [part]}], IDS, PAD)


def test_messages_without_images() -> None:
    messages = [
        {"role": "user", "content": "text"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": ["a string part", {"type": "text", "text": "x"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": A}]},
    ]
    assert build_mm_refs(messages, [1, PAD], PAD) == (MMRef(A, 1, 1),)


def test_logical_and_expanded_tokens() -> None:
    refs = build_mm_refs(messages_with([A, B]), IDS, PAD)
    sample = Sample("s", IDS, np.zeros(8), np.zeros(8), refs)
    logical = collapse(sample.ids, refs)
    assert logical.tolist() == [1, 2, PAD, 3, PAD, 4]
    assert sample.logical_length == len(logical)
    ids, ranges = expand(logical, PAD, [3, 1])
    assert ids.tolist() == IDS
    assert ranges == [(2, 3), (6, 1)]
    assert sample.mm_token_type_ids.tolist() == [0, 0, 1, 1, 1, 0, 1, 0]
    with pytest.raises(MultimodalError, match="2 placeholders for 1 images"):
        expand(logical, PAD, [3])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_mask": [False]}, "3 ids, 1 loss mask"),
        ({"loss_mask": [True, False, False]}, "first token"),
        ({"ids": [1, -1, 2]}, "outside 0"),
        ({"loss_mask": [0, 0, 1], "logprobs": [0, 0, float("nan")]}, "token 2 has log-probability nan"),
        ({"logprobs": [0, float("nan"), 0]}, "token 1 has log-probability nan: mask it and give 0"),
        ({"logprobs": [0, None, 0]}, "token 1 has log-probability nan"),
        ({"logprobs": [0, 7.5, 0]}, "token 1 has log-probability 7.5.*, not logits"),
        ({"logprobs": ["a", "b", "c"]}, "logprobs are no vector of numbers"),
        ({"ids": [[1], [2, 3], []]}, "ids are no vector of numbers"),
        ({"loss_mask": [0, 0.5, 1]}, "loss_mask holds other than 0 and 1"),
        ({"loss_mask": [0, float("nan"), 1]}, "loss_mask holds other than 0 and 1"),
        ({"refs": [MMRef(A, 1.0, 2)]}, "reference 0 is no MMRef"),
        ({"refs": [MMRef(None, 1, 2)]}, "reference 0 is no MMRef"),
        ({"refs": [(A, 1, 2)]}, "reference 0 is no MMRef"),
        ({"ids": [1.5, 1, 2]}, "float64"),
        ({"ids": [[1, 2, 3]]}, "shape"),
        ({"refs": [MMRef(A, 2, 2)]}, "image 0 at tokens 2 to 4, of 3"),
        ({"refs": [MMRef(A, 1, 0)]}, "one token at least"),
    ],
)
def test_samples_that_do_not_fit(fields: dict, message: str) -> None:
    sound = {"ids": [1, 2, 3], "loss_mask": [False] * 3, "logprobs": [0.0] * 3}
    with pytest.raises(MultimodalError, match=f"s: .*{message}"):
        Sample("s", **(sound | fields))


def test_names_are_text() -> None:
    with pytest.raises(MultimodalError, match="called 5: give its name"):
        Sample(5, [1], [0], [0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "messages", [None, ["hello"], [{"content": 5}], [{"content": {"type": "image_url", "image_url": A}}]]
)
def test_what_are_no_messages(messages: Any) -> None:
    with pytest.raises(MultimodalError, match=r"^s: .*give"):
        build_mm_refs(messages, [1, PAD, 2], PAD, sample="s")


@pytest.mark.parametrize(
    "hints",
    [
        {"ranges": 5},
        {"ranges": {"image": 5}},
        {"ranges": [(True, 1)]},
        {"counts": 5},
        {"counts": ["1"]},
        {"counts": [1.0]},
        {"counts": [0]},
        {"counts": [-1]},
    ],
)
def test_what_are_no_ranges_and_counts(hints: dict) -> None:
    with pytest.raises(MultimodalError, match=r"^s: "):
        build_mm_refs(messages_with([A]), [1, PAD, 2], PAD, sample="s", **hints)


def test_counts_may_be_numpys() -> None:
    """What is made of them must still travel."""
    refs = build_mm_refs(messages_with([A]), [1, PAD, 2], PAD, counts=np.array([1]))
    assert decode(encode([Sample("s", [1, PAD, 2], [0] * 3, [0] * 3, refs)]))[0].refs == (MMRef(A, 1, 1),)


@pytest.mark.parametrize("counts", [[0], [-1], [1.5], [2**40]])
def test_expansion_that_cannot_be(counts: list) -> None:
    with pytest.raises(MultimodalError, match=r"^s: "):
        expand([1, PAD, 2], PAD, counts, "s")


def test_collapsing_other_ids() -> None:
    with pytest.raises(MultimodalError, match="image 0 at tokens 1 to 9, of 3"):
        collapse([1, PAD, 2], [MMRef(A, 1, 8)])


def test_samples_do_not_change_with_their_source() -> None:
    for ids in (np.arange(3, dtype=np.int32), torch.arange(3, dtype=torch.int32), torch.arange(3)):
        sample = Sample("s", ids, [False] * 3, torch.zeros(3))
        ids[0] = 7
        assert sample.ids.tolist() == [0, 1, 2]
        assert not sample.ids.flags.writeable


def test_errors_do_not_print_images() -> None:
    long = "data:image/png;base64," + "A" * 100000
    with pytest.raises(MultimodalError) as caught:
        build_mm_refs(messages_with([long]), [1], PAD)
    assert len(str(caught.value)) < 400
    assert len(repr(MMRef(long, 0, 1))) < 200
