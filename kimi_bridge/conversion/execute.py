"""A piece of a conversion, executed: blocks of rows read, converted, checked and written."""

from __future__ import annotations

import os
import traceback
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from kimi_bridge.conversion.blocks import (
    BLOCK_BYTES,
    check_scales,
    check_shape,
    int4_block,
    read_int4,
    row_blocks,
    rows_of,
    write_int4,
)
from kimi_bridge.conversion.fixed_point import count_loose_groups
from kimi_bridge.conversion.jobs import (
    Copy,
    CopyInt4,
    Dequantize,
    Findings,
    Job,
    Merge,
    Piece,
    Quantize,
    Region,
    Reply,
    Triplet,
)
from kimi_bridge.conversion.merge import merge
from kimi_bridge.conversion.storage import Files, Target, plain
from kimi_bridge.errors import CheckpointError, KimiBridgeError
from kimi_bridge.int4 import Int4Scheme, Int4Weight, dequantize, quantize, requantize


def answer(piece: Piece) -> Reply:
    """Executes a piece; whatever goes wrong is in the reply."""
    try:
        with torch.no_grad():
            return Reply(piece.shard, piece.nbytes, _execute(piece))
    except KimiBridgeError as error:
        return Reply(piece.shard, error=str(error))
    except OSError as error:
        return Reply(piece.shard, error=plain(error, piece.path))
    except Exception:
        return Reply(piece.shard, error=f"A worker failed at {piece.shard}.", bug=traceback.format_exc())


def create(path: str | Path, header: bytes, size: int) -> None:
    """Makes a shard with its header and holes for data, in place of one of an earlier run."""
    Path(path).unlink(missing_ok=True)
    with Path(path).open("xb") as file:
        file.write(header)
        file.truncate(size)


def seal(path: str | Path, final: str | Path) -> None:
    """Waits until a shard is on the disk, and gives it its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    Path(path).replace(final)


def _execute(piece: Piece) -> Findings:
    if piece.header is None:
        return _write_jobs(piece, piece.path)
    # Ray may start a task again while a node that it believes dead still works on it.
    path = f"{piece.path}.{uuid.uuid4().hex}"
    try:
        create(path, piece.header, piece.size)
        findings = _write_jobs(piece, path)
        seal(path, piece.final)
    finally:
        Path(path).unlink(missing_ok=True)
    return findings


def _write_jobs(piece: Piece, path: str) -> Findings:
    findings = Findings()
    with ExitStack() as stack:
        files = Files(stack)
        target = Target(path, stack)
        for job, offsets in piece.jobs:
            _write_job(job, files, target, offsets, piece.scheme, piece.verify, findings)
        target.wait()
    return findings


def _write_job(
    job: Job,
    files: Files,
    target: Target,
    offsets: tuple[int, ...],
    scheme: Int4Scheme,
    verify: bool,
    findings: Findings,
) -> None:
    if isinstance(job, Copy):
        _copy(job.source, files, target, offsets[0])
        return
    loose = groups = 0
    if isinstance(job, Merge):
        blocks = merge(job, files, target, offsets, scheme, findings if verify else None)
    else:
        blocks = _blocks(job, files, target, offsets, scheme)
    for block in blocks:
        check_scales(job.name, block)
        if verify:
            loose += count_loose_groups(block, scheme)
            groups += block.scale.numel()
    if groups:
        findings.add_weight(job.name, loose, groups)


def _copy(source: Region, files: Files, target: Target, offset: int) -> None:
    for done in range(0, source.nbytes, BLOCK_BYTES):
        part = Region(source.path, source.offset + done, min(BLOCK_BYTES, source.nbytes - done))
        target.write(files.read(part, target.room(part.nbytes, offset + done)), offset + done)


def _blocks(
    job: CopyInt4 | Dequantize | Quantize,
    files: Files,
    target: Target,
    offsets: tuple[int, ...],
    scheme: Int4Scheme,
) -> Iterator[Int4Weight]:
    """Writes a weight, and yields its blocks of rows in INT4: those read, or those written."""
    if isinstance(job, Quantize):
        yield from _quantize(job, files, target, offsets, scheme)
        return
    source = job.source
    check_shape(job.name, source, files)
    values = source.scale_dtype.itemsize * source.columns
    for start, stop in row_blocks(source.rows, values):
        if isinstance(job, CopyInt4):
            block = _copy_int4(source, files, target, offsets, start, stop)
        else:
            block = read_int4(source, files, start, stop)
            offset = offsets[0] + start * values
            out = target.room((stop - start) * values, offset).view(source.scale_dtype)
            target.write(dequantize(block, source.scale_dtype, out=out.view(block.shape)), offset)
        yield block
    if isinstance(job, CopyInt4):
        _copy(source.shape, files, target, offsets[2])


def _copy_int4(
    source: Triplet, files: Files, target: Target, offsets: tuple[int, ...], start: int, stop: int
) -> Int4Weight:
    parts = []
    for whole, place in ((source.packed, offsets[0]), (source.scale, offsets[1])):
        part = rows_of(whole, source.rows, start, stop)
        place += part.offset - whole.offset
        parts.append(files.read(part, target.room(part.nbytes, place)))
        target.write(parts[-1], place)
    return int4_block(source, parts[0], parts[1])


def _quantize(
    job: Quantize, files: Files, target: Target, offsets: tuple[int, ...], scheme: Int4Scheme
) -> Iterator[Int4Weight]:
    row_bytes = job.columns * job.dtype.itemsize
    if job.reference is not None:
        check_shape(f"{job.name} of the reference", job.reference, files)
    target.write(torch.tensor([job.rows, job.columns], dtype=job.shape_dtype), offsets[2])
    for start, stop in row_blocks(job.rows, row_bytes):
        part = Region(job.source.path, job.source.offset + start * row_bytes, (stop - start) * row_bytes)
        weight = files.read(part, "values").view(job.dtype).view(stop - start, job.columns)
        try:
            if job.reference is None:
                block = quantize(weight, scheme)
            else:
                block = requantize(weight, read_int4(job.reference, files, start, stop), scheme)
        except KimiBridgeError as error:
            raise CheckpointError(f"{job.name}, rows {start} to {stop - 1}: {error}") from error
        write_int4(block, target, offsets, start)
        yield block
