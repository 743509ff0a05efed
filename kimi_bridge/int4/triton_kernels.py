"""The INT4 arithmetic on NVIDIA GPUs: one read and one write, many matrices in one launch.

Same functions and same bits as `torch_kernels`. Each rounding that the contract names stands here as an
instruction of its own: `div_rn` (a compiler's fast division differs in the last bit), a conversion to the
weight's dtype after each of the two divisions, and `rint` (half to even). Codes pass through an integer,
so that a negative zero becomes a zero, as it does in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from kimi_bridge.int4 import torch_kernels
from kimi_bridge.int4.scheme import Int4Scheme

if TYPE_CHECKING:
    from kimi_bridge.int4.codec import Int4Weight

# Codes without scales are rare (checks, tests): PyTorch's own kernels do.
pack, unpack = torch_kernels.pack, torch_kernels.unpack

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# A program's tile: 64 groups of 32, or fewer wider ones.
_TILE_ELEMENTS = 2048
_WARPS = 4


def quantize(weight: Tensor, scheme: Int4Scheme, packed: Tensor, scale: Tensor) -> None:
    """As `torch_kernels.quantize`."""
    weight = weight.contiguous()
    tile, grid = _tiling(scheme.group_size, scale.numel())
    _quantize_kernel[grid](
        weight, packed, scale, scale.numel(), scheme.scale_divisor, scheme.q_min,
        scheme.group_size, tile, _DTYPES[weight.dtype], num_warps=_WARPS,
    )  # fmt: skip


def dequantize(packed: Tensor, scale: Tensor, out: Tensor) -> None:
    """As `torch_kernels.dequantize`."""
    packed, scale = packed.contiguous(), scale.contiguous()
    target = out if out.is_contiguous() else out.new_empty(out.shape)
    group_size = out.shape[1] // scale.shape[1]
    tile, grid = _tiling(group_size, scale.numel())
    _dequantize_kernel[grid](
        packed, scale, target, scale.numel(), group_size, tile, _DTYPES[out.dtype], num_warps=_WARPS
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
        scheme.scale_divisor, scheme.q_min, scheme.group_size, tile, _DTYPES[weight.dtype], num_warps=_WARPS,
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
        scheme.group_size, tile, _DTYPES[out.dtype], num_warps=_WARPS,
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
        scheme.group_size, tile, _DTYPES[out.dtype], scale is not None, num_warps=_WARPS,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _pointers(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Addresses on the GPU. Parameters stay where they are, so each layer's list is copied once."""
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def _tiling(group_size: int, groups: int, matrices: int = 1) -> tuple[int, tuple[int, int]]:
    """Groups of a program's tile, and the grid over the groups of each matrix."""
    tile = max(1, _TILE_ELEMENTS // group_size)
    return tile, (triton.cdiv(groups, tile), matrices)


@triton.jit
def _tile_of(groups, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Indices of this program's groups, offsets of their weights, and which of them exist."""
    group = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    offsets = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return group, offsets, group < groups


@triton.jit
def _codes_and_scale(weight, divisor, q_min, DTYPE: tl.constexpr):
    """float32 weights `[TILE, GROUP]` -> int32 codes, and scales `[TILE]` in the weight's dtype."""
    # Magnitudes are ordered as their bits are, and as integers NaN is the largest of all.
    bits = weight.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(bits, axis=1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.full(amax.shape, divisor, tl.float32)).to(DTYPE)
    wide = scale.to(tl.float32)
    # Where the scale is zero, every weight is a few denormal steps, and dividing by 1 rounds it to code 0.
    safe = tl.where(wide == 0.0, 1.0, wide)
    quotient = tl.div_rn(weight, tl.broadcast_to(safe[:, None], weight.shape)).to(DTYPE).to(tl.float32)
    # q_min and 7 are integers: clamping before rounding gives what clamping after it gives.
    clamped = tl.minimum(tl.maximum(quotient, q_min), 7.0)
    return libdevice.rint(clamped).to(tl.int32), scale


@triton.jit
def _values(codes, scale, DTYPE: tl.constexpr):
    """The product in float32, rounded to DTYPE."""
    return (codes.to(tl.float32) * scale.to(tl.float32)[:, None]).to(DTYPE)


@triton.jit
def _changed(weight, old):
    """Which groups differ from the reference's values; Inf counts as changed, to be reported."""
    return tl.max(((weight - old) != 0.0).to(tl.int32), axis=1) != 0


@triton.jit
def _packed(codes, GROUP: tl.constexpr, TILE: tl.constexpr):
    """int32 codes `[TILE, GROUP]` -> words `[TILE, GROUP / 8]`, lowest nibble first."""
    nibbles = tl.reshape((codes + 8) & 15, (TILE, GROUP // 8, 8))
    return tl.sum(nibbles << (tl.arange(0, 8) * 4)[None, None, :], axis=2)


@triton.jit
def _unpacked(words, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Words `[TILE, GROUP / 8]` -> int32 codes `[TILE, GROUP]`."""
    nibbles = (words[:, :, None] >> (tl.arange(0, 8) * 4)[None, None, :]) & 15
    return tl.reshape(nibbles - 8, (TILE, GROUP))


@triton.jit
def _word_offsets(group, GROUP: tl.constexpr):
    return group[:, None] * (GROUP // 8) + tl.arange(0, GROUP // 8)[None, :]


@triton.jit
def _fake_quantize_kernel(
    weights, out, scales, groups, divisor, q_min,
    GROUP: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr, STORE_SCALE: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1).to(tl.int64)
    source = tl.load(weights + matrix).to(tl.pointer_type(DTYPE))
    group, offsets, exists = _tile_of(groups, GROUP, TILE)
    weight = tl.load(source + offsets, exists[:, None], other=0.0).to(tl.float32)
    codes, scale = _codes_and_scale(weight, divisor, q_min, DTYPE)
    tl.store(out + matrix * groups * GROUP + offsets, _values(codes, scale, DTYPE), exists[:, None])
    if STORE_SCALE:
        tl.store(scales + matrix * groups + group, scale, exists)


@triton.jit
def _quantize_kernel(
    weights, packed, scales, groups, divisor, q_min,
    GROUP: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    group, offsets, exists = _tile_of(groups, GROUP, TILE)
    weight = tl.load(weights + offsets, exists[:, None], other=0.0).to(tl.float32)
    codes, scale = _codes_and_scale(weight, divisor, q_min, DTYPE)
    tl.store(packed + _word_offsets(group, GROUP), _packed(codes, GROUP, TILE), exists[:, None])
    tl.store(scales + group, scale, exists)


@triton.jit
def _dequantize_kernel(
    packed, scales, out, groups, GROUP: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr
):
    group, offsets, exists = _tile_of(groups, GROUP, TILE)
    words = tl.load(packed + _word_offsets(group, GROUP), exists[:, None], other=0)
    scale = tl.load(scales + group, exists, other=0.0)
    tl.store(out + offsets, _values(_unpacked(words, GROUP, TILE), scale, DTYPE), exists[:, None])


@triton.jit
def _requantize_kernel(
    weights, reference_packed, reference_scales, packed, scales, groups, divisor, q_min,
    GROUP: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    group, offsets, exists = _tile_of(groups, GROUP, TILE)
    weight = tl.load(weights + offsets, exists[:, None], other=0.0).to(tl.float32)
    word_offsets = _word_offsets(group, GROUP)
    words = tl.load(reference_packed + word_offsets, exists[:, None], other=0)
    old_scale = tl.load(reference_scales + group, exists, other=0.0)
    old = _values(_unpacked(words, GROUP, TILE), old_scale, DTYPE).to(tl.float32)
    changed = _changed(weight, old)
    codes, scale = _codes_and_scale(weight, divisor, q_min, DTYPE)
    fresh = _packed(codes, GROUP, TILE)
    tl.store(packed + word_offsets, tl.where(changed[:, None], fresh, words), exists[:, None])
    tl.store(scales + group, tl.where(changed, scale, old_scale), exists)


@triton.jit
def _served_values_kernel(
    weights, reference_packed, reference_scales, out, groups, divisor, q_min,
    GROUP: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1).to(tl.int64)
    weight_at = tl.load(weights + matrix).to(tl.pointer_type(DTYPE))
    packed_at = tl.load(reference_packed + matrix).to(tl.pointer_type(tl.int32))
    scales_at = tl.load(reference_scales + matrix).to(tl.pointer_type(DTYPE))
    group, offsets, exists = _tile_of(groups, GROUP, TILE)
    weight = tl.load(weight_at + offsets, exists[:, None], other=0.0).to(tl.float32)
    words = tl.load(packed_at + _word_offsets(group, GROUP), exists[:, None], other=0)
    old_scale = tl.load(scales_at + group, exists, other=0.0)
    old = _values(_unpacked(words, GROUP, TILE), old_scale, DTYPE)
    changed = _changed(weight, old.to(tl.float32))
    codes, scale = _codes_and_scale(weight, divisor, q_min, DTYPE)
    values = tl.where(changed[:, None], _values(codes, scale, DTYPE), old)
    tl.store(out + matrix * groups * GROUP + offsets, values, exists[:, None])
