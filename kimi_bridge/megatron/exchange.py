"""One exchange of many tensors between ranks: a bucket of bytes at a time, however many tensors it holds.

Each rank's tensors form one stream of bytes. In every step each rank sends the next stretch of its stream,
all of the same length, so the number of collectives is (bytes / bucket), and no rank waits for a turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from kimi_bridge.errors import KimiBridgeError
from kimi_bridge.megatron.collective import any_failed, device, rank, share_error, world_size


@dataclass(frozen=True)
class Piece:
    """What one rank sends of one tensor: the part `index` of `count` along `dim`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    dim: int | None
    index: int
    count: int

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def exchange(
    pieces: list[Piece], tensors: Iterable[torch.Tensor], bucket_bytes: int, receiver: int | None
) -> Generator[tuple[str, torch.Tensor]]:
    """Sends this rank's tensors and yields the assembled ones. All ranks must run it to its end.

    Args:
        pieces: what this rank will send, in the order of `tensors`.
        tensors: the parts themselves, made as they are needed. An error in making one is raised on all
            ranks, as is one in the code that consumes this generator (through `close`).
        bucket_bytes: how much a receiving rank holds of all ranks' streams at a time.
        receiver: the rank that gets the tensors; None for all.

    Yields:
        Name and whole tensor, on the device of the process group, in order of completion.
    """
    if world_size() == 1:
        yield from zip((piece.name for piece in pieces), tensors, strict=True)
        return
    plans: list[list[Piece]] = [[] for _ in range(world_size())]
    dist.all_gather_object(plans, pieces)
    stretch = max(16, bucket_bytes // world_size())
    longest = max(sum(piece.nbytes for piece in plan) for plan in plans)
    stretch = min(stretch, longest)
    receives = receiver is None or receiver == rank()
    sender = _Sender(iter(tensors), stretch)
    assembly = _Assembly(plans) if receives else None
    for _ in range(-(-longest // stretch) if stretch else 0):
        error = sender.fill()
        if any_failed(error is not None):
            share_error(error)
        parts = _collect(sender.buffer, receiver, receives)
        if assembly is not None:
            try:
                yield from assembly.take(parts)
            except GeneratorExit:
                _tell_others_of_the_end()
                raise
    if any_failed(False):
        share_error(None)


def _tell_others_of_the_end() -> None:
    """The consumer of this rank has given up: the others learn it where they next ask `any_failed`."""
    any_failed(True)
    with contextlib.suppress(KimiBridgeError):
        share_error(KimiBridgeError("the export was stopped; the message of the rank that stopped says why"))


def _collect(buffer: torch.Tensor, receiver: int | None, receives: bool) -> list[torch.Tensor]:
    if receiver is None:
        parts = list(buffer.new_empty((world_size(), len(buffer))))
        dist.all_gather(parts, buffer)
        return parts
    parts = list(buffer.new_empty((world_size(), len(buffer)))) if receives else []
    dist.gather(buffer, parts if receives else None, dst=receiver)
    return parts


class _Sender:
    """Cuts this rank's stream of tensors into stretches of equal length."""

    def __init__(self, tensors: Iterator[torch.Tensor], stretch: int):
        self.tensors = tensors
        self.buffer = torch.empty(stretch, dtype=torch.uint8, device=device())
        self.rest: torch.Tensor = self.buffer[:0]

    def fill(self) -> Exception | None:
        """Puts the next stretch into `buffer`; an error in making a tensor is returned, not raised."""
        filled = 0
        try:
            while filled < len(self.buffer):
                if not len(self.rest):
                    tensor = next(self.tensors, None)
                    if tensor is None:
                        break
                    self.rest = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                count = min(len(self.rest), len(self.buffer) - filled)
                self.buffer[filled : filled + count].copy_(self.rest[:count])
                self.rest = self.rest[count:]
                filled += count
        except Exception as error:
            return error
        return None


class _Assembly:
    """Puts the stretches of all ranks' streams together again."""

    def __init__(self, plans: list[list[Piece]]):
        self.streams = [_Stream(plan) for plan in plans]
        self.waiting: dict[str, dict[int, torch.Tensor]] = {}

    def take(self, parts: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for stream, part in zip(self.streams, parts, strict=True):
            for piece, tensor in stream.take(part):
                if piece.count == 1:
                    yield piece.name, tensor
                    continue
                arrived = self.waiting.setdefault(piece.name, {})
                arrived[piece.index] = tensor
                if len(arrived) == piece.count:
                    del self.waiting[piece.name]
                    yield piece.name, torch.cat([arrived[i] for i in range(piece.count)], dim=piece.dim or 0)


class _Stream:
    """The receiving end of one rank's stream."""

    def __init__(self, plan: list[Piece]):
        self.plan = iter(plan)
        self.piece: Piece | None = None
        self.tensor: Any = None
        self.filled = 0

    def take(self, part: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
        while len(part):
            if self.piece is None:
                self.piece = next(self.plan, None)
                if self.piece is None:
                    return
                self.tensor = torch.empty(self.piece.nbytes, dtype=torch.uint8, device=part.device)
                self.filled = 0
            count = min(len(part), self.piece.nbytes - self.filled)
            self.tensor[self.filled : self.filled + count].copy_(part[:count])
            part, self.filled = part[count:], self.filled + count
            if self.filled == self.piece.nbytes:
                yield self.piece, self.tensor.view(self.piece.dtype).view(self.piece.shape)
                self.piece = None
