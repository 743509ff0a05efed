"""Whether an INT4 weight is a fixed point: quantizing its values without it gives back its bits."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from kimi_bridge.int4 import Int4Scheme, Int4Weight, dequantize, quantize
from kimi_bridge.int4.scheme import CODES_PER_WORD

_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def count_loose_groups(weight: Int4Weight, scheme: Int4Scheme) -> int:
    """How many groups `quantize(dequantize(weight), scheme)` gives other codes or another scale.

    Computed without either. The new scale depends on the largest magnitude among a group's codes alone.
    Where it equals the old one, value / scale lies within 7 * 2^-8 of the old code and rounds to it, unless
    the scale is zero or the code is -8 where the scheme has no -8. A test holds this against the real thing
    for every 16-bit scale and every code.
    """
    if scheme.q_min > -7:
        return _count_by_quantizing(weight, scheme)
    largest = _largest_codes(weight.packed, weight.group_size)
    scale = weight.scale
    divisor = torch.full((), scheme.scale_divisor, dtype=torch.float32)
    again = ((largest.to(scale.dtype) * scale).abs().float() / divisor).to(scale.dtype)
    bits = _BITS[scale.dtype]
    tight = again.view(bits) == scale.view(bits)
    tight &= largest <= -scheme.q_min
    tight &= (scale != 0) | (largest == 0)
    return tight.numel() - int(tight.sum())


def count_changed_groups(a: Int4Weight, b: Int4Weight) -> int:
    """How many groups of two weights have other codes or another scale."""
    words = a.group_size // CODES_PER_WORD
    bits = _BITS[a.scale.dtype]
    same = a.packed.eq(b.packed).unflatten(1, (-1, words)).all(-1)
    same &= a.scale.view(bits) == b.scale.view(bits)
    return same.numel() - int(same.sum())


def _largest_codes(packed: Tensor, group_size: int) -> Tensor:
    """int8 `[out, in/group_size]`: the largest magnitude among the codes of each group."""
    pairs = packed.view(torch.uint8)
    low, high = (pairs & 15).view(torch.int8), (pairs >> 4).view(torch.int8)
    magnitude = torch.maximum(low.sub_(8).abs_(), high.sub_(8).abs_(), out=low)
    groups = magnitude.unflatten(1, (-1, group_size // 2))
    if group_size % 16 or magnitude.max() > 7:
        return groups.amax(-1)
    # Nearly every group has a 7, and whether it has one is seen in eight bytes at a time.
    words = (magnitude + 1).bitwise_and_(8).view(torch.int64).unflatten(1, (-1, group_size // 16))
    has_seven = reduce(torch.bitwise_or, words.unbind(-1)) != 0
    largest = has_seven.to(torch.int8).mul_(7)
    if not has_seven.all():
        largest[~has_seven] = groups[~has_seven].amax(-1)
    return largest


def _count_by_quantizing(weight: Int4Weight, scheme: Int4Scheme) -> int:
    return count_changed_groups(quantize(dequantize(weight, weight.scale.dtype), scheme), weight)
