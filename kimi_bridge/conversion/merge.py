"""An adapter merged into a weight, block by block of rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kimi_bridge.conversion.blocks import check_scales, check_shape, read_int4, rows_of, write_int4
from kimi_bridge.conversion.fixed_point import count_changed_groups
from kimi_bridge.conversion.jobs import Findings, Merge, Merged, Region, Triplet
from kimi_bridge.conversion.storage import Files, Target, buffer
from kimi_bridge.errors import CheckpointError, KimiBridgeError
from kimi_bridge.int4 import Int4Scheme, Int4Weight, dequantize, quantize, requantize

# Part of the definition of a merge, see `exact_rows`: not to be tuned to a machine.
ROWS = 128

_UNIT = 2.0**256


def merge(
    job: Merge,
    files: Files,
    target: Target,
    offsets: tuple[int, ...],
    scheme: Int4Scheme,
    findings: Findings | None,
) -> Iterator[Int4Weight]:
    """Writes a merged weight, and yields its blocks in INT4: those written, or else those read.

    Memory holds A and, of everything else, ROWS rows. Raises CheckpointError for NaN and Inf.
    """
    a = _values(files.read(job.a, "lora a"), job.lora_dtype, job.rank, job.columns).float()
    sums = Merged(weights=1)
    if isinstance(job.source, Triplet):
        check_shape(job.name, job.source, files)
    if job.shape_dtype is not None:
        target.write(torch.tensor([job.rows, job.columns], dtype=job.shape_dtype), offsets[2])
    for start in range(0, job.rows, ROWS):
        stop = min(start + ROWS, job.rows)
        b = files.read(rows_of(job.b, job.rows, start, stop), "lora b")
        base, before = _base(job, files, start, stop)
        exact = exact_rows(base, a, _values(b, job.lora_dtype, stop - start, job.rank).float(), job.scale)
        after = None
        try:
            if job.int4:
                after = _quantized(exact.to(job.dtype), before, scheme)
                write_int4(after, target, offsets, start)
            else:
                merged = _write_plain(job, exact, target, offsets[0], start)
        except KimiBridgeError as error:
            raise CheckpointError(
                f"{job.name}, merged, rows {start} to {stop - 1}: {error} The base is damaged, or the update"
                f" too large for {job.dtype}."
            ) from error
        if findings is not None:
            if after is not None:
                merged = dequantize(after, job.dtype)
                changed = count_changed_groups(after, before or quantize(base, scheme))
                sums = sums.plus(Merged(groups=after.scale.numel(), changed=changed))
            sums = sums.plus(_distances(exact, merged, base))
        if (block := after or before) is not None:
            yield block
    if findings is not None:
        findings.add_merged(job.kind, sums)


def exact_rows(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """float32 `[rows, columns]`: `float32(base) + scale * (B A)` for at most ROWS rows.

    base: `[rows, columns]`; a, b: float32. Each of the three operations (torch.mm, times scale, plus base)
    is rounded to float32. torch.mm may add up the products of a row in an order that depends on how many
    rows it is given: so that is part of the definition, and workers and pieces do not change the result.
    """
    rows, columns = base.shape
    delta = torch.mm(b, a, out=_scratch("delta", rows, columns)).mul_(scale)
    return _scratch("exact", rows, columns).copy_(base).add_(delta)


def _base(job: Merge, files: Files, start: int, stop: int) -> tuple[Tensor, Int4Weight | None]:
    """Rows of the weight without the adapter, and their codes where it is INT4."""
    rows = stop - start
    if isinstance(job.source, Region):
        values = files.read(rows_of(job.source, job.rows, start, stop), "values")
        return _values(values, job.dtype, rows, job.columns), None
    block = read_int4(job.source, files, start, stop)
    check_scales(job.name, block)
    out = _values(buffer("values", rows * job.columns * job.dtype.itemsize), job.dtype, rows, job.columns)
    return dequantize(block, job.dtype, out=out), block


def _quantized(merged: Tensor, before: Int4Weight | None, scheme: Int4Scheme) -> Int4Weight:
    return quantize(merged, scheme) if before is None else requantize(merged, before, scheme)


def _write_plain(job: Merge, exact: Tensor, target: Target, offset: int, start: int) -> Tensor:
    offset += start * job.columns * job.dtype.itemsize
    room = target.room(exact.numel() * job.dtype.itemsize, offset)
    merged = _values(room, job.dtype, *exact.shape).copy_(exact)
    if not merged.isfinite().all():
        raise CheckpointError("The weight holds NaN or Inf.")
    target.write(merged, offset)
    return merged


def _distances(exact: Tensor, merged: Tensor, base: Tensor) -> Merged:
    difference = _scratch("delta", *exact.shape)
    noise = _energy(difference.copy_(merged).sub_(exact))
    update = _energy(difference.copy_(base).sub_(exact))
    return Merged(signal=_energy(exact), noise=noise, update=update)


def _energy(values: Tensor) -> int:
    """The sum of squares, in units of 2^-256."""
    # Row by row: PyTorch would cut a single sum into as many parts as it has threads.
    norms = torch.linalg.vector_norm(values, dim=1, dtype=torch.float64)
    return int(float(norms.square_().sum()) * _UNIT)


def _values(data: Tensor, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    return data.view(dtype).view(rows, columns)


def _scratch(key: str, rows: int, columns: int) -> Tensor:
    return _values(buffer(key, rows * columns * 4), torch.float32, rows, columns)
