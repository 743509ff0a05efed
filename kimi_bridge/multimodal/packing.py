"""Samples cut to a budget, packed one behind the other, and shared out to data-parallel workers."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kimi_bridge.errors import MultimodalError
from kimi_bridge.multimodal.refs import MMRef, Sample, token_types


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Samples one behind the other, without padding: `cu_seqlens` int32 [samples + 1] says where each begins.

    `ids`, `loss_mask`, `logprobs` and `refs` are as in Sample, with offsets into the whole batch.
    """

    names: tuple[str, ...]
    ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    refs: tuple[MMRef, ...]
    cu_seqlens: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def position_ids(self) -> NDArray[np.int64]:
        """int64 [tokens]: counts from 0 in every sample."""
        lengths = np.diff(self.cu_seqlens)
        return np.arange(len(self.ids)) - np.repeat(self.cu_seqlens[:-1].astype(np.int64), lengths)

    @property
    def mm_token_type_ids(self) -> NDArray[np.uint8]:
        """uint8 [tokens]: 1 on the blocks of images."""
        return token_types(self.refs, len(self.ids))

    def samples(self) -> list[Sample]:
        """The samples that were packed."""
        starts = [ref.offset for ref in self.refs]
        out = []
        for name, begin, end in zip(self.names, self.cu_seqlens, self.cu_seqlens[1:], strict=False):
            part = slice(int(begin), int(end))
            inside = self.refs[bisect.bisect_left(starts, part.start) : bisect.bisect_left(starts, part.stop)]
            refs = tuple(ref.moved(-part.start) for ref in inside)
            out.append(Sample(name, self.ids[part], self.loss_mask[part], self.logprobs[part], refs))
        return out


def truncate(sample: Sample, max_tokens: int) -> Sample:
    """The first `max_tokens` tokens, or fewer: a cut inside an image's block moves to where the block begins.

    Blocks are kept whole with their reference, or go whole with it. What begins with a block that does not
    fit comes back without tokens. Raises MultimodalError for a negative budget.
    """
    if not isinstance(max_tokens, int | np.integer) or max_tokens < 0:
        raise MultimodalError(f"{sample.name}: truncated to {max_tokens} tokens: give 0 or more.")
    if max_tokens >= len(sample):
        return sample
    cut = next((ref.offset for ref in sample.refs if ref.offset < max_tokens < ref.end), max_tokens)
    refs = tuple(ref for ref in sample.refs if ref.end <= cut)
    return Sample(sample.name, sample.ids[:cut], sample.loss_mask[:cut], sample.logprobs[:cut], refs)


def pack(samples: Sequence[Sample]) -> PackedBatch:
    """The samples in their order. Raises MultimodalError for none, or for one without tokens."""
    if not samples:
        raise MultimodalError(
            "No samples to pack: skip bins that share_out left empty (the worker still joins the step)."
        )
    for sample in samples:
        if not len(sample):
            raise MultimodalError(f"{sample.name} has no tokens (left): leave it out.")
    ends = np.cumsum([len(sample) for sample in samples])
    if ends[-1] > np.iinfo(np.int32).max:
        raise MultimodalError(f"{len(samples)} samples of {ends[-1]} tokens: pack fewer.")
    cu_seqlens = np.concatenate(([0], ends)).astype(np.int32)
    return PackedBatch(
        names=tuple(sample.name for sample in samples),
        ids=np.concatenate([sample.ids for sample in samples]),
        loss_mask=np.concatenate([sample.loss_mask for sample in samples]),
        logprobs=np.concatenate([sample.logprobs for sample in samples]),
        refs=tuple(
            ref.moved(int(start))
            for sample, start in zip(samples, cu_seqlens[:-1], strict=True)
            for ref in sample.refs
        ),
        cu_seqlens=cu_seqlens,
    )


def share_out(samples: Sequence[Sample], workers: int, max_tokens: int) -> list[list[list[int]]]:
    """Indices of the samples, by worker and bin: bins of at most `max_tokens`, as many on each worker.

    Bins, and workers, are balanced by tokens and by image patches together: what is kept low is the larger
    of a bin's share of all tokens and its share of all patches (a patch tower's work grows with the patches,
    of which the families here have four to a placeholder token). Every sample comes once; the i-th bins of
    the workers, which run at the same time, are alike in size. Few samples leave bins empty: a worker still
    joins the step. The same samples give the same bins everywhere, without talking to each other.
    Raises MultimodalError for a sample longer than `max_tokens`.
    """
    if workers < 1 or max_tokens < 1:
        raise MultimodalError(f"{workers} workers, bins of {max_tokens} tokens: give 1 or more of each.")
    for sample in samples:
        if len(sample) > max_tokens:
            raise MultimodalError(
                f"{sample.name} has {len(sample)} tokens, a bin takes {max_tokens}: truncate it first."
            )
    sizes = np.array([[len(s), sum(r.length for r in s.refs)] for s in samples], np.int64).reshape(-1, 2)
    # Shares of the whole as integers: sums of floats would depend on their order.
    shares = sizes * (2**40 // np.maximum(sizes.sum(axis=0), 1))
    order = sorted(range(len(samples)), key=lambda i: (-shares[i].max(), -shares[i].sum(), i))

    def filled(per_worker: int) -> list[list[int]] | None:
        return _fill(order, sizes[:, 0], shares, per_worker * workers, max_tokens)

    per_worker = max(1, -(-int(sizes[:, 0].sum()) // (workers * max_tokens)))
    if (bins := filled(per_worker)) is None:
        # Halving, because an attempt takes the square of the samples; a bin for each sample always does.
        most = -(-len(samples) // workers)
        per_worker = bisect.bisect_left(
            range(most), True, per_worker + 1, key=lambda n: filled(n) is not None
        )
        bins = filled(per_worker)
        assert bins is not None
    return _to_workers(bins, shares, workers, per_worker)


def _fill(
    order: list[int], tokens: NDArray[np.int64], shares: NDArray[np.int64], count: int, max_tokens: int
) -> list[list[int]] | None:
    """The largest sample first, each into the bin that stays smallest; None where one fits no bin."""
    bins: list[list[int]] = [[] for _ in range(count)]
    used = np.zeros(count, np.int64)
    loads = np.zeros((count, 2), np.int64)
    for index in order:
        after = loads + shares[index]
        key = np.where(used + tokens[index] <= max_tokens, after.max(axis=1), np.iinfo(np.int64).max)
        lowest = np.flatnonzero(key == key.min())
        best = int(lowest[after[lowest].sum(axis=1).argmin()])
        if used[best] + tokens[index] > max_tokens:
            return None
        bins[best].append(index)
        used[best] += tokens[index]
        loads[best] = after[best]
    return bins


def _to_workers(
    bins: list[list[int]], shares: NDArray[np.int64], workers: int, per_worker: int
) -> list[list[list[int]]]:
    """Round by round, the largest bins first: the worker that carries least takes the largest of a round."""
    weight = {i: shares[indices].sum(axis=0) for i, indices in enumerate(bins)}
    order = sorted(weight, key=lambda i: (-weight[i].max(), -weight[i].sum(), i))
    loads = np.zeros((workers, 2), np.int64)
    out: list[list[list[int]]] = [[] for _ in range(workers)]
    for start in range(0, workers * per_worker, workers):
        free = set(range(workers))
        for i in order[start : start + workers]:
            worker = min(free, key=lambda w: (*sorted(loads[w] + weight[i], reverse=True), w))
            free.remove(worker)
            loads[worker] += weight[i]
            out[worker].append(sorted(bins[i]))
    return out
