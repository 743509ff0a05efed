"""Blocks of rows, read from and written to where a weight lies."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kimi_bridge.conversion.jobs import Region, Triplet
from kimi_bridge.conversion.storage import RESUME, Files, Target
from kimi_bridge.errors import CheckpointError
from kimi_bridge.int4 import Int4Weight
from kimi_bridge.int4.scheme import CODES_PER_WORD

# Of output, at a time. Memory that stays in use is cheap; fresh memory is not. Threads that take turns with
# Python's lock after every operation want large ones.
BLOCK_BYTES = 1 << 24


def check_shape(name: str, triplet: Triplet, files: Files) -> None:
    """Raises CheckpointError for a weight_shape that disagrees with the codes."""
    stated = files.read(triplet.shape, "shape").view(triplet.shape_dtype).tolist()
    if stated != [triplet.rows, triplet.columns]:
        raise CheckpointError(
            f"{name}: weight_shape holds {stated}, but the packed codes are of shape "
            f"{[triplet.rows, triplet.columns]}; the file is damaged: download it again, and {RESUME}."
        )


def check_scales(name: str, block: Int4Weight) -> None:
    """Raises CheckpointError for NaN and Inf."""
    # One pass; a sum that overflows is looked at again.
    if not math.isfinite(float(block.scale.sum(dtype=torch.float32))) and not block.scale.isfinite().all():
        raise CheckpointError(
            f"{name}: its scales hold NaN or Inf: download the damaged file again, and {RESUME}."
        )


def read_int4(triplet: Triplet, files: Files, start: int, stop: int) -> Int4Weight:
    """Rows of an INT4 weight, in buffers that the next call uses again."""
    packed = files.read(rows_of(triplet.packed, triplet.rows, start, stop), "packed")
    return int4_block(triplet, packed, files.read(rows_of(triplet.scale, triplet.rows, start, stop), "scale"))


def int4_block(triplet: Triplet, packed: Tensor, scale: Tensor) -> Int4Weight:
    """A block of rows, from its bytes."""
    words = packed.view(torch.int32).view(-1, triplet.columns // CODES_PER_WORD)
    rows = words.shape[0]
    return Int4Weight(words, scale.view(triplet.scale_dtype).view(rows, -1), (rows, triplet.columns))


def write_int4(block: Int4Weight, target: Target, offsets: tuple[int, ...], start: int) -> None:
    """Rows of an INT4 weight from `start` on."""
    for tensor, offset in ((block.packed, offsets[0]), (block.scale, offsets[1])):
        target.write(tensor, offset + start * tensor.shape[1] * tensor.itemsize)


def rows_of(region: Region, rows: int, start: int, stop: int) -> Region:
    """Rows of a region that holds so many of one size."""
    row_bytes = region.nbytes // rows
    return Region(region.path, region.offset + start * row_bytes, (stop - start) * row_bytes)


def row_blocks(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """First row and end of every block."""
    step = max(1, BLOCK_BYTES // row_bytes)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)
