"""Property tests: whatever the lengths, blocks and budgets, no block is cut and no token lost."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_bridge.errors import MultimodalError
from kimi_bridge.multimodal import MMRef, Sample, decode, encode, pack, share_out, truncate
from kimi_bridge.multimodal.refs import check_placeholders

PAD = 9


@st.composite
def a_sample(draw: st.DrawFn, name: str = "s", least: int = 0) -> Sample:
    """Text and blocks in any order, blocks that touch included; images repeat."""
    pieces = draw(
        st.lists(
            st.one_of(
                st.tuples(st.just(None), st.integers(1, 12)),
                st.tuples(st.integers(0, 3), st.integers(1, 12)),
            ),
            min_size=least,
            max_size=8,
        )
    )
    ids: list[int] = []
    refs = []
    for image, length in pieces:
        if image is not None:
            refs.append(MMRef(f"data:image/png;base64,{'ABCD'[image] * 4}", len(ids), length))
        ids += [PAD] * length if image is not None else [10 + (len(ids) + i) % 50 for i in range(length)]
    mask = np.array(draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))), bool)
    mask[:1] = False
    logprobs = -np.arange(len(ids), dtype=np.float32) / 7
    return Sample(name, np.array(ids, np.int32), mask, logprobs, tuple(refs))


def same(one: Sample, other: Sample) -> bool:
    return (
        one.name == other.name
        and np.array_equal(one.ids, other.ids)
        and np.array_equal(one.loss_mask, other.loss_mask)
        and one.logprobs.tobytes() == other.logprobs.tobytes()
        and one.refs == other.refs
    )


@settings(deadline=None)
@given(a_sample(), st.integers(0, 120))
def test_truncation_keeps_blocks_whole(sample: Sample, budget: int) -> None:
    cut = truncate(sample, budget)
    kept = len(cut)
    check_placeholders("cut", cut.ids, cut.refs, PAD)
    assert cut.refs == sample.refs[: len(cut.refs)]
    assert np.array_equal(cut.ids, sample.ids[:kept])
    assert np.array_equal(cut.loss_mask, sample.loss_mask[:kept])
    assert np.array_equal(cut.logprobs, sample.logprobs[:kept])
    assert kept <= budget or kept == len(sample)
    if kept < min(budget, len(sample)):
        dropped = sample.refs[len(cut.refs)]
        assert dropped.offset == kept
        assert dropped.end > budget, "a block that fits was dropped"


@settings(deadline=None)
@given(st.lists(a_sample(least=1), min_size=1, max_size=6))
def test_packing_loses_nothing(samples: list[Sample]) -> None:
    batch = pack(samples)
    check_placeholders("batch", batch.ids, batch.refs, PAD)
    assert len(batch) == sum(map(len, samples))
    assert len(batch.refs) == sum(len(sample.refs) for sample in samples)
    assert all(same(a, b) for a, b in zip(samples, batch.samples(), strict=True))
    assert batch.position_ids.tolist() == [i for sample in samples for i in range(len(sample))]
    assert batch.cu_seqlens.tolist() == [sum(map(len, samples[:i])) for i in range(len(samples) + 1)]
    types = [t for sample in samples for t in sample.mm_token_type_ids.tolist()]
    assert batch.mm_token_type_ids.tolist() == types


@settings(deadline=None)
@given(st.lists(a_sample(), max_size=6))
def test_the_wire_changes_nothing(samples: list[Sample]) -> None:
    message = encode(samples)
    arrived = decode(message)
    assert len(arrived) == len(samples)
    assert all(same(a, b) for a, b in zip(samples, arrived, strict=True))
    assert encode(arrived) == message


@settings(deadline=None)
@given(st.lists(a_sample(least=1), max_size=12), st.integers(1, 4), st.integers(1, 100))
def test_every_sample_gets_one_bin(samples: list[Sample], workers: int, max_tokens: int) -> None:
    longest = max(map(len, samples), default=0)
    if longest > max_tokens:
        with pytest.raises(MultimodalError, match="truncate it first"):
            share_out(samples, workers, max_tokens)
        max_tokens = longest
    shares = share_out(samples, workers, max_tokens)
    assert len(shares) == workers
    assert len({len(bins) for bins in shares}) == 1
    assert sorted(i for bins in shares for b in bins for i in b) == list(range(len(samples)))
    for bins in shares:
        assert all(sum(len(samples[i]) for i in indices) <= max_tokens for indices in bins)
    assert shares == share_out(list(samples), workers, max_tokens)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6))
def test_workers_are_balanced_in_tokens_and_patches(seed: int) -> None:
    """A step of 128 rollouts, a third of them without images, images from small to a whole context."""
    draw = np.random.default_rng(seed)
    samples = []
    for number in range(128):
        text = int(draw.integers(200, 3000))
        images = [int(n) for n in np.exp(draw.uniform(np.log(64), np.log(4096), draw.choice([0, 1, 4])))]
        ids = np.ones(text + sum(images), np.int32)
        offsets = np.cumsum([0, *images])[:-1]
        refs = [MMRef("data:,", int(o), n) for o, n in zip(offsets, images, strict=True)]
        samples.append(Sample(str(number), ids, np.zeros(len(ids)), np.zeros(len(ids)), tuple(refs)))
    shares = share_out(samples, 8, 32768)
    sizes = np.array(
        [
            [
                sum(len(samples[i]) for b in bins for i in b),
                sum(r.length for b in bins for i in b for r in samples[i].refs),
            ]
            for bins in shares
        ]
    )
    assert (sizes.max(axis=0) <= 1.1 * sizes.mean(axis=0)).all()


def test_images_are_balanced_where_tokens_alone_would_not_be() -> None:
    """Four text samples and four image samples of one length: two of each to a worker."""
    text = [Sample(f"t{i}", np.ones(100, int), np.zeros(100), np.zeros(100)) for i in range(4)]
    seen = [
        Sample(f"i{i}", np.full(100, PAD), np.zeros(100), np.zeros(100), (MMRef("data:,", 0, 100),))
        for i in range(4)
    ]
    for bins in share_out([*text, *seen], 2, 200):
        assert sorted(i // 4 for indices in bins for i in indices) == [0, 0, 1, 1]


def test_what_cannot_be_packed() -> None:
    empty = Sample("left empty", [], [], [])
    with pytest.raises(MultimodalError, match="No samples"):
        pack([])
    with pytest.raises(MultimodalError, match="left empty has no tokens"):
        pack([empty])
    with pytest.raises(MultimodalError, match="-1 tokens"):
        truncate(empty, -1)
    with pytest.raises(MultimodalError, match="0 workers"):
        share_out([], 0, 8)


def test_bins_are_found_soon() -> None:
    """Samples of which no two share a bin: the search for the number of bins is not one by one."""
    samples = [Sample("s", np.zeros(51, int), np.zeros(51), np.zeros(51))] * 600
    began = time.perf_counter()
    assert share_out(samples, 1, 100) == [[[i] for i in range(600)]]
    assert time.perf_counter() - began < 2


def test_an_empty_bin() -> None:
    sample = Sample("s", np.zeros(5, np.int32), np.zeros(5), np.zeros(5))
    assert share_out([sample], 2, 8) == [[[0]], [[]]]
    with pytest.raises(MultimodalError, match="skip bins that share_out left empty"):
        pack([])


@pytest.mark.parametrize("budget", [2.5, float("nan"), -1])
def test_no_budget(budget: float) -> None:
    with pytest.raises(MultimodalError, match="give 0 or more"):
        truncate(Sample("s", [1], [0], [0]), budget)  # type: ignore[arg-type]
