"""One rank's part of a batch: ids, targets, positions, and the image features that belong into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from kimi_bridge.errors import KimiBridgeError

from .exchange import check_attention, group_rank, group_size
from .segments import cumulative_lengths, segment_starts

IGNORED = -100


@dataclass(frozen=True)
class SequenceShard:
    """This rank's part of a batch; `part` is the padded length over the number of ranks.

    `targets` are the tokens to predict, shifted already: position t's is the batch's label of t + 1.
    """

    input_ids: Tensor  # int64 [batch, part]
    position_ids: Tensor  # int64 [batch, part], places in the whole sequence
    targets: Tensor | None  # int64 [batch, part], IGNORED where there is none
    weights: Tensor | None  # float32 [batch, part], the loss mask of each target
    cu_seqlens: Tensor  # int32 [sequences + 1], of the whole flattened padded batch
    max_length: int  # of its longest sequence
    length: int  # of the whole sequence before padding
    group: dist.ProcessGroup | None
    image_mask: Tensor  # bool [batch, part], the image placeholders
    image_rows: Tensor  # int64 [placeholders here], which of the batch's image features they stand for
    image_row_count: int  # placeholders in the whole batch

    def attention_kwargs(self) -> dict[str, Any]:
        """What the model's forward needs beside ids or embeddings, under transformers' names.

        Raises KimiBridgeError unless `transformers_ulysses.apply` shards attention over this shard's group:
        the model would take its part for the whole sequence.
        """
        check_attention(self.group)
        return {
            "position_ids": self.position_ids,
            "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens,
            "max_length_q": self.max_length,
            "max_length_k": self.max_length,
        }


def shard_batch(
    input_ids: Tensor,
    labels: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    loss_mask: Tensor | None = None,
    image_token_id: int | None = None,
    pad_token_id: int = 0,
) -> SequenceShard:
    """Cuts a batch that every rank of the group holds: rank r gets the r-th of equal parts of every row.

    All tensors are [batch, sequence]. `labels` are transformers' (a token's label stands at the token, -100
    is ignored), `loss_mask` weighs them; both are shifted before cutting, so that a part's last token keeps
    its target. `position_ids` that restart mark packed sequences, whose last tokens predict nothing;
    `attention_mask` (0 is padding) may pad on either side. Rows are padded to a multiple of the group's size
    with a sequence of its own that the loss ignores. Raises KimiBridgeError for tensors of another shape or
    of fractions, and for a batch without tokens.
    """
    if input_ids.ndim != 2 or not input_ids.numel():
        raise KimiBridgeError(
            f"input_ids is {tuple(input_ids.shape)}: give [batch, sequence] of one token at least."
        )
    named = {"labels": labels, "position_ids": position_ids}
    named |= {"attention_mask": attention_mask, "loss_mask": loss_mask}
    for name, tensor in named.items():
        if tensor is not None and tensor.shape != input_ids.shape:
            raise KimiBridgeError(
                f"{name} is {tuple(tensor.shape)}, input_ids {tuple(input_ids.shape)}: "
                "give all of the batch in one [batch, sequence] shape."
            )
    for name, tensor in {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}.items():
        if tensor is not None and tensor.dtype not in (torch.int32, torch.int64):
            raise KimiBridgeError(f"{name} is of {tensor.dtype}: give int64.")
    size, rank = group_size(group), group_rank(group)
    length = input_ids.shape[1]
    missing = -length % size
    part = (length + missing) // size

    def cut(whole: Tensor, padding: Tensor | int | float) -> Tensor:
        if missing:
            filling = torch.as_tensor(padding, dtype=whole.dtype, device=whole.device)
            whole = torch.cat([whole, filling.expand(len(whole), missing)], dim=1)
        return whole[:, rank * part : (rank + 1) * part].contiguous()

    positions = _positions(input_ids, attention_mask) if position_ids is None else position_ids
    starts = segment_starts(positions, attention_mask)
    targets, weights = _targets(labels, loss_mask, attention_mask, starts)

    padding_starts = starts.new_zeros(len(starts), missing)
    padding_starts[:, :1] = True
    cu_seqlens = cumulative_lengths(torch.cat([starts, padding_starts], dim=1))

    images = torch.zeros_like(starts) if image_token_id is None else input_ids == image_token_id
    rows = images.flatten().cumsum(0).view_as(images) - 1
    image_mask = cut(images, False)
    return SequenceShard(
        input_ids=cut(input_ids, pad_token_id),
        position_ids=cut(positions, torch.arange(missing, device=positions.device)),
        targets=None if targets is None else cut(targets, IGNORED),
        weights=None if weights is None else cut(weights, 0.0),
        cu_seqlens=cu_seqlens,
        max_length=int(cu_seqlens.diff().max()),
        length=length,
        group=group,
        image_mask=image_mask,
        image_rows=cut(rows, 0)[image_mask],
        image_row_count=int(images.sum()),
    )


def embed(
    shard: SequenceShard, embedding: Callable[[Tensor], Tensor], features: Tensor | None = None
) -> Tensor:
    """Embeddings of this rank's tokens, image features in the place of their placeholders.

    `features` is [rows, hidden] in the order of the batch's placeholders: of the whole batch, or only those
    that `shard.image_rows` names (so that a rank need not compute the others). Returns [batch, part, hidden];
    gradients reach the features used here and no embedding of a placeholder. An image may lie across ranks:
    each takes its own rows. Raises KimiBridgeError if the number of features is neither, or their width
    another than the embeddings'.
    """
    # A placeholder's id may lie outside the vocabulary.
    embedded = embedding(shard.input_ids.masked_fill(shard.image_mask, 0))
    if features is None and shard.image_row_count == 0:
        return embedded
    count = 0 if features is None else len(features)
    if features is None or count not in (shard.image_row_count, len(shard.image_rows)):
        raise KimiBridgeError(
            f"{count} image features for {shard.image_row_count} placeholders in the batch "
            f"({len(shard.image_rows)} in this shard): give the features of the whole batch, or those of "
            "shard.image_rows."
        )
    if features.ndim != 2 or features.shape[1] != embedded.shape[-1]:
        raise KimiBridgeError(
            f"Image features of shape {tuple(features.shape)}, embeddings of width {embedded.shape[-1]}: "
            "give [rows, hidden] as they leave the projector."
        )
    if count == shard.image_row_count:
        features = features[shard.image_rows]
    # Also where this shard has no placeholder: every rank's backward pass then has the same shape.
    return embedded.masked_scatter(shard.image_mask.unsqueeze(-1), features.to(embedded.dtype))


def _positions(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    if attention_mask is None:
        return torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids).contiguous()
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)


def _targets(
    labels: Tensor | None, loss_mask: Tensor | None, attention_mask: Tensor | None, starts: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Labels and loss mask, moved to the token that predicts them."""
    if labels is None:
        return None, None
    weights = torch.ones(labels.shape, device=labels.device) if loss_mask is None else loss_mask.float()
    if attention_mask is not None:
        labels = labels.masked_fill(attention_mask == 0, IGNORED)
    labels = labels.long().masked_fill(starts, IGNORED)
    targets = functional.pad(labels[:, 1:], [0, 1], value=IGNORED)
    weights = functional.pad(weights[:, 1:], [0, 1])
    return targets, weights * (targets != IGNORED)
