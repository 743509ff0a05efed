"""Where sequences begin and end in a packed or padded batch."""

from __future__ import annotations

import torch
from torch import Tensor


def segment_starts(position_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """True at the first token of every sequence of every row, and of every run of padding.

    A sequence begins where a position is not its left neighbour's plus one (as in transformers'
    find_packed_sequence_indices). position_ids and attention_mask (0 is padding) are [rows, length].
    """
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    restarts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if attention_mask is not None:
        real = attention_mask.bool()
        # Padding is one run, whatever positions it was given.
        restarts = (real[:, 1:] != real[:, :-1]) | (restarts & real[:, 1:])
    starts[:, 1:] = restarts
    return starts


def cumulative_lengths(starts: Tensor) -> Tensor:
    """Offsets of the sequences in the flattened batch, and its length: int32, as flash attention has it."""
    offsets = starts.flatten().nonzero().flatten()
    return torch.cat([offsets, offsets.new_tensor([starts.numel()])]).int()
