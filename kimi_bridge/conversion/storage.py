"""Reading and writing of a worker: past the page cache where that can be, into memory that is used again.

New memory is dear, whether it is the process's own or the page cache's: on a virtual machine its first use
can cost more than the arithmetic. Shards are larger than any cache, and nobody reads them right away.
"""

from __future__ import annotations

import errno
import os
import threading
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
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

_LOCAL = threading.local()


def buffer(key: str, nbytes: int, offset: int = 0) -> Tensor:
    """uint8 `[nbytes]`, the same memory at every call of a thread with the same key.

    Its address is a multiple of 4096 plus what `offset` is, so that it can be written there directly.
    """
    needed = nbytes + 2 * _ALIGNMENT
    buffers = _LOCAL.__dict__
    held = buffers.get(key)
    if held is None or held.numel() < needed:
        held = buffers[key] = torch.empty(needed, dtype=torch.uint8)
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

    def read(self, region: Region, into: Tensor | str) -> Tensor:
        """uint8: the bytes of a region, in the memory given, or in the buffer of a name."""
        data = buffer(into, region.nbytes) if isinstance(into, str) else into
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
    """The shard that is written to: whole blocks directly, what is left at both ends as usual.

    One write at a time goes on in a thread, while the next block is made.
    """

    def __init__(self, path: str, stack: ExitStack) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY)
        stack.callback(os.close, self._descriptor)
        self._direct = _open_directly(path)
        if self._direct is not None:
            stack.callback(os.close, self._direct)
        self._writer = stack.enter_context(ThreadPoolExecutor(1))
        self._slot = 0
        self._pending: Future[None] | None = None
        self._pending_slot = -1
        stack.callback(self._settle)

    def room(self, nbytes: int, offset: int) -> Tensor:
        """uint8 `[nbytes]` for what will be written at `offset` next: one of two buffers by turns."""
        self._slot = 1 - self._slot
        if self._pending_slot == self._slot:
            self.wait()
        return buffer(f"room {self._slot}", nbytes, offset)

    def write(self, tensor: Tensor, offset: int) -> None:
        """Begins to write the bytes of a contiguous tensor, which nobody may change until the next `room`."""
        slot = self._slot
        self.wait()
        self._pending, self._pending_slot = self._writer.submit(self._write, tensor, offset), slot

    def wait(self) -> None:
        """Until all is written. Raises CheckpointError when it could not be."""
        if self._pending is not None:
            pending, self._pending, self._pending_slot = self._pending, None, -1
            pending.result()

    def _settle(self) -> None:
        """Before the file is closed; after an error, a second one does not matter."""
        if self._pending is not None:
            futures.wait([self._pending])

    def _write(self, tensor: Tensor, offset: int) -> None:
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
