"""Attention over a sharded sequence: heads are gathered, attended over the whole sequence, and scattered.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509). Any implementation of transformers' attention
interface computes the attention itself. No mask of the whole sequence is ever made: a packed or padded
batch is attended sequence by sequence, or with flash attention's own cumulative lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kimi_bridge.errors import KimiBridgeError

from .exchange import gather_constant, group_size, heads_to_ranks, sequence_to_ranks, share_with_ranks
from .segments import cumulative_lengths, segment_starts

_STRUCTURE = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def ulysses_attention(
    inner: Callable[..., tuple[Tensor, Any]],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    group: dist.ProcessGroup | None,
    varlen: bool,
    **kwargs: Any,
) -> Tensor:
    """Causal attention over the whole sequence, for this rank's part of it.

    query [batch, heads, part, width], key and value likewise (they may have fewer heads), attention_mask
    [batch, part] or None -> [batch, part, heads, value width]. `inner` has the signature of transformers'
    attention functions; `varlen` says that it takes cumulative lengths. The boundaries of sequences come
    from `cu_seq_lens_q`, of the whole flattened batch, or else from this part's `position_ids`.
    """
    heads, size = query.shape[1], group_size(group)
    _check(module, query, key, attention_mask, size)
    lengths = _lengths(module, query, attention_mask, group, kwargs)

    value_width = value.shape[-1]
    if rotary := _shared_rotary(module, key):
        own, shared = key.split([key.shape[-1] - rotary, rotary], dim=-1)
        # The heads' copies are one tensor upstream, so the gradient of all belongs into any one of them.
        shared = share_with_ranks(shared[:, :1], group).expand(-1, heads // size, -1, -1)
        whole_key = torch.cat([heads_to_ranks(own, group), shared], dim=-1)
        value_width = module.v_head_dim
        # transformers pads MLA's values for flash attention: zeros need not travel.
        value = value[..., :value_width]
    else:
        whole_key = heads_to_ranks(_enough_heads(key, size), group)
    whole_query = heads_to_ranks(query, group)
    whole_value = heads_to_ranks(_enough_heads(value, size), group)
    if varlen and (missing := whole_key.shape[-1] - value_width) > 0:
        whole_value = nn.functional.pad(whole_value, [0, missing])

    kwargs = {name: entry for name, entry in kwargs.items() if name not in _STRUCTURE} | {"is_causal": True}
    output = _attend(inner, module, whole_query, whole_key, whole_value, lengths, varlen, kwargs)
    return sequence_to_ranks(output[..., :value_width], group)


def _check(module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None, size: int) -> None:
    heads, part = query.shape[1], query.shape[2]
    if heads % size:
        allowed = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
        raise KimiBridgeError(
            f"{type(module).__name__} has {heads} attention heads, which {size} ranks cannot share evenly: "
            f"use a sequence-parallel group of {allowed} ranks."
        )
    if key.shape[2] != part:
        raise KimiBridgeError(
            f"{type(module).__name__} got {key.shape[2]} keys for {part} queries: Ulysses shards whole "
            "sequences, not steps of a generation; call transformers_ulysses.undo() before generating."
        )
    if attention_mask is not None and attention_mask.shape != (query.shape[0], part):
        raise KimiBridgeError(
            f"An attention mask of shape {tuple(attention_mask.shape)} does not fit this rank's "
            f"{query.shape[0]} x {part} tokens: pass none, or its part of the [batch, sequence] padding mask."
        )


def _lengths(
    module: nn.Module, query: Tensor, attention_mask: Tensor | None, group: Any, kwargs: dict[str, Any]
) -> Tensor:
    """Cumulative lengths of the whole flattened batch."""
    batch, whole = query.shape[0], query.shape[2] * group_size(group)
    if (lengths := kwargs.get("cu_seq_lens_q")) is not None:
        # One sequence: its length is known without asking the device.
        longest = kwargs.get("max_length_q")
        if batch == 1 and lengths.numel() == 2 and longest != whole:
            _check_end(int(lengths[-1]), batch, whole)
        return lengths
    positions = kwargs.get("position_ids")
    if positions is None or positions.ndim != 2:
        raise KimiBridgeError(
            f"{type(module).__name__} hands neither cu_seq_lens_q nor [batch, sequence] position_ids to its "
            "attention: pass `**shard.attention_kwargs()` to the model, so that sequences are not mixed up."
        )
    positions = gather_constant(positions, group).expand(batch, whole)
    part = positions.unflatten(1, (-1, query.shape[2]))
    if part.equal(torch.arange(query.shape[2], device=part.device).expand_as(part)):
        raise KimiBridgeError(
            "Every rank's position_ids count from 0, as a model makes them by itself: pass "
            "`**shard.attention_kwargs()` to the model, so that parts of a sequence know their places."
        )
    if attention_mask is not None:
        attention_mask = gather_constant(attention_mask.to(torch.uint8), group)
    return cumulative_lengths(segment_starts(positions, attention_mask))


def _check_end(end: int, batch: int, whole: int) -> None:
    if end != batch * whole:
        raise KimiBridgeError(
            f"cu_seq_lens_q ends at {end}, the sharded batch has {batch} x {whole} tokens: it must describe "
            "the whole padded batch, as `shard.attention_kwargs()` does, and its group be that of `apply`."
        )


def _shared_rotary(module: nn.Module, key: Tensor) -> int:
    """Width of the rotary half of MLA's keys, which all heads share; 0 for other attention.

    The projection's width proves it: it makes the latent and one rotary head, not one a head.
    """
    projection = getattr(module, "kv_a_proj_with_mqa", None)
    rotary, rank = getattr(module, "qk_rope_head_dim", 0), getattr(module, "kv_lora_rank", 0)
    shared = rotary and getattr(projection, "out_features", None) == rank + rotary
    fits = key.shape[-1] == getattr(module, "qk_nope_head_dim", 0) + rotary
    return rotary if shared and fits and hasattr(module, "v_head_dim") else 0


def _enough_heads(states: Tensor, size: int) -> Tensor:
    """Repeats key-value heads as often as the ranks need them: 2 heads for 4 ranks become 4, 4 stay 4."""
    times = size // math.gcd(states.shape[1], size)
    return states.repeat_interleave(times, dim=1) if times > 1 else states


def _attend(
    inner: Callable[..., tuple[Tensor, Any]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    varlen: bool,
    kwargs: dict[str, Any],
) -> Tensor:
    """[batch, heads, sequence, width] three times -> [batch, sequence, heads, width]."""
    batch, _, whole, _ = query.shape
    if batch == 1 and lengths.numel() == 2:
        return inner(module, query, key, value, None, **kwargs)[0]
    bounds = lengths.tolist()
    _check_end(bounds[-1], batch, whole)
    if bounds == list(range(0, batch * whole + 1, whole)):
        return inner(module, query, key, value, None, **kwargs)[0]
    if varlen:
        longest = max(end - start for start, end in pairwise(bounds))
        flat = [states.transpose(0, 1).flatten(1, 2).unsqueeze(0) for states in (query, key, value)]
        packed = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
        packed |= {"max_length_q": longest, "max_length_k": longest}
        return inner(module, *flat, None, **kwargs, **packed)[0].unflatten(1, (batch, whole)).squeeze(0)
    outputs = []
    for start, end in pairwise(bounds):
        row, first = divmod(start, whole)
        place = (slice(row, row + 1), slice(None), slice(first, first + end - start))
        outputs.append(inner(module, query[place], key[place], value[place], None, **kwargs)[0])
    return torch.cat(outputs, dim=1).squeeze(0).unflatten(0, (batch, whole))
