"""Ulysses sequence parallelism in transformers' attention, for FSDP trainers with long sequences.

Every implementation of transformers' attention interface (sdpa, flash attention, kernels) is wrapped under
its own name: a causal model that gets a part of the sequence attends over all of it, whichever class it is.
What is not causal (vision towers, encoders) is left alone. The overrides are this process's entries in
`ALL_ATTENTION_FUNCTIONS` and `ALL_MASK_ATTENTION_FUNCTIONS`, on top of transformers' own, so `undo()` only
has to take them away. Masks are not made at all: `kimi_bridge.sequence_parallel.attention` says how.

Models whose code comes with the checkpoint do not use the interface. Given such a `model`, `apply` replaces
the forward of its attention class if that is DeepSeek-V3's in all its parts, and raises if not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kimi_bridge.errors import KimiBridgeError
from kimi_bridge.sequence_parallel.attention import ulysses_attention
from kimi_bridge.sequence_parallel.exchange import group_size, set_attention_ranks
from kimi_bridge.sequence_parallel.remote import remote_attention_classes, sharded_forward

# Eager attention lives in each modeling file, and flex attention needs a mask of the whole sequence.
_UNSHARDED = ("eager", "flex_attention")


@dataclass
class _Applied:
    group: dist.ProcessGroup | None
    attention: set[str] = field(default_factory=set)
    masks: set[str] = field(default_factory=set)
    forwards: dict[type, Callable[..., Any]] = field(default_factory=dict)


_applied: _Applied | None = None


def apply(process_group: dist.ProcessGroup | None, model: nn.Module | None = None) -> str:
    """Shards attention over the ranks of `process_group` (None: all). Returns what it did, in one sentence.

    Each rank then gives the model its part of the batch (`kimi_bridge.sequence_parallel.shard_batch`). A
    group of one rank changes nothing. Calling it again is the same as calling it once; with another group,
    that one holds from then on. Raises KimiBridgeError for a `model` whose own attention does not fit.
    """
    global _applied
    size = group_size(process_group)
    if size == 1:
        undo()
        return "One rank holds the whole sequence: transformers is left as it is."
    classes = [] if model is None else remote_attention_classes(model)
    again = _applied is not None and _applied.group is process_group
    if _applied is None:
        _applied = _Applied(process_group)
    _applied.group = process_group
    set_attention_ranks(process_group, active=True)
    for name in ALL_ATTENTION_FUNCTIONS.valid_keys():
        _override_attention(_applied, name)
    for name in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
        _override_mask(_applied, name)
    new = [cls for cls in classes if cls not in _applied.forwards]
    for cls in new:
        _applied.forwards[cls] = cls.forward  # type: ignore[attr-defined]
        cls.forward = sharded_forward(cls, _attention_of)  # type: ignore[attr-defined]
    if again and not new:
        return f"Attention is sharded over {size} ranks since an earlier call."
    names = "".join(f", and {cls.__name__}" for cls in new)
    return f"transformers' attention interface is sharded over {size} ranks now{names}."


def undo() -> str:
    """Takes everything away that `apply` put into transformers. Returns what it did, in one sentence."""
    global _applied
    if _applied is None:
        return "Attention was not sharded."
    for name in _applied.attention:
        del ALL_ATTENTION_FUNCTIONS[name]
    for name in _applied.masks:
        del ALL_MASK_ATTENTION_FUNCTIONS[name]
    for cls, forward in _applied.forwards.items():
        cls.forward = forward  # type: ignore[attr-defined]
    _applied = None
    set_attention_ranks(None, active=False)
    return "transformers' attention is as it was."


def _override_attention(applied: _Applied, name: str) -> None:
    # Paged attention serves generation, from a cache.
    if name in (*applied.attention, *_UNSHARDED) or name.startswith("paged|"):
        return
    inner = ALL_ATTENTION_FUNCTIONS[name]

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        causal = kwargs.get("is_causal")
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            return inner(module, query, key, value, attention_mask, **kwargs)
        output = ulysses_attention(
            inner,
            module,
            query,
            key,
            value,
            attention_mask,
            group=applied.group,
            varlen="flash" in name,
            **kwargs,
        )
        return output, None

    ALL_ATTENTION_FUNCTIONS[name] = attention
    applied.attention.add(name)


def _override_mask(applied: _Applied, name: str) -> None:
    if name in applied.masks:
        return
    inner = ALL_MASK_ATTENTION_FUNCTIONS[name]

    def mask(*args: Any, **kwargs: Any) -> Any:
        # transformers copies this entry when it loads a kernel; such a copy outlives undo().
        if _applied is None or "allow_is_bidirectional_skip" in kwargs:
            return inner(*args, **kwargs)
        if name in _UNSHARDED:
            raise KimiBridgeError(
                f"Ulysses does not shard {name} attention: model.set_attn_implementation('sdpa'), or flash."
            )
        # A kernel that was loaded after apply() has its own name.
        _override_attention(_applied, kwargs["config"]._attn_implementation)
        if kwargs.get("local_size") is not None or _looks_ahead(**kwargs):
            raise KimiBridgeError(
                "Ulysses shards plain causal attention: sliding windows, chunks and blocks that see ahead "
                "are not covered, load the model with full attention."
            )
        return kwargs.get("attention_mask")

    ALL_MASK_ATTENTION_FUNCTIONS[name] = mask
    applied.masks.add(name)


def _looks_ahead(
    mask_function: Callable[..., Tensor],
    batch_size: int,
    q_length: int,
    device: Any = "cpu",
    use_vmap: bool = False,
    **_: Any,
) -> bool:
    """Whether any token sees the next one. A function that a model composed itself is taken to do so."""
    if use_vmap:
        return True
    batch = torch.arange(batch_size, device=device)[:, None]
    tokens = torch.arange(q_length - 1, device=device)[None]
    return bool(mask_function(batch, torch.zeros_like(batch), tokens, tokens + 1).any())


def _attention_of(module: nn.Module) -> Callable[..., Any]:
    """What a class of remote code attends with: flash attention where it did, else sdpa."""
    name = module.config._attn_implementation  # type: ignore[union-attr]
    return ALL_ATTENTION_FUNCTIONS["sdpa" if name in (None, "eager") else name]
