"""The INT4 arithmetic in plain PyTorch, for any device: blocks of rows in buffers that stay in the cache.

Callers (`codec`) have checked shapes and dtypes and hand in the outputs. A back end for one device is a
module with these six functions.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kimi_bridge.int4.scheme import Int4Scheme

# Adding 2^mantissa_bits rounds a float half to even to an integer and leaves that integer in the low
# bits. With 8 more, the low byte is the nibble `code + 8`. The sum is exact or far from a tie in float32,
# where PyTorch adds 16-bit floats, so rounding it again to 16 bits cannot go wrong.
_NIBBLE_OFFSET = {torch.bfloat16: 2.0**7 + 8, torch.float16: 2.0**10 + 8, torch.float32: 2.0**23 + 8}
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_PAIR = {
    torch.int8: torch.int16,
    torch.bfloat16: torch.int32,
    torch.float16: torch.int32,
    torch.float32: torch.int64,
}
_BLOCK_ELEMENTS = {"cpu": 2**19}
_BLOCK_ELEMENTS_ELSEWHERE = 2**27


def pack(codes: Tensor, packed: Tensor) -> None:
    """Write int8 codes `[out, in]` of -8..7 into int32 `[out, in/8]`."""
    for rows in _row_blocks(codes):
        _pack_nibbles((codes[rows] + 8).view(torch.uint8), packed[rows])


def unpack(packed: Tensor, codes: Tensor) -> None:
    """Write the codes in int32 `[out, in/8]` into int8 `[out, in]`."""
    table = _pair_table(torch.int8, codes.device)
    for rows in _row_blocks(codes):
        codes[rows] = _look_up(packed[rows], table).view(torch.int8)


def dequantize(packed: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write `code * scale` into `out` `[out, in]`."""
    # A product of 16-bit floats is computed in float32 and rounded once, so the native product will do
    # where the dtypes agree.
    dtype = out.dtype if out.dtype == scale.dtype else torch.float32
    table = _pair_table(dtype, out.device)
    for rows in _row_blocks(out):
        codes = _look_up(packed[rows], table).view(dtype)
        _multiply(codes, scale[rows].to(dtype), out[rows])


def quantize(weight: Tensor, scheme: Int4Scheme, packed: Tensor, scale: Tensor) -> None:
    """Write codes and scales of `weight`; a group with NaN or Inf gets a scale of NaN or Inf."""
    for rows in _row_blocks(weight):
        biased = _biased_codes(weight[rows], scheme, scale[rows])
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
    table = _pair_table(weight.dtype, weight.device)
    for rows in _row_blocks(weight):
        packed[rows], scale[rows] = reference_packed[rows], reference_scale[rows]
        # Inf - Inf is NaN, so a group that is not finite never counts as kept.
        difference = _look_up(reference_packed[rows], table).view(weight.dtype)
        _multiply(difference, reference_scale[rows], difference)
        torch.sub(weight[rows], difference, out=difference)
        kept = _group_amax(difference, scheme.group_size) == 0
        if kept.all():
            continue
        fresh_packed, fresh_scale = torch.empty_like(packed[rows]), torch.empty_like(scale[rows])
        quantize(weight[rows], scheme, fresh_packed, fresh_scale)
        changed = ~kept
        torch.where(changed, fresh_scale, scale[rows], out=scale[rows])
        changed_words = changed.repeat_interleave(scheme.group_size // 8, dim=1)
        torch.where(changed_words, fresh_packed, packed[rows], out=packed[rows])


def fake_quantize(weight: Tensor, scheme: Int4Scheme, scale: Tensor, out: Tensor) -> None:
    """Write `scale` as `quantize` does and the values of `dequantize(quantize(weight))` into `out`."""
    for rows in _row_blocks(weight):
        codes = _biased_codes(weight[rows], scheme, scale[rows])
        codes.sub_(_NIBBLE_OFFSET[weight.dtype])
        _multiply(codes, scale[rows], out[rows])


def _row_blocks(matrix: Tensor) -> Iterator[slice]:
    rows, columns = matrix.shape
    step = max(1, _BLOCK_ELEMENTS.get(matrix.device.type, _BLOCK_ELEMENTS_ELSEWHERE) // columns)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _pair_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The two codes in each of the 256 bytes, as one integer as wide as two `dtype`s."""
    byte = torch.arange(256, device=device)
    codes = torch.stack(((byte & 15) - 8, (byte >> 4) - 8), dim=1)
    return codes.to(dtype).view(_PAIR[dtype]).flatten()


def _look_up(packed: Tensor, table: Tensor) -> Tensor:
    """Pairs `[out, in/2]` for the bytes of int32 `[out, in/8]`."""
    index = packed.contiguous().view(torch.uint8).to(torch.int32)
    return table.index_select(0, index.view(-1)).view(index.shape)


def _multiply(codes: Tensor, scale: Tensor, out: Tensor) -> None:
    groups = (scale.shape[1], codes.shape[1] // scale.shape[1])
    torch.mul(codes.unflatten(1, groups), scale.unsqueeze(-1), out=out.unflatten(1, groups))


def _biased_codes(weight: Tensor, scheme: Int4Scheme, scale: Tensor) -> Tensor:
    """`code + _NIBBLE_OFFSET` in weight's dtype, and write the scales."""
    # A tensor on the device: CUDA multiplies by the reciprocal of a Python number, which may differ.
    divisor = torch.full((), scheme.scale_divisor, dtype=torch.float32, device=weight.device)
    scale.copy_(_group_amax(weight, scheme.group_size).float() / divisor)
    # Where the scale is zero every weight is below 8 denormal steps, and dividing by 1 rounds it to 0.
    safe = scale.masked_fill(scale == 0, 1.0)
    quotient = weight.unflatten(1, (-1, scheme.group_size)) / safe.unsqueeze(-1)
    return quotient.clamp_(scheme.q_min, scheme.q_max).add_(_NIBBLE_OFFSET[weight.dtype]).flatten(1)


def _group_amax(weight: Tensor, group_size: int) -> Tensor:
    """Largest magnitude per group, exact; NaN wins over Inf, Inf over numbers."""
    # Magnitudes order like their bit patterns, and integers reduce four times faster.
    bits = weight.view(_BITS[weight.dtype])
    magnitude = bits & torch.iinfo(bits.dtype).max
    return magnitude.unflatten(1, (-1, group_size)).amax(-1).view(weight.dtype)


def _pack_nibbles(nibbles: Tensor, packed: Tensor) -> None:
    """Write bytes 0..15 `[out, in]` into int32 `[out, in/8]`, lowest nibble first."""
    pairs = nibbles.contiguous().view(torch.int16)
    packed.copy_((pairs | (pairs >> 4)).to(torch.uint8).view(torch.int32))
