"""The INT4 arithmetic in plain PyTorch, for any device, in blocks of rows that stay in the cache.

Callers (`codec`) have checked shapes and dtypes and hand in the outputs. A back end for one device is a
module with these six functions.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kimi_bridge.int4.scheme import CODES_PER_WORD, Int4Scheme

# Adding 2^mantissa_bits rounds a float half to even to an integer and leaves that integer in the low
# bits. With 8 more, the low byte is the nibble `code + 8`. PyTorch adds 16-bit floats in float32, where
# the sum is exact or far from a tie, so that rounding it to 16 bits cannot go wrong.
_NIBBLE_OFFSET = {torch.bfloat16: 2.0**7 + 8, torch.float16: 2.0**10 + 8, torch.float32: 2.0**23 + 8}
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_BLOCK_ELEMENTS = {"cpu": 2**19}
_BLOCK_ELEMENTS_ELSEWHERE = 2**27


def pack(codes: Tensor, packed: Tensor) -> None:
    """Write int8 codes `[out, in]` of -8..7 into int32 `[out, in/8]`."""
    for rows in _row_blocks(codes):
        _pack_nibbles((codes[rows] + 8).view(torch.uint8), packed[rows])


def unpack(packed: Tensor, codes: Tensor) -> None:
    """Write the codes in int32 `[out, in/8]` into int8 `[out, in]`."""
    for rows in _row_blocks(codes):
        codes[rows] = _codes(packed[rows])


def dequantize(packed: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write `code * scale` into `out` `[out, in]`."""
    # PyTorch multiplies 16-bit floats in float32 and rounds once, so the native product is the one asked
    # for where the dtypes agree.
    dtype = out.dtype if out.dtype == scale.dtype else torch.float32
    for rows in _row_blocks(out):
        _multiply(_codes(packed[rows]).to(dtype), scale[rows].to(dtype), out[rows])


def quantize(weight: Tensor, scheme: Int4Scheme, packed: Tensor, scale: Tensor) -> None:
    """Write codes and scales of `weight`; a group with NaN or Inf gets a scale of NaN or Inf."""
    scratch = _scratch(weight)
    for rows in _row_blocks(weight):
        biased = _biased_codes(weight[rows], scheme, scale[rows], scratch)
        _pack_nibbles(biased.view(_BITS[weight.dtype]).to(torch.uint8), packed[rows])


def requantize(
    weight: Tensor,
    reference_packed: Tensor,
    reference_scale: Tensor,
    scheme: Int4Scheme,
    packed: Tensor,
    scale: Tensor,
) -> None:
    """Write the reference's codes and scale for groups equal to it, those of `quantize` for the others."""
    scratch = _scratch(weight)
    for rows in _row_blocks(weight):
        packed[rows], scale[rows] = reference_packed[rows], reference_scale[rows]
        difference = _codes(reference_packed[rows]).to(weight.dtype)
        _multiply(difference, reference_scale[rows], difference)
        # Zero for equal numbers alone: denormals are not flushed, and Inf - Inf is NaN.
        torch.sub(weight[rows], difference, out=difference)
        kept = _group_amax(difference, scheme.group_size, scratch) == 0
        if kept.all():
            continue
        fresh_packed, fresh_scale = torch.empty_like(packed[rows]), torch.empty_like(scale[rows])
        quantize(weight[rows], scheme, fresh_packed, fresh_scale)
        kept_words = kept.repeat_interleave(scheme.group_size // CODES_PER_WORD, dim=1)
        packed[rows] = packed[rows].where(kept_words, fresh_packed)
        scale[rows] = scale[rows].where(kept, fresh_scale)


def fake_quantize(weight: Tensor, scheme: Int4Scheme, scale: Tensor, out: Tensor) -> None:
    """Write `scale` as `quantize` does, and the values of `dequantize(quantize(weight))` into `out`."""
    scratch = _scratch(weight)
    for rows in _row_blocks(weight):
        codes = _biased_codes(weight[rows], scheme, scale[rows], scratch).sub_(_NIBBLE_OFFSET[weight.dtype])
        _multiply(codes, scale[rows], out[rows])


def _row_blocks(matrix: Tensor) -> Iterator[slice]:
    rows, step = matrix.shape[0], _block_rows(matrix)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _scratch(matrix: Tensor) -> Tensor:
    """Room for one block: with new memory in each, half of the time would go into page faults."""
    return matrix.new_empty(_block_rows(matrix), matrix.shape[1])


def _block_rows(matrix: Tensor) -> int:
    elements = _BLOCK_ELEMENTS.get(matrix.device.type, _BLOCK_ELEMENTS_ELSEWHERE)
    return min(matrix.shape[0], max(1, elements // matrix.shape[1]))


def _codes(packed: Tensor) -> Tensor:
    """int8 `[out, in]` from int32 `[out, in/8]`."""
    # The two nibbles of a byte, one to each byte of an int16.
    pairs = packed.contiguous().view(torch.uint8).to(torch.int16)
    return pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F).view(torch.int8).sub_(8)


def _multiply(codes: Tensor, scale: Tensor, out: Tensor) -> None:
    groups = (scale.shape[1], codes.shape[1] // scale.shape[1])
    torch.mul(codes.unflatten(1, groups), scale.unsqueeze(-1), out=out.unflatten(1, groups))


def _biased_codes(weight: Tensor, scheme: Int4Scheme, scale: Tensor, scratch: Tensor) -> Tensor:
    """Write the scales, and return `code + _NIBBLE_OFFSET` in weight's dtype, in `scratch`."""
    amax = _group_amax(weight, scheme.group_size, scratch)
    # A tensor on the device: CUDA would multiply by the reciprocal of a Python number, another rounding.
    divisor = torch.full((), scheme.scale_divisor, dtype=torch.float32, device=weight.device)
    scale.copy_(amax.float() / divisor)
    # Where the scale is zero, every weight is a few denormal steps, and dividing by 1 rounds it to code 0.
    safe = scale.masked_fill(scale == 0, 1.0)
    codes = scratch[: weight.shape[0]]
    quotient = codes.unflatten(1, (-1, scheme.group_size))
    torch.div(weight.unflatten(1, (-1, scheme.group_size)), safe.unsqueeze(-1), out=quotient)
    return codes.clamp_(scheme.q_min, scheme.q_max).add_(_NIBBLE_OFFSET[weight.dtype])


def _group_amax(weight: Tensor, group_size: int, scratch: Tensor) -> Tensor:
    """Largest magnitude per group, exact: `[out, in/group_size]`. NaN wins over Inf, Inf over numbers."""
    # Magnitudes are ordered as their bit patterns are, and integers reduce four times faster.
    bits = weight.view(_BITS[weight.dtype])
    magnitude = scratch[: weight.shape[0]].view(bits.dtype)
    torch.bitwise_and(bits, torch.iinfo(bits.dtype).max, out=magnitude)
    return magnitude.unflatten(1, (-1, group_size)).amax(-1).view(weight.dtype)


def _pack_nibbles(nibbles: Tensor, packed: Tensor) -> None:
    """Write bytes 0..15 `[out, in]` into int32 `[out, in/8]`, lowest nibble first."""
    pairs = nibbles.contiguous().view(torch.int16)
    packed.copy_((pairs | (pairs >> 4)).to(torch.uint8).view(torch.int32))
