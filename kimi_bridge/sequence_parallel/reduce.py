"""From one rank's logits to the whole batch's loss or logits, with the gradients that belong to them."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from kimi_bridge.errors import KimiBridgeError

from .batch import IGNORED, SequenceShard
from .exchange import group_rank, group_size

Gradients = Literal["averaged", "summed"]


def token_mean_loss(
    logits: Tensor,
    shard: SequenceShard,
    group: dist.ProcessGroup | None = None,
    gradients: Gradients = "averaged",
) -> Tensor:
    """Cross entropy per token of the whole batch: all ranks' sum divided by all ranks' tokens (weights).

    logits [batch, part, vocabulary] of this rank's shard; float32 scalar, the same value on every rank.
    `group` are all ranks that hold tokens of this step (None: all; with data parallelism they are more than
    the sequence-parallel group). Its gradient fits how the trainer combines gradients over that group:
    "averaged" (FSDP, DDP) makes it larger by the number of ranks, "summed" does not. A batch without any
    target gives 0.
    """
    if shard.targets is None or shard.weights is None:
        raise KimiBridgeError("The shard has no targets: give `labels` to shard_batch.")
    _check_part("logits", logits, shard)
    losses = functional.cross_entropy(
        logits.flatten(0, 1).float(), shard.targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    own = (losses * shard.weights.flatten()).sum()
    sums = torch.stack([own.detach(), shard.weights.sum()])
    if group_size(group) > 1:
        dist.all_reduce(sums, group=group)
    tokens = sums[1] if sums[1] > 0 else torch.ones_like(sums[1])
    contribution = own / tokens * _factor(gradients, group)
    # The value is the batch's, the gradient this rank's share of it.
    return contribution + (sums[0] / tokens - contribution).detach()


def gather_sequence(states: Tensor, shard: SequenceShard, gradients: Gradients = "averaged") -> Tensor:
    """[batch, part, ...] of each rank -> [batch, sequence, ...] on every rank, without the padding.

    For a loss that every rank then computes alike (log-probabilities of whole sequences, for instance): the
    gradient of this rank's part is its part of the gradient, made larger by the number of ranks where the
    trainer averages gradients over them.
    """
    _check_part("states", states, shard)
    whole = _Gather.apply(states, shard.group, _factor(gradients, shard.group))
    return whole[:, : shard.length]


def _check_part(name: str, tensor: Tensor, shard: SequenceShard) -> None:
    if tensor.shape[:2] != shard.input_ids.shape:
        raise KimiBridgeError(
            f"{name} of shape {tuple(tensor.shape)} for this rank's {tuple(shard.input_ids.shape)} tokens: "
            "give [batch, part, ...], as the model makes it of the shard."
        )


def _factor(gradients: Gradients, group: dist.ProcessGroup | None) -> int:
    if gradients not in ("averaged", "summed"):
        raise KimiBridgeError(f'gradients is {gradients!r}: say "averaged" (FSDP, DDP) or "summed".')
    return group_size(group) if gradients == "averaged" else 1


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, group: Any, factor: int) -> Tensor:
        ctx.group, ctx.factor = group, factor
        if group_size(group) == 1:
            return states.clone()
        part = states.transpose(0, 1).contiguous()
        whole = part.new_empty(len(part) * group_size(group), *part.shape[1:])
        dist.all_gather_into_tensor(whole, part, group=group)
        return whole.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        part = grads[0].chunk(group_size(ctx.group), dim=1)[group_rank(ctx.group)]
        return part * ctx.factor, None, None
