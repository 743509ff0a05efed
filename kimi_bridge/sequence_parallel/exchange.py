"""The three exchanges of Ulysses attention, with exact gradients, and a count of what they send."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_bridge.errors import KimiBridgeError


@dataclass
class Traffic:
    """Bytes that left this rank."""

    forward: int = 0
    backward: int = 0


_counting: list[Traffic] = []


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Counts the bytes that this rank's attention layers send to other ranks while the context is open."""
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.remove(traffic)


def group_size(group: dist.ProcessGroup | None) -> int:
    """Ranks in the group (None: all ranks); 1 where torch.distributed was not started.

    Raises KimiBridgeError on a rank outside the group.
    """
    size = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    if size < 1:
        raise KimiBridgeError(
            f"Rank {dist.get_rank()} is not in the given process group: give each rank the "
            "sequence-parallel group that it belongs to."
        )
    return size


def group_rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if group_size(group) > 1 else 0


# The ranks over which attention shares sequences now, in their order; None: it does not.
_attention_ranks: list[int] | None = None


def set_attention_ranks(group: dist.ProcessGroup | None, active: bool) -> None:
    """Records, for `check_attention`, that attention is sharded over the group, or no longer."""
    global _attention_ranks
    _attention_ranks = dist.get_process_group_ranks(group) if active else None


def check_attention(group: dist.ProcessGroup | None) -> None:
    """Raises KimiBridgeError where a part of a sequence would be attended as if it were all of it."""
    if group_size(group) == 1:
        return
    ranks = dist.get_process_group_ranks(group)
    if _attention_ranks is None:
        raise KimiBridgeError(
            f"The batch is cut over ranks {ranks}, but attention is not sharded: call "
            "kimi_bridge.patches.transformers_ulysses.apply(group) first, in every process."
        )
    if ranks != _attention_ranks:
        raise KimiBridgeError(
            f"The batch is cut over ranks {ranks}, attention over {_attention_ranks}: give shard_batch and "
            "transformers_ulysses.apply the same process group."
        )


def heads_to_ranks(states: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[batch, heads, part of the sequence, width] -> [batch, this rank's heads, whole sequence, width]."""
    return _AllToAll.apply(states, group, 1, 2)


def sequence_to_ranks(states: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[batch, whole sequence, this rank's heads, width] -> [batch, part of the sequence, heads, width]."""
    return _AllToAll.apply(states, group, 1, 2)


def share_with_ranks(states: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[batch, 1, part of the sequence, width] -> [batch, 1, whole sequence, width], the same on every rank.

    The gradient of a part is the sum of what all ranks have for it.
    """
    return _AllGather.apply(states, group, 2)


def gather_constant(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[rows, part of the sequence] -> [rows, whole sequence], without gradients."""
    return _all_gather(values.t().contiguous(), group).t()


class _AllToAll(torch.autograd.Function):
    """Splits one dimension over the ranks and joins the parts along another; its gradient is the reverse."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: Any, split: int, join: int) -> Tensor:
        ctx.group, ctx.split, ctx.join = group, split, join
        return _all_to_all(states, group, split, join, "forward")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grads[0], ctx.group, ctx.join, ctx.split, "backward"), None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, group: Any, join: int) -> Tensor:
        ctx.group, ctx.join = group, join
        part = states.movedim(join, 0).contiguous()
        _count("forward", part, group_size(group) - 1)
        return _all_gather(part, group).movedim(0, join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].movedim(ctx.join, 0).contiguous()
        size = group_size(ctx.group)
        _count("backward", grad, (size - 1) / size)
        part = grad.new_empty(grad.shape[0] // size, *grad.shape[1:])
        dist.reduce_scatter_tensor(part, grad, group=ctx.group)
        return part.movedim(0, ctx.join), None, None


def _all_to_all(states: Tensor, group: Any, split: int, join: int, direction: str) -> Tensor:
    size = group_size(group)
    # The joined dimension travels in front, so that what arrives is joined already and needs no copy.
    parts = states.unflatten(split, (size, -1)).movedim((split, join + (join > split)), (0, 1)).contiguous()
    _count(direction, parts, (size - 1) / size)
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=group)
    return arrived.flatten(0, 1).movedim(0, join)


def _all_gather(part: Tensor, group: Any) -> Tensor:
    whole = part.new_empty(part.shape[0] * group_size(group), *part.shape[1:])
    dist.all_gather_into_tensor(whole, part, group=group)
    return whole


def _count(direction: str, tensor: Tensor, share: float) -> None:
    for traffic in _counting:
        sent = round(tensor.numel() * tensor.element_size() * share)
        setattr(traffic, direction, getattr(traffic, direction) + sent)
