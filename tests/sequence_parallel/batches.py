"""What the ranks run around the model: cutting a batch, image features, losses, gathered logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from kimi_bridge.errors import KimiBridgeError
from kimi_bridge.sequence_parallel import SequenceShard, embed, gather_sequence, shard_batch, token_mean_loss
from tests.sequence_parallel import models

IMAGE = 200  # outside the vocabulary
HIDDEN = 64


def image_batch(length: int = 45) -> dict[str, Tensor]:
    """Two rows; one image lies across every boundary of two and four ranks, the other row has a small one."""
    batch = models.batch("rows", length)
    batch["input_ids"][0, 9:40] = IMAGE
    batch["input_ids"][1, 2:5] = IMAGE
    return batch


def shards(group: Any, kind: str, length: int) -> SequenceShard:
    batch = models.batch(kind, length)
    generator = torch.Generator().manual_seed(5)
    loss_mask = torch.rand(batch["input_ids"].shape, generator=generator)
    shard = shard_batch(**batch, loss_mask=loss_mask, group=group, pad_token_id=3)
    return {name: value for name, value in vars(shard).items() if name != "group"}


def images(group: Any, needed_only: bool) -> dict[str, Any]:
    """Embeddings and gradients of the embedding and of the features, against those of one process."""
    batch = image_batch()
    generator = torch.Generator().manual_seed(6)
    table = nn.Embedding(models.VOCABULARY, HIDDEN)
    features = torch.randn(34, HIDDEN, generator=generator, requires_grad=True)
    weights = torch.randn(2, 45, HIDDEN, generator=generator)

    ids = batch["input_ids"]
    expected = table(ids.masked_fill(ids == IMAGE, 0))
    expected = expected.index_put(torch.where(ids == IMAGE), features)
    (expected * weights).sum().backward()
    wanted = [table.weight.grad.clone(), features.grad.clone()]
    table.weight.grad = features.grad = None

    shard = shard_batch(ids, group=group, image_token_id=IMAGE)
    looked_up: list[int] = []
    table.register_forward_hook(lambda _, args, out: looked_up.append(args[0].numel()))
    with LargestTensor() as largest:
        rows = features[shard.image_rows] if needed_only else features
        embedded = embed(shard, table, rows)
    own = functional.pad(weights, [0, 0, 0, -45 % dist.get_world_size(group)])
    own = own.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)]
    (embedded * own).sum().backward()
    for gradient in (table.weight.grad, features.grad):
        dist.all_reduce(gradient, group=group)
    return {
        "embedded": torch.equal(gather_sequence(embedded.detach(), shard), expected.detach()),
        "table": (table.weight.grad - wanted[0]).abs().max().item(),
        "features": (features.grad - wanted[1]).abs().max().item(),
        "looked_up": looked_up,
        "largest": largest.numel,
        "rows": shard.image_rows.tolist(),
        "straddles": bool(shard.image_mask[0, 0] or shard.image_mask[0, -1]),
    }


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest floating-point tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            self.numel = max(self.numel, result.numel())
        return result


def wrong_images(group: Any, count: int | None) -> str:
    shard = shard_batch(image_batch()["input_ids"], group=group, image_token_id=IMAGE)
    features = None if count is None else torch.zeros(count, HIDDEN)
    try:
        embed(shard, nn.Embedding(models.VOCABULARY, HIDDEN), features)
    except KimiBridgeError as error:
        return str(error)
    return "nothing was refused"


def losses(group: Any, gradients: str, masked: bool, gathered: bool) -> dict[str, float]:
    """A linear model's loss and gradient over the ranks, combined as a trainer does, against one process."""
    batch = models.batch("packed rows", 43)
    generator = torch.Generator().manual_seed(5)
    if masked:
        # All targets on the first rank: the others contribute nothing, and must not fail.
        batch["labels"][:, 8:] = -100
    loss_mask = torch.rand(batch["labels"].shape, generator=generator)
    states = torch.randn(2, 43, 16, generator=generator)
    model = nn.Linear(16, models.VOCABULARY)

    logits = model(states)[:, :-1].flatten(0, 1)
    each = functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="none")
    weights = (loss_mask[:, 1:] * (batch["labels"][:, 1:] != -100)).flatten()
    expected = (each * weights).sum() / weights.sum()
    expected.backward()
    wanted, model.weight.grad = model.weight.grad.clone(), None

    size, rank = dist.get_world_size(group), dist.get_rank(group)
    shard = shard_batch(**batch, loss_mask=loss_mask, group=group)
    own = functional.pad(states, [0, 0, 0, -43 % size]).chunk(size, 1)[rank]
    if gathered:
        # Every rank computes the loss of the whole batch from the gathered logits.
        whole = gather_sequence(model(own), shard, gradients)
        each = functional.cross_entropy(
            whole[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="none"
        )
        loss = (each * weights).sum() / weights.sum()
    else:
        loss = token_mean_loss(model(own), shard, group, gradients)
    loss.backward()
    dist.all_reduce(model.weight.grad, group=group)
    if gradients == "averaged":
        model.weight.grad /= size
    return {
        "loss": abs(loss.item() - expected.item()),
        "gradient": ((model.weight.grad - wanted).norm() / wanted.norm()).item(),
        "value": loss.item(),
    }
