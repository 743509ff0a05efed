"""Errors that all ranks share, and the one exchange that weights take between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from kimi_bridge.errors import KimiBridgeError


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def raise_together() -> Iterator[None]:
    """An error on one rank inside the block is raised on all of them at its end, instead of a hang.

    The block itself must hold no collective. All ranks must enter it.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    share_error(error)


def share_error(error: Exception | None) -> None:
    """Raises on every rank if any rank passes an error: its own where there is one, else the first.

    One collective. All ranks must call it.
    """
    if world_size() == 1:
        if error is not None:
            raise error
        return
    reports: list[tuple[type[KimiBridgeError], str] | None] = [None] * world_size()
    dist.all_gather_object(reports, None if error is None else (_kind(error), str(error)))
    if error is None:
        place, report = next(((i, r) for i, r in enumerate(reports) if r is not None), (0, None))
        if report is None:
            return
        kind, message = report
        error = kind(f"{message} (on rank {place})")
    if isinstance(error, KimiBridgeError):
        error.shared = True
    raise error


def on_every_rank(error: KimiBridgeError) -> KimiBridgeError:
    """Marks an error that all ranks raise by themselves, from what all of them know: one prints it."""
    error.shared = True
    return error


def any_failed(failed: bool) -> bool:
    """Whether any rank says so. One small collective, for loops that go on together."""
    if world_size() == 1:
        return failed
    flag = torch.tensor([int(failed)], dtype=torch.int32, device=device())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def sum_over_ranks(counts: list[int]) -> list[int]:
    """Elementwise, over all ranks. All ranks must call it."""
    if world_size() == 1:
        return counts
    totals = torch.tensor(counts, dtype=torch.int64, device=device())
    dist.all_reduce(totals)
    return [int(total) for total in totals]


def device() -> torch.device:
    """Where tensors must be for the default process group."""
    on_gpu = torch.cuda.is_available() and dist.is_initialized() and dist.get_backend() != "gloo"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _kind(error: Exception) -> type[KimiBridgeError]:
    return type(error) if isinstance(error, KimiBridgeError) else KimiBridgeError
