"""The orders a conversion gives its workers: plain values that travel between processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kimi_bridge.int4 import Int4Scheme


class Region(NamedTuple):
    """Bytes of a file."""

    path: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Triplet:
    """Where the three tensors of an INT4 weight `[rows, columns]` lie."""

    packed: Region
    scale: Region
    shape: Region
    rows: int
    columns: int
    group_size: int
    scale_dtype: torch.dtype
    shape_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Copy:
    """The bytes of a region, as they are. Target: one offset."""

    name: str
    source: Region


@dataclass(frozen=True, slots=True)
class CopyInt4:
    """An INT4 weight, bit for bit. Targets: offsets of packed, scale and shape."""

    name: str
    source: Triplet


@dataclass(frozen=True, slots=True)
class Dequantize:
    """The values of an INT4 weight in the dtype of its scale. Target: one offset."""

    name: str
    source: Triplet


@dataclass(frozen=True, slots=True)
class Quantize:
    """A plain matrix `[rows, columns]` as INT4. Targets: offsets of packed, scale and shape.

    Groups that are what `reference` dequantizes to keep its codes and scales.
    """

    name: str
    source: Region
    rows: int
    columns: int
    dtype: torch.dtype
    shape_dtype: torch.dtype
    reference: Triplet | None


@dataclass(frozen=True, slots=True)
class Merge:
    """A weight `[rows, columns]` plus `scale * B A`, in `dtype` or, with a `shape_dtype`, as INT4.

    a: `[rank, columns]` and b: `[rows, rank]`, both in `lora_dtype`. Groups of an INT4 source that the sum
    leaves as they are keep their codes and scales. `kind` is what reports count it by. Targets: one offset,
    or those of packed, scale and shape.
    """

    name: str
    kind: str
    source: Region | Triplet
    rows: int
    columns: int
    dtype: torch.dtype
    a: Region
    b: Region
    lora_dtype: torch.dtype
    rank: int
    scale: float
    shape_dtype: torch.dtype | None

    @property
    def int4(self) -> bool:
        """Whether the result is INT4."""
        return self.shape_dtype is not None


Job = Copy | CopyInt4 | Dequantize | Quantize | Merge


@dataclass(frozen=True, slots=True)
class Piece:
    """Jobs whose results lie in one shard, with their offsets in it.

    `path` is the file to write into, which is there; with a `header` it is made first, at `size` bytes, and
    with that complete it takes the name `final`.
    """

    shard: str
    path: str
    jobs: list[tuple[Job, tuple[int, ...]]]
    nbytes: int
    scheme: Int4Scheme
    verify: bool
    size: int = 0
    header: bytes | None = None
    final: str = ""


class Loose(NamedTuple):
    """An INT4 weight with groups that are no fixed point: quantizing its values gives other bits."""

    name: str
    loose: int
    groups: int


class Merged(NamedTuple):
    """What merging did to weights, in sums of squares: of the exact merge, of the result's distance from it,
    and of the update, the exact merge's distance from the base.

    The sums are whole numbers of `2^-256`: adding those is exact, so that they do not depend on the order in
    which workers end. `groups` are those of INT4 results, `changed` those with other bits than before.
    """

    weights: int = 0
    signal: int = 0
    noise: int = 0
    update: int = 0
    groups: int = 0
    changed: int = 0

    def plus(self, other: Merged) -> Merged:
        return Merged(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(slots=True)
class Findings:
    """What the verification of INT4 weights found; `worst` holds the first few of the loosest.

    `merged` holds what merges did, by kind of weight.
    """

    weights: int = 0
    groups: int = 0
    loose: int = 0
    worst: list[Loose] = field(default_factory=list)
    merged: dict[str, Merged] = field(default_factory=dict)

    def add(self, other: Findings) -> None:
        """Takes in the findings of another piece or shard."""
        self.weights += other.weights
        self.groups += other.groups
        self.loose += other.loose
        ranked = sorted(self.worst + other.worst, key=lambda entry: (-entry.loose / entry.groups, entry.name))
        self.worst = ranked[:WORST_KEPT]
        for kind, merged in other.merged.items():
            self.add_merged(kind, merged)

    def add_merged(self, kind: str, merged: Merged) -> None:
        """Takes in one merged weight, or several."""
        self.merged[kind] = self.merged.get(kind, Merged()).plus(merged)
        # In an order that does not depend on which worker ended first.
        self.merged = dict(sorted(self.merged.items()))

    def add_weight(self, name: str, loose: int, groups: int) -> None:
        """Takes in one INT4 weight."""
        self.add(Findings(1, groups, loose, [Loose(name, loose, groups)] if loose else []))


WORST_KEPT = 10


@dataclass(slots=True)
class Reply:
    """A piece is done, or `error` says why not; `bug` is the traceback of an error nobody foresaw."""

    shard: str
    nbytes: int = 0
    findings: Findings = field(default_factory=Findings)
    error: str = ""
    bug: str = ""
