"""What engine and trainer say about a batch of sequences. Imports neither Megatron nor vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sampled:
    """What an engine sampled after `[n, p]` prompts.

    `tokens` and `log_probabilities` are `[n, t]`, the most likely tokens and theirs `[n, t, k]`, `experts`
    `[n, p + t - 1, MoE layers, top-k]` for every token but the last, or None.
    """

    prompts: torch.Tensor
    tokens: torch.Tensor
    log_probabilities: torch.Tensor
    top_ids: torch.Tensor
    top_log_probabilities: torch.Tensor
    experts: torch.Tensor | None

    @property
    def sequences(self) -> torch.Tensor:
        """`[n, p + t]`"""
        return torch.cat([self.prompts, self.tokens], 1)

    def to(self, device: Any) -> Sampled:
        moved = {key: None if value is None else value.to(device) for key, value in vars(self).items()}
        return Sampled(**moved)


@dataclass(frozen=True)
class Scores:
    """A trainer's view of `[n, s]` sequences: what it predicts at every token but the last.

    `log_probabilities` `[n, s - 1, vocabulary]`, float32; `experts` `[n, s - 1, MoE layers, top-k]`.
    """

    log_probabilities: torch.Tensor
    experts: torch.Tensor | None
