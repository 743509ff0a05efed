"""How far a trainer's log-probabilities are from those that an engine sampled with.

All in float64. KL means KL(engine || trainer), in nats, since the engine drew the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.gpu.check.trainer_types import Sampled, Scores


def k3(engine: torch.Tensor, trainer: torch.Tensor) -> torch.Tensor:
    """`r - 1 - log r` with `r = exp(trainer - engine)`, for each token.

    Its mean over tokens that the engine sampled is an unbiased estimate of the KL, never negative.
    Source: J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html,
    estimator k3 with x ~ q = engine, p = trainer.

    Args:
        engine, trainer: log-probabilities of the sampled tokens, of any same shape.
    """
    log_ratio = trainer.double() - engine.double()
    return log_ratio.expm1() - log_ratio


def top_k_kl(engine: torch.Tensor, trainer: torch.Tensor) -> torch.Tensor:
    """The exact KL over k tokens and one bucket for all others, for each position.

    Joining the others in a bucket can only lower the KL (the log-sum inequality), so it is a lower bound of
    the full one, without sampling noise.

    Args:
        engine, trainer: `[..., k]`, log-probabilities of the same k tokens, normalised over the vocabulary.

    Returns:
        `[...]`
    """
    p, q = engine.double(), trainer.double()
    inside = (p.exp() * (p - q)).sum(-1)
    rest_p, rest_q = (_rest(log) for log in (p, q))
    return inside + rest_p * (rest_p.log() - rest_q.log())


def _rest(log_probabilities: torch.Tensor) -> torch.Tensor:
    # Engines give float32, whose sum over a peaked distribution may pass 1 by its rounding.
    return (1 - log_probabilities.exp().sum(-1)).clamp_min(1e-9)


def entropy(log_probabilities: torch.Tensor) -> torch.Tensor:
    """`[..., vocabulary]` -> `[...]`, in nats."""
    return torch.special.entr(log_probabilities.double().exp()).sum(-1)


@dataclass(frozen=True)
class Mismatch:
    """Means over all sampled tokens of a batch; KL in nats.

    `flips` is the share of (token, MoE layer) pairs whose top-k experts differ as sets, `flipped_tokens` the
    share of sampled tokens where any layer's differ while the token is predicted, `clean` the k3 KL without
    those, `clean_context` without tokens that have a flip anywhere before them. None where the engine does
    not tell its experts.
    """

    k3: float
    top_k: float
    largest: float
    entropy: float
    tokens: int
    flips: float | None = None
    flipped_tokens: float | None = None
    clean: float | None = None
    clean_context: float | None = None


def mismatch(sampled: Sampled, scores: Scores) -> Mismatch:
    """The engine's sampled continuations against the trainer's scores of prompt and continuation."""
    length = sampled.tokens.shape[1]
    # Position i of the scores predicts token i + 1.
    predicted = scores.log_probabilities[:, -length:]
    of_tokens = predicted.gather(-1, sampled.tokens[..., None]).squeeze(-1)
    per_token = k3(sampled.log_probabilities, of_tokens)
    per_position = top_k_kl(sampled.top_log_probabilities, predicted.gather(-1, sampled.top_ids))
    found = {
        "k3": per_token.mean().item(),
        "top_k": per_position.mean().item(),
        "largest": per_token.max().item(),
        "entropy": entropy(predicted).mean().item(),
        "tokens": per_token.numel(),
    }
    if sampled.experts is None or scores.experts is None:
        return Mismatch(**found)
    differ = (sampled.experts.sort(-1).values != scores.experts.sort(-1).values).any(-1)
    flipped = differ.any(-1)
    at_token = flipped[:, -length:]
    before = flipped.cumsum(1)[:, -length:] > 0
    return Mismatch(
        **found,
        flips=differ.double().mean().item(),
        flipped_tokens=at_token.double().mean().item(),
        clean=_mean_where(per_token, ~at_token),
        clean_context=_mean_where(per_token, ~before),
    )


def _mean_where(values: torch.Tensor, mask: torch.Tensor) -> float | None:
    return values[mask].mean().item() if mask.any() else None
