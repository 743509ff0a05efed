"""The jobs of a conversion: one for every output weight, and the tensors that it fills."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from kimi_bridge.checkpoint.reader import CheckpointReader
from kimi_bridge.checkpoint.shards import TensorInfo
from kimi_bridge.checkpoint.synthetic_config import text_weight_names
from kimi_bridge.checkpoint.triplets import CODES_PER_WORD, SCALE_DTYPES, part_names
from kimi_bridge.checkpoint.writer import TensorSpec
from kimi_bridge.conversion.jobs import Copy, CopyInt4, Dequantize, Job, Merge, Quantize, Region, Triplet
from kimi_bridge.errors import CheckpointError
from kimi_bridge.int4 import Int4Scheme


class Unit(NamedTuple):
    """An output weight: the job that makes it, and its tensors, which share a shard."""

    job: Job
    specs: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)


def open_checkpoint(path: str | Path) -> CheckpointReader:
    """A source, checked. Raises CheckpointError for faults in config, index or headers, and missing text."""
    # Absolute, because workers may have another working directory.
    reader = CheckpointReader(Path(path).resolve())
    reader.check()
    if missing := [name for name in text_weight_names(reader.config_dict) if name not in reader.weights()]:
        raise CheckpointError(
            f"{missing[0]} is missing from {path}, with {len(missing) - 1} others that config.json implies:"
            " download the checkpoint again, or correct config.json."
        )
    return reader


def regions(job: Job) -> Iterator[Region]:
    """What a job reads."""
    if isinstance(job.source, Triplet):
        yield from (job.source.packed, job.source.scale, job.source.shape)
    else:
        yield job.source
    if isinstance(job, Quantize) and job.reference is not None:
        yield from (job.reference.packed, job.reference.scale, job.reference.shape)
    elif isinstance(job, Merge):
        yield from (job.a, job.b)


def uses_int4(job: Job) -> bool:
    """Whether a weight is INT4 before or after."""
    return (
        isinstance(job.source, Triplet) or isinstance(job, Quantize) or (isinstance(job, Merge) and job.int4)
    )


def copy_unit(reader: CheckpointReader, name: str, rows: int | None = None) -> Unit:
    """A plain tensor as it is, or its first rows."""
    info = reader.info(name)
    shape = info.shape if rows is None else (min(rows, info.shape[0]), *info.shape[1:])
    spec = TensorSpec(name, info.dtype, shape)
    return Unit(Copy(name, region_of(reader, info)._replace(nbytes=spec.nbytes)), (spec,))


def dequantize_unit(reader: CheckpointReader, name: str) -> Unit:
    """An INT4 weight as a plain matrix in the dtype of its scale."""
    source = triplet_of(reader, name)
    spec = TensorSpec(name, source.scale_dtype, (source.rows, source.columns))
    return Unit(Dequantize(name, source), (spec,))


def copy_int4_unit(reader: CheckpointReader, name: str) -> Unit:
    """An INT4 weight as it is."""
    infos = [reader.info(part) for part in part_names(name)]
    specs = tuple(TensorSpec(info.name, info.dtype, info.shape) for info in infos)
    return Unit(CopyInt4(name, triplet_of(reader, name)), specs)


def quantize_unit(
    reader: CheckpointReader, name: str, scheme: Int4Scheme, other: CheckpointReader | None
) -> Unit:
    """A plain matrix in INT4, with the bits of `other` where the values are its."""
    info = reader.info(name)
    check_quantizable(info, scheme)
    rows, columns = info.shape
    reference = None if other is None else _reference(other, name, info)
    shape_dtype = reference.shape_dtype if reference else torch.int32
    specs = int4_specs(name, (rows, columns), info.dtype, shape_dtype, scheme)
    job = Quantize(name, region_of(reader, info), rows, columns, info.dtype, shape_dtype, reference)
    return Unit(job, specs)


def check_quantizable(info: TensorInfo, scheme: Int4Scheme) -> None:
    """Raises CheckpointError for a tensor that cannot become INT4."""
    if len(info.shape) != 2 or info.shape[1] % scheme.group_size or not info.nbytes:
        raise CheckpointError(
            f"{info.name} is {list(info.shape)}, which is no matrix with rows in groups of "
            f"{scheme.group_size}."
        )
    if info.dtype not in SCALE_DTYPES:
        raise CheckpointError(f"{info.name} is {info.dtype}: only bfloat16, float16 and float32 become INT4.")


def int4_specs(
    name: str, shape: tuple[int, int], dtype: torch.dtype, shape_dtype: torch.dtype, scheme: Int4Scheme
) -> tuple[TensorSpec, ...]:
    """The three tensors of an INT4 weight."""
    packed, scale, stated = part_names(name)
    rows, columns = shape
    return (
        TensorSpec(packed, torch.int32, (rows, columns // CODES_PER_WORD)),
        TensorSpec(scale, dtype, (rows, columns // scheme.group_size)),
        TensorSpec(stated, shape_dtype, (2,)),
    )


def triplet_of(reader: CheckpointReader, name: str) -> Triplet:
    """Where the three tensors of an INT4 weight lie."""
    packed, scale, stated = (reader.info(part) for part in part_names(name))
    rows, columns = packed.shape[0], packed.shape[1] * CODES_PER_WORD
    return Triplet(
        region_of(reader, packed),
        region_of(reader, scale),
        region_of(reader, stated),
        rows,
        columns,
        columns // scale.shape[1],
        scale.dtype,
        stated.dtype,
    )


def region_of(reader: CheckpointReader, info: TensorInfo) -> Region:
    """Where a tensor lies; the reader's path is absolute."""
    return Region(f"{reader.path}/{info.filename}", info.offset, info.nbytes)


def _reference(other: CheckpointReader, name: str, info: TensorInfo) -> Triplet:
    if not other.is_triplet(name):
        raise CheckpointError(f"{name} in {other.path} is plain: the reference must have it in INT4.")
    triplet = triplet_of(other, name)
    if (triplet.rows, triplet.columns, triplet.scale_dtype) != (*info.shape, info.dtype):
        raise CheckpointError(
            f"{name} is {info.dtype} {list(info.shape)}, but {triplet.scale_dtype} "
            f"{[triplet.rows, triplet.columns]} in the reference {other.path}: give the checkpoint that "
            "training started from."
        )
    return triplet
