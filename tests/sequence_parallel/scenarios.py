"""What the ranks run: each compares a sharded model with the same model in one process, on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kimi_bridge.patches import transformers_ulysses
from kimi_bridge.sequence_parallel import (
    SequenceShard,
    count_traffic,
    gather_sequence,
    shard_batch,
    token_mean_loss,
)
from tests.sequence_parallel import models


def parity(group: Any, model: str, kind: str, length: int, arguments: tuple = (), **changes: Any) -> dict:
    """Largest differences of logits, loss and gradients (relative) from the model in one process."""
    single = getattr(models, model)(*arguments, **changes)
    batch = models.batch(kind, length)
    logits, loss = whole(single, batch)
    expected = gradients(single, loss)

    said = transformers_ulysses.apply(group)
    sharded = getattr(models, model)(*arguments, **changes)
    shard = cut(batch, group)
    with count_traffic() as traffic:
        own = sharded(shard.input_ids, use_cache=False, **shard.attention_kwargs()).logits
        own_loss = token_mean_loss(own, shard, group, gradients="summed")
        own_gradients = gradients(sharded, own_loss)
    for gradient in own_gradients.values():
        dist.all_reduce(gradient, group=group)
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    gathered = gather_sequence(own.detach(), shard)
    return {
        "said": said,
        "logits": (gathered - logits)[real].abs().max().item(),
        "scale": logits[real].abs().max().item(),
        "loss": abs(own_loss.item() - loss.item()),
        "gradients": max(relative(own_gradients[name], expected[name]) for name in expected),
        "bits": all(torch.equal(own_gradients[name], expected[name]) for name in expected)
        and torch.equal(gathered, logits),
        "tokens": shard.input_ids.numel(),
        "traffic": (traffic.forward, traffic.backward),
    }


def half_precision(group: Any, kind: str, length: int, implementation: str, device: str) -> dict:
    """How far bfloat16 logits and gradients of one rank and of all are from one rank's in float32.

    A dense model with MLA's real head widths: with experts, near ties would send tokens elsewhere.
    """
    widths = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    }
    widths |= {"kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    # Depth and range keep the softmax far from both uniform and one-hot.
    exact = models.deepseek(None, **widths, first_k_dense_replace=2, initializer_range=0.05).to(device)
    half = models.deepseek(None, **widths, first_k_dense_replace=2, initializer_range=0.05).to(device)
    for parameter in half.parameters():
        parameter.data = parameter.data.bfloat16()
    exact.load_state_dict({name: tensor.float() for name, tensor in half.state_dict().items()})
    half.set_attn_implementation(implementation)
    batch = {name: tensor.to(device) for name, tensor in models.batch(kind, length).items()}
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()

    results = {}
    for name, model in (("exact", exact), ("alone", half)):
        logits, loss = whole(model, batch)
        results[name] = logits[real].float(), flat(gradients(model, loss))
    half.zero_grad(set_to_none=True)
    transformers_ulysses.apply(group)
    shard = cut(batch, group)
    logits = half(shard.input_ids, use_cache=False, **shard.attention_kwargs()).logits
    found = flat(gradients(half, token_mean_loss(logits, shard, group, gradients="summed")))
    dist.all_reduce(found, group=group)
    results["ulysses"] = gather_sequence(logits.detach(), shard)[real].float(), found
    expected = results.pop("exact")
    return {name: [relative(a, b) for a, b in zip(r, expected, strict=True)] for name, r in results.items()}


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten().float() for name in sorted(tensors)])


def whole(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits and transformers' own loss of the whole batch, in one process."""
    output = model(**batch, use_cache=False)
    return output.logits.detach(), output.loss


def cut(batch: dict[str, Tensor], group: Any) -> SequenceShard:
    return shard_batch(**batch, group=group)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-12)).item()
