"""Reading and writing of a worker: past the page cache where that can be, into memory that is used again.

New memory is dear, whether it is the process's own or the page cache's: on a virtual machine its first use
can cost more than the arithmetic. Shards are larger than any cache, and nobody reads them right away.
"""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from kimi_bridge.conversion.jobs import Region
from kimi_bridge.errors import CheckpointError

RESUME = "run the same command again to go on, finished shards are kept"

# What direct writes need of offsets, lengths and addresses.
_ALIGNMENT = 4096
_O_DIRECT = getattr(os, "O_DIRECT", 0)

_BUFFERS: dict[str, Tensor] = {}


def buffer(key: str, nbytes: int, offset: int = 0) -> Tensor:
    """uint8 `[nbytes]`, the same memory at every call with the same key.

    Its address is a multiple of 4096 plus what `offset` is, so that it can be written there directly.
    """
    needed = nbytes + 2 * _ALIGNMENT
    held = _BUFFERS.get(key)
    if held is None or held.numel() < needed:
        held = _BUFFERS[key] = torch.empty(needed, dtype=torch.uint8)
    start = -held.data_ptr() % _ALIGNMENT + offset % _ALIGNMENT
    return held[start : start + nbytes]


def plain(error: OSError, path: str | Path) -> str:
    """One sentence for an error of the operating system."""
    return f"{error.filename or path}: {error.strerror or error}; make room, or check the disk, and {RESUME}."


class Files:
    """Source files, each opened once a piece. Nothing is mapped: mapped files count as memory."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._descriptors: dict[str, int] = {}

    def read(self, region: Region, key: str, offset: int = 0) -> Tensor:
        """uint8: the bytes of a region, in the buffer `key`, aligned to be written at `offset`."""
        data = buffer(key, region.nbytes, offset)
        view, place = memoryview(data.numpy()), region.offset
        try:
            while view:
                count = os.preadv(self._descriptor(region.path), [view], place)
                if not count:
                    raise CheckpointError(
                        f"{region.path} is truncated: it ends at {place:,} bytes, amid a tensor; "
                        f"download it again, and {RESUME}."
                    )
                view, place = view[count:], place + count
        except OSError as error:
            raise CheckpointError(
                f"{region.path} cannot be read ({error.strerror}): check the disk, and {RESUME}."
            ) from error
        return data

    def _descriptor(self, path: str) -> int:
        descriptor = self._descriptors.get(path)
        if descriptor is None:
            descriptor = self._descriptors[path] = os.open(path, os.O_RDONLY)
            self._stack.callback(os.close, descriptor)
        return descriptor


class Target:
    """The shard that is written to: whole blocks directly, what is left at both ends as usual."""

    def __init__(self, path: str, stack: ExitStack) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY)
        stack.callback(os.close, self._descriptor)
        self._direct = _open_directly(path)
        if self._direct is not None:
            stack.callback(os.close, self._direct)

    def write(self, tensor: Tensor, offset: int) -> None:
        """Writes the bytes of a contiguous tensor; at once, if it lies in a buffer for this offset."""
        data = tensor.reshape(-1).view(torch.uint8)
        begin = min(-offset % _ALIGNMENT, data.numel())
        end = begin + (data.numel() - begin) // _ALIGNMENT * _ALIGNMENT
        try:
            if self._direct is None or begin == end:
                _write(self._descriptor, data, offset)
                return
            _write(self._descriptor, data[:begin], offset)
            self._write_directly(data[begin:end], offset + begin)
            _write(self._descriptor, data[end:], offset + end)
        except OSError as error:
            raise CheckpointError(plain(error, self._path)) from error

    def _write_directly(self, data: Tensor, offset: int) -> None:
        assert self._direct is not None
        if data.data_ptr() % _ALIGNMENT:
            data = buffer("aligned", data.numel()).copy_(data)
        try:
            _write(self._direct, data, offset)
        except OSError as error:
            # A disk may ask for more than 4096; a full one, which answers otherwise, is none of our business.
            if error.errno != errno.EINVAL:
                raise
            self._direct = None
            _write(self._descriptor, data, offset)


def _open_directly(path: str) -> int | None:
    """None where the file system cannot do it."""
    if not _O_DIRECT:
        return None
    try:
        return os.open(path, os.O_WRONLY | _O_DIRECT)
    except OSError:
        return None


def _write(descriptor: int, data: Tensor, offset: int) -> None:
    view = memoryview(data.numpy())
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
