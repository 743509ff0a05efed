"""Ulysses sequence parallelism: every rank holds a part of each sequence, attention sees all of it.

`kimi_bridge.patches.transformers_ulysses.apply(process_group)` puts it into transformers' models;
`shard_batch`, `embed`, `token_mean_loss` and `gather_sequence` are what a trainer needs around them.
Imports torch alone.
"""

from .batch import SequenceShard, embed, shard_batch
from .exchange import Traffic, count_traffic
from .reduce import gather_sequence, token_mean_loss

__all__ = [
    "SequenceShard",
    "Traffic",
    "count_traffic",
    "embed",
    "gather_sequence",
    "shard_batch",
    "token_mean_loss",
]
