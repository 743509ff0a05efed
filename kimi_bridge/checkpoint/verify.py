"""Two checkpoints compared, tensor by tensor, bit by bit."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_bridge.checkpoint.kinds import KINDS, tensor_kind
from kimi_bridge.checkpoint.reader import CheckpointReader
from kimi_bridge.checkpoint.triplets import part_names
from kimi_bridge.errors import CheckpointError

# What is held of a tensor at a time: the real embeddings take 2.3 GB.
_CHUNK_BYTES = 1 << 25

_LAYER = re.compile(r"(?:language_model\.)?model\.layers\.(\d+)\.")

Progress = Callable[[int, int], None]
"""Called with the bytes compared so far and the bytes of all."""


@dataclass
class KindRow:
    """The tensors of one kind. Noise counts where bits differ, and where INT4 is compared with plain."""

    kind: str
    count: int = 0
    identical: int = 0
    bytes: int = 0
    seconds: float = 0.0
    largest_difference: float = 0.0
    signal: float = 0.0
    noise: float = 0.0

    @property
    def sqnr_db(self) -> float | None:
        """Signal-to-quantization-noise ratio; None without noise."""
        return _decibels(self.signal, self.noise)


@dataclass
class LayerRow:
    """What differs in the tensors of one kind in one layer."""

    layer: int
    kind: str
    largest_difference: float = 0.0
    signal: float = 0.0
    noise: float = 0.0


@dataclass(frozen=True)
class Difference:
    """A weight that is not the same in both checkpoints; numbers where there are values to compare."""

    name: str
    reason: str
    largest_difference: float | None = None
    sqnr_db: float | None = None


@dataclass
class Report:
    """What verify_checkpoints found. `missing` are weights of `a` that `b` lacks, `extra` the others."""

    a: str
    b: str
    rows: list[KindRow] = field(default_factory=list)
    layers: list[LayerRow] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    config: str = "equal"
    seconds: float = 0.0

    @property
    def identical(self) -> bool:
        """Same weights, and each the same: bits, or values where one side is INT4 and the other plain."""
        return not (self.differences or self.missing or self.extra)

    def to_dict(self) -> dict[str, Any]:
        """Everything, with what is computed from it, for JSON."""
        content = asdict(self) | {"identical": self.identical}
        content["rows"] = [asdict(row) | {"sqnr_db": row.sqnr_db} for row in self.rows]
        return content

    def to_json(self) -> str:
        """A JSON text; numbers that JSON does not know (infinite differences) become null."""
        return json.dumps(_finite(self.to_dict()), indent=2, allow_nan=False)


def verify_checkpoints(a: str | Path, b: str | Path, progress: Progress | None = None) -> Report:
    """Compares every logical weight of two folders, streaming.

    The bits must be the same: of plain tensors with dtype and shape, of INT4 triplets with all three
    parts. Where one side is INT4 and the other plain, the dequantized values must be equal. The configs
    are compared for information only. Raises CheckpointError for a folder that is no sound checkpoint.
    """
    begin = time.perf_counter()
    left, right = CheckpointReader(a), CheckpointReader(b)
    names, others = left.weights(), right.weights()
    report = Report(str(a), str(b))
    report.missing = [name for name in names if name not in others]
    report.extra = [name for name in others if name not in names]
    report.config = _compare_configs(left, right)
    common = [name for name in names if name in others]
    total, done = sum(_nbytes(left, name) for name in common), 0
    rows: dict[str, KindRow] = {}
    layers: dict[tuple[str, int], LayerRow] = {}
    for name in common:
        row = rows.setdefault(tensor_kind(name), KindRow(tensor_kind(name)))
        difference = _compare_into(row, _layer_row(layers, name), left, right, name)
        if difference is not None:
            report.differences.append(difference)
        done += _nbytes(left, name)
        if progress is not None:
            progress(done, total)
    report.rows = [rows[kind] for kind in KINDS if kind in rows]
    report.layers = [layers[key] for key in sorted(layers)]
    report.seconds = time.perf_counter() - begin
    return report


@dataclass
class _Distance:
    """Sums over the values of a tensor, in float64."""

    largest: float = 0.0
    signal: float = 0.0
    noise: float = 0.0


def _layer_row(layers: dict[tuple[str, int], LayerRow], name: str) -> LayerRow | None:
    """The row of the weight's layer; None for a weight outside of the layers."""
    match = _LAYER.match(name)
    if match is None:
        return None
    kind, layer = tensor_kind(name), int(match[1])
    return layers.setdefault((kind, layer), LayerRow(layer, kind))


def _compare_into(
    row: KindRow, layer: LayerRow | None, left: CheckpointReader, right: CheckpointReader, name: str
) -> Difference | None:
    begin = time.perf_counter()
    reason, distance = _compare(left, right, name)
    row.count += 1
    row.identical += reason is None
    row.bytes += _nbytes(left, name)
    for sums in (row, layer):
        if sums is not None and distance is not None:
            sums.largest_difference = max(sums.largest_difference, distance.largest)
            sums.signal += distance.signal
            sums.noise += distance.noise
    row.seconds += time.perf_counter() - begin
    if reason is None:
        return None
    if distance is None:
        return Difference(name, reason)
    return Difference(name, reason, distance.largest, _decibels(distance.signal, distance.noise))


def _compare(
    left: CheckpointReader, right: CheckpointReader, name: str
) -> tuple[str | None, _Distance | None]:
    """Why a weight differs (None: it does not), and by how much where that was computed."""
    shapes = _shape(left, name), _shape(right, name)
    if shapes[0] != shapes[1]:
        return f"shape {list(shapes[0])} against {list(shapes[1])}", None
    if left.is_triplet(name) != right.is_triplet(name):
        distance = _distance(left, right, name)
        return ("INT4 against plain: other values" if distance.largest else None), distance
    parts = part_names(name) if left.is_triplet(name) else (name,)
    differing = [fault for part in parts if (fault := _compare_bits(left, right, part))]
    if not differing:
        return None, None
    return "; ".join(differing), _distance(left, right, name)


def _compare_bits(left: CheckpointReader, right: CheckpointReader, name: str) -> str | None:
    a, b = left.info(name), right.info(name)
    label = name.rpartition(".")[2]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        dtypes = [str(info.dtype).removeprefix("torch.") for info in (a, b)]
        return f"{label} is {dtypes[0]} {list(a.shape)} against {dtypes[1]} {list(b.shape)}"
    for rows in _row_chunks(a.shape, a.nbytes):
        if not torch.equal(_bits(left.slice(name, rows)), _bits(right.slice(name, rows))):
            return f"{label} has other bits"
    return None


def _distance(left: CheckpointReader, right: CheckpointReader, name: str) -> _Distance:
    distance = _Distance()
    # As float64, the sums of a chunk of bfloat16 take four times its bytes.
    for rows in _row_chunks(_shape(left, name), _count(_shape(left, name)) * 8):
        a, b = (_values(reader, name, rows) for reader in (left, right))
        gap = (a - b).abs()
        # Equal infinities are no difference; NaN against a number is an infinite one.
        gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, gap).nan_to_num(
            nan=math.inf, posinf=math.inf
        )
        if gap.numel():
            distance.largest = max(distance.largest, gap.max().item())
        distance.signal += a.square().sum().item()
        distance.noise += gap.square().sum().item()
    return distance


def _values(reader: CheckpointReader, name: str, rows: slice | None) -> Tensor:
    # First as stored (INT4 in its scale's dtype, which is what is served), then widened.
    return reader.weight(name, rows).to(torch.float64)


def _shape(reader: CheckpointReader, name: str) -> tuple[int, ...]:
    if reader.is_triplet(name):
        packed = reader.info(part_names(name)[0])
        return (packed.shape[0], packed.shape[1] * 8)
    return reader.info(name).shape


def _nbytes(reader: CheckpointReader, name: str) -> int:
    parts = part_names(name) if reader.is_triplet(name) else (name,)
    return sum(reader.info(part).nbytes for part in parts)


def _row_chunks(shape: tuple[int, ...], nbytes: int) -> Iterator[slice | None]:
    """Row ranges of about _CHUNK_BYTES each; None for a tensor without rows."""
    if not shape or not nbytes:
        yield None
        return
    step = max(1, shape[0] * _CHUNK_BYTES // nbytes)
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _count(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def _decibels(signal: float, noise: float) -> float | None:
    if not noise or not signal or not math.isfinite(signal + noise):
        return None
    return 10 * math.log10(signal / noise)


def _compare_configs(left: CheckpointReader, right: CheckpointReader) -> str:
    try:
        a, b = left.config_dict, right.config_dict
    except CheckpointError as error:
        return str(error)
    keys = sorted(_differing_keys(a, b))
    return "equal" if not keys else f"differs in {', '.join(keys)}"


def _differing_keys(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key in a.keys() | b.keys():
        x, y = a.get(key), b.get(key)
        if isinstance(x, dict) and isinstance(y, dict):
            yield from _differing_keys(x, y, f"{prefix}{key}.")
        elif (key in a) != (key in b) or x != y:
            yield prefix + key


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
