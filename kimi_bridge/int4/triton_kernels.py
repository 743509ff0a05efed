"""The INT4 arithmetic on NVIDIA GPUs: one read and one write, many matrices in one launch.

Same functions and same bits as `torch_kernels`. Each rounding that the contract names stands here as an
instruction of its own: `div_rn` (a compiler's fast division differs in the last bit), a conversion to the
weight's dtype after each of the two divisions, and the addition of a number so large that the sum has no
room for a fraction (half to even). That sum has no negative zero, and neither have a checkpoint's codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_bridge.int4 import torch_kernels
from kimi_bridge.int4.scheme import Int4Scheme

if TYPE_CHECKING:
    from kimi_bridge.int4.codec import Int4Weight

# Codes without scales are rare (checks, tests): PyTorch's own kernels do.
pack, unpack = torch_kernels.pack, torch_kernels.unpack

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# 1.5 * 2^23 + 8: a float of this size is an integer, and its four low bits are those of the code, plus 8.
_TO_INTEGER = tl.constexpr(12582920.0)
_TO_INTEGER_HIGH_BITS = tl.constexpr(0x4B400000)
# A program's tile: 64 groups of 32, or fewer wider ones.
_TILE_ELEMENTS = 2048
# Without fusion: a compiler that fuses a product and a subtraction leaves out a rounding of the contract.
_OPTIONS = {"num_warps": 2, "enable_fp_fusion": False}


def quantize(weight: Tensor, scheme: Int4Scheme, packed: Tensor, scale: Tensor) -> None:
    """As `torch_kernels.quantize`."""
    weight = weight.contiguous()
    tile, grid = _tiling(scheme.group_size, scale.numel())
    _quantize_kernel[grid](
        weight, packed, scale, scale.numel(), scheme.scale_divisor, scheme.q_min,
        scheme.group_size, tile, _DTYPES[weight.dtype], **_OPTIONS,
    )  # fmt: skip


def dequantize(packed: Tensor, scale: Tensor, out: Tensor) -> None:
    """As `torch_kernels.dequantize`."""
    packed, scale = packed.contiguous(), scale.contiguous()
    target = out if out.is_contiguous() else out.new_empty(out.shape)
    group_size = out.shape[1] // scale.shape[1]
    tile, grid = _tiling(group_size, scale.numel())
    _dequantize_kernel[grid](
        packed, scale, target, scale.numel(), group_size, tile, _DTYPES[out.dtype], **_OPTIONS
    )
    if target is not out:
        out.copy_(target)


def requantize(
    weight: Tensor,
    reference_packed: Tensor,
    reference_scale: Tensor,
    scheme: Int4Scheme,
    packed: Tensor,
    scale: Tensor,
) -> None:
    """As `torch_kernels.requantize`."""
    weight = weight.contiguous()
    tile, grid = _tiling(scheme.group_size, scale.numel())
    _requantize_kernel[grid](
        weight, reference_packed.contiguous(), reference_scale.contiguous(), packed, scale, scale.numel(),
        scheme.scale_divisor, scheme.q_min, scheme.group_size, tile, _DTYPES[weight.dtype], **_OPTIONS,
    )  # fmt: skip


def fake_quantize(weight: Tensor, scheme: Int4Scheme, scale: Tensor, out: Tensor) -> None:
    """As `torch_kernels.fake_quantize`."""
    weight = weight.contiguous()
    target = out if out.is_contiguous() else out.new_empty(out.shape)
    _launch_fake_quantize([weight], scheme, target, scale)
    if target is not out:
        out.copy_(target)


def served_values(
    weights: Sequence[Tensor], references: Sequence[Int4Weight | None], scheme: Int4Scheme, out: Tensor
) -> None:
    """See `codec.served_values`. One launch for all, where all or none have a reference."""
    weights = [weight.contiguous() for weight in weights]
    given = [reference for reference in references if reference is not None]
    if not given:
        _launch_fake_quantize(weights, scheme, out, None)
    elif len(given) == len(weights):
        _launch_served_values(weights, given, scheme, out)
    else:
        for weight, reference, values in zip(weights, references, out, strict=True):
            served_values([weight], [reference], scheme, values)


def _launch_served_values(
    weights: Sequence[Tensor], references: Sequence[Int4Weight], scheme: Int4Scheme, out: Tensor
) -> None:
    packed = [reference.packed.contiguous() for reference in references]
    scales = [reference.scale.contiguous() for reference in references]
    groups = scales[0].numel()
    tile, grid = _tiling(scheme.group_size, groups, len(weights))
    addresses = (
        _pointers(tuple(t.data_ptr() for t in each), out.device) for each in (weights, packed, scales)
    )
    _served_values_kernel[grid](
        *addresses, out, groups, scheme.scale_divisor, scheme.q_min,
        scheme.group_size, tile, _DTYPES[out.dtype], **_OPTIONS,
    )  # fmt: skip


def _launch_fake_quantize(
    weights: Sequence[Tensor], scheme: Int4Scheme, out: Tensor, scale: Tensor | None
) -> None:
    """`out` holds the results one behind the other."""
    groups = weights[0].numel() // scheme.group_size
    tile, grid = _tiling(scheme.group_size, groups, len(weights))
    pointers = _pointers(tuple(weight.data_ptr() for weight in weights), weights[0].device)
    _fake_quantize_kernel[grid](
        pointers, out, out if scale is None else scale, groups, scheme.scale_divisor, scheme.q_min,
        scheme.group_size, tile, _DTYPES[out.dtype], scale is not None, **_OPTIONS,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _pointers(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Addresses on the GPU. Parameters stay where they are, so each layer's list is copied once."""
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def _tiling(group_size: int, groups: int, matrices: int = 1) -> tuple[int, tuple[int, int]]:
    """Groups of a program's tile, and the grid over the groups of each matrix."""
    tile = max(1, _TILE_ELEMENTS // group_size)
    return tile, (triton.cdiv(groups, tile), matrices)


# Tiles come in two forms. `[TILE, GROUP]` reads and writes weights at full bandwidth. `[TILE, GROUP / 8, 8]`
# (DIMS 3) keeps the eight codes of a word in one thread, for kernels that write words.


@triton.jit
def _groups_of(groups, TILE: tl.constexpr):
    """Indices of this program's groups, and which of them exist."""
    group = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    return group, group < groups


@triton.jit
def _weights_at(group, GROUP: tl.constexpr):
    return group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _words_at(group, GROUP: tl.constexpr):
    return group[:, None] * (GROUP // 8) + tl.arange(0, GROUP // 8)[None, :]


@triton.jit
def _spread(per_group, DIMS: tl.constexpr):
    """`[TILE]` -> a shape that broadcasts over a tile."""
    return per_group[:, None] if DIMS == 2 else per_group[:, None, None]


@triton.jit
def _largest(tile, DIMS: tl.constexpr):
    """Maximum per group, `[TILE]`."""
    return tl.max(tile if DIMS == 2 else tl.max(tile, axis=2), axis=1)


@triton.jit
def _rounded_codes_and_scale(weight, divisor, q_min, DTYPE: tl.constexpr, DIMS: tl.constexpr):
    """float32 weights of a tile -> `code + _TO_INTEGER` in float32, and scales `[TILE]` in DTYPE."""
    # Magnitudes are ordered as their bits are, and as integers NaN is the largest of all.
    bits = weight.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = _largest(bits, DIMS).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.full(amax.shape, divisor, tl.float32)).to(DTYPE)
    wide = scale.to(tl.float32)
    # Where the scale is zero, every weight is a few denormal steps, and dividing by 1 rounds it to code 0.
    safe = tl.where(wide == 0.0, 1.0, wide)
    quotient = _quotient(weight, safe, DIMS).to(DTYPE).to(tl.float32)
    # q_min and 7 are integers: clamping before rounding gives what clamping after it gives.
    return tl.minimum(tl.maximum(quotient, q_min), 7.0) + _TO_INTEGER, scale


@triton.jit
def _quotient(weight, scale, DIMS: tl.constexpr):
    """`weight / scale`, correctly rounded, wherever the quotient is not so small that its code is 0 anyway.

    One division a group instead of one a weight: with the correctly rounded reciprocal of the divisor, a
    product and two fused steps give the correctly rounded quotient (Markstein, IBM J. Res. Dev. 34, 1990),
    as long as nothing over- or underflows; powers of two keep both away from that.
    """
    factor = tl.where(
        scale < 1e-18, 1.8446744073709552e19, tl.where(scale > 1e18, 5.421010862427522e-20, 1.0)
    )
    divisor = scale * factor
    reciprocal = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
    dividend = weight * _spread(factor, DIMS)
    divisors = tl.broadcast_to(_spread(divisor, DIMS), weight.shape)
    reciprocals = tl.broadcast_to(_spread(reciprocal, DIMS), weight.shape)
    first = dividend * reciprocals
    return tl.fma(tl.fma(-first, divisors, dividend), reciprocals, first)


@triton.jit
def _values(rounded, scale, DTYPE: tl.constexpr, DIMS: tl.constexpr):
    """The product in float32, rounded to DTYPE. A code of zero is a positive zero here, whatever it was."""
    return ((rounded - _TO_INTEGER) * _spread(scale.to(tl.float32), DIMS)).to(DTYPE)


@triton.jit
def _changed(weight, old, DIMS: tl.constexpr):
    """Which groups differ from the reference's values; Inf counts as changed, to be reported."""
    return _largest(((weight - old) != 0.0).to(tl.int32), DIMS) != 0


@triton.jit
def _packed(rounded):
    """`code + _TO_INTEGER` `[TILE, GROUP / 8, 8]` -> words `[TILE, GROUP / 8]`, lowest nibble first."""
    # _TO_INTEGER leaves the code in the low bits of the float; its own bits there make it code + 8.
    nibbles = rounded.to(tl.int32, bitcast=True) & 15
    return tl.sum(nibbles << (tl.arange(0, 8) * 4)[None, None, :], axis=2)


@triton.jit
def _unpacked(words):
    """Words `[TILE, GROUP / 8]` -> `code + _TO_INTEGER` in float32 `[TILE, GROUP / 8, 8]`."""
    nibbles = (words[:, :, None] >> (tl.arange(0, 8) * 4)[None, None, :]) & 15
    return (nibbles | _TO_INTEGER_HIGH_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _fake_quantize_kernel(
    weights, out, scales, groups, divisor, q_min,
    GROUP: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr, STORE_SCALE: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1).to(tl.int64)
    source = tl.load(weights + matrix).to(tl.pointer_type(DTYPE))
    group, exists = _groups_of(groups, TILE)
    at = _weights_at(group, GROUP)
    weight = tl.load(source + at, exists[:, None], other=0.0).to(tl.float32)
    rounded, scale = _rounded_codes_and_scale(weight, divisor, q_min, DTYPE, 2)
    tl.store(out + matrix * groups * GROUP + at, _values(rounded, scale, DTYPE, 2), exists[:, None])
    if STORE_SCALE:
        tl.store(scales + matrix * groups + group, scale, exists)


@triton.jit
def _quantize_kernel(
    weights, packed, scales, groups, divisor, q_min,
    GROUP: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    group, exists = _groups_of(groups, TILE)
    words_at = _words_at(group, GROUP)
    at = words_at[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    weight = tl.load(weights + at, exists[:, None, None], other=0.0).to(tl.float32)
    rounded, scale = _rounded_codes_and_scale(weight, divisor, q_min, DTYPE, 3)
    tl.store(packed + words_at, _packed(rounded), exists[:, None])
    tl.store(scales + group, scale, exists)


@triton.jit
def _dequantize_kernel(
    packed, scales, out, groups, GROUP: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr
):
    group, exists = _groups_of(groups, TILE)
    words = tl.load(packed + _words_at(group, GROUP), exists[:, None], other=0)
    scale = tl.load(scales + group, exists, other=0.0)
    rounded = tl.reshape(_unpacked(words), (TILE, GROUP))
    tl.store(out + _weights_at(group, GROUP), _values(rounded, scale, DTYPE, 2), exists[:, None])


@triton.jit
def _requantize_kernel(
    weights, reference_packed, reference_scales, packed, scales, groups, divisor, q_min,
    GROUP: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    group, exists = _groups_of(groups, TILE)
    words_at = _words_at(group, GROUP)
    at = words_at[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    weight = tl.load(weights + at, exists[:, None, None], other=0.0).to(tl.float32)
    words = tl.load(reference_packed + words_at, exists[:, None], other=0)
    old_scale = tl.load(reference_scales + group, exists, other=0.0)
    changed = _changed(weight, _values(_unpacked(words), old_scale, DTYPE, 3).to(tl.float32), 3)
    rounded, scale = _rounded_codes_and_scale(weight, divisor, q_min, DTYPE, 3)
    tl.store(packed + words_at, tl.where(changed[:, None], _packed(rounded), words), exists[:, None])
    tl.store(scales + group, tl.where(changed, scale, old_scale), exists)


@triton.jit
def _served_values_kernel(
    weights, reference_packed, reference_scales, out, groups, divisor, q_min,
    GROUP: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1).to(tl.int64)
    weights_from = tl.load(weights + matrix).to(tl.pointer_type(DTYPE))
    packed_from = tl.load(reference_packed + matrix).to(tl.pointer_type(tl.int32))
    scales_from = tl.load(reference_scales + matrix).to(tl.pointer_type(DTYPE))
    group, exists = _groups_of(groups, TILE)
    at = _weights_at(group, GROUP)
    weight = tl.load(weights_from + at, exists[:, None], other=0.0).to(tl.float32)
    words = tl.load(packed_from + _words_at(group, GROUP), exists[:, None], other=0)
    old_scale = tl.load(scales_from + group, exists, other=0.0)
    old = _values(tl.reshape(_unpacked(words), (TILE, GROUP)), old_scale, DTYPE, 2)
    changed = _changed(weight, old.to(tl.float32), 2)
    rounded, scale = _rounded_codes_and_scale(weight, divisor, q_min, DTYPE, 2)
    values = tl.where(changed[:, None], _values(rounded, scale, DTYPE, 2), old)
    tl.store(out + matrix * groups * GROUP + at, values, exists[:, None])
