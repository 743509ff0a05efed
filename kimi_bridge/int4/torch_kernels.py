"""The INT4 arithmetic in plain PyTorch, for any device, in blocks of rows.

Callers (`codec`) have checked shapes and dtypes and hand in the outputs: `packed`, `codes` and `scale`
contiguous, `out` with any strides, as inputs may have. A back end for one device is a module with these six
functions.
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
_BLOCK_ELEMENTS = {"cpu": 2**20}
_BLOCK_ELEMENTS_ELSEWHERE = 2**27


def pack(codes: Tensor, packed: Tensor) -> None:
    """Write int8 codes `[out, in]` of -8..7 into int32 `[out, in/8]`."""
    for rows, (nibbles,) in _row_blocks(codes, torch.int8):
        torch.add(codes[rows], 8, out=nibbles)
        _pack_nibbles(nibbles, packed[rows])


def unpack(packed: Tensor, codes: Tensor) -> None:
    """Write the codes in int32 `[out, in/8]` into int8 `[out, in]`."""
    for rows, (scratch,) in _row_blocks(codes, torch.int8):
        _unpack(packed[rows], codes[rows], scratch)


def dequantize(packed: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write `code * scale` into `out` `[out, in]`."""
    # PyTorch multiplies 16-bit floats in float32 and rounds once, so the native product is the one asked
    # for where the dtypes agree.
    dtype = out.dtype if out.dtype == scale.dtype else torch.float32
    for rows, (values, codes, scratch) in _row_blocks(out, dtype, torch.int8, torch.int8):
        _unpack(packed[rows], codes, scratch)
        _multiply(values.copy_(codes), scale[rows].to(dtype), out[rows])


def quantize(weight: Tensor, scheme: Int4Scheme, packed: Tensor, scale: Tensor) -> None:
    """Write codes and scales of `weight`; a group with NaN or Inf gets a scale of NaN or Inf."""
    for rows, (values, nibbles) in _row_blocks(weight, weight.dtype, torch.int8):
        _biased_codes(weight[rows], scheme, scale[rows], values)
        nibbles.copy_(values.view(_BITS[weight.dtype]))
        _pack_nibbles(nibbles, packed[rows])


def requantize(
    weight: Tensor,
    reference_packed: Tensor,
    reference_scale: Tensor,
    scheme: Int4Scheme,
    packed: Tensor,
    scale: Tensor,
) -> None:
    """Write the reference's codes and scale for groups equal to it, those of `quantize` for the others."""
    for rows, (difference, codes, scratch) in _row_blocks(weight, weight.dtype, torch.int8, torch.int8):
        _unpack(reference_packed[rows], codes, scratch)
        _multiply(difference.copy_(codes), reference_scale[rows], difference)
        # Zero for equal numbers alone: denormals are not flushed, and Inf - Inf is NaN.
        torch.sub(weight[rows], difference, out=difference)
        kept = _group_amax(difference, scheme.group_size, difference) == 0
        packed[rows], scale[rows] = reference_packed[rows], reference_scale[rows]
        if kept.all():
            continue
        fresh_packed, fresh_scale = packed.new_empty(packed[rows].shape), scale.new_empty(scale[rows].shape)
        quantize(weight[rows], scheme, fresh_packed, fresh_scale)
        kept_words = kept.repeat_interleave(scheme.group_size // CODES_PER_WORD, dim=1)
        packed[rows] = packed[rows].where(kept_words, fresh_packed)
        scale[rows] = scale[rows].where(kept, fresh_scale)


def fake_quantize(weight: Tensor, scheme: Int4Scheme, scale: Tensor, out: Tensor) -> None:
    """Write `scale` as `quantize` does, and the values of `dequantize(quantize(weight))` into `out`."""
    for rows, (values,) in _row_blocks(weight, weight.dtype):
        _biased_codes(weight[rows], scheme, scale[rows], values)
        _multiply(values.sub_(_NIBBLE_OFFSET[weight.dtype]), scale[rows], out[rows])


def _row_blocks(matrix: Tensor, *scratch: torch.dtype) -> Iterator[tuple[slice, list[Tensor]]]:
    """Slices of rows, each with scratch tensors of its shape.

    All blocks share the scratch: new memory in each would be paid for in page faults.
    """
    rows, columns = matrix.shape
    elements = _BLOCK_ELEMENTS.get(matrix.device.type, _BLOCK_ELEMENTS_ELSEWHERE)
    step = min(rows, max(1, elements // columns))
    buffers = [matrix.new_empty(step, columns, dtype=dtype) for dtype in scratch]
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield slice(start, stop), [buffer[: stop - start] for buffer in buffers]


def _unpack(packed: Tensor, codes: Tensor, scratch: Tensor) -> None:
    """Write int8 codes `[out, in]` from int32 `[out, in/8]`."""
    # The two nibbles of a byte, one to each byte of an int16: a + 16 b + 15 * 16 b = a + 256 b.
    pairs, high = codes.view(torch.int16), scratch.view(torch.int16)
    pairs.copy_(packed.contiguous().view(torch.uint8))
    torch.bitwise_and(pairs, 0xF0, out=high)
    pairs.add_(high, alpha=15)
    codes.sub_(8)


def _pack_nibbles(nibbles: Tensor, packed: Tensor) -> None:
    """Write bytes 0..15 `[out, in]`, which it destroys, into int32 `[out, in/8]`, lowest nibble first."""
    # For nibbles a and b in an int16, a + 256 b, the low byte of (a + 256 b) * 17 / 16 is a + 16 b.
    pairs = nibbles.view(torch.int16)
    pairs.mul_(17).bitwise_right_shift_(4)
    packed.view(torch.uint8).copy_(pairs)


def _multiply(codes: Tensor, scale: Tensor, out: Tensor) -> None:
    groups = (scale.shape[1], codes.shape[1] // scale.shape[1])
    torch.mul(codes.unflatten(1, groups), scale.unsqueeze(-1), out=out.unflatten(1, groups))


def _biased_codes(weight: Tensor, scheme: Int4Scheme, scale: Tensor, out: Tensor) -> None:
    """Write the scales, and `code + _NIBBLE_OFFSET` in weight's dtype into `out`."""
    amax = _group_amax(weight, scheme.group_size, out)
    # A tensor on the device: CUDA would multiply by the reciprocal of a Python number, another rounding.
    divisor = torch.full((), scheme.scale_divisor, dtype=torch.float32, device=weight.device)
    scale.copy_(amax.float() / divisor)
    # Where the scale is zero, every weight is a few denormal steps, and dividing by 1 rounds it to code 0.
    safe = scale.masked_fill(scale == 0, 1.0)
    groups = (-1, scheme.group_size)
    torch.div(weight.unflatten(1, groups), safe.unsqueeze(-1), out=out.unflatten(1, groups))
    out.clamp_(scheme.q_min, scheme.q_max).add_(_NIBBLE_OFFSET[weight.dtype])


def _group_amax(weight: Tensor, group_size: int, scratch: Tensor) -> Tensor:
    """Largest magnitude per group, exact: `[out, in/group_size]`. NaN wins over Inf, Inf over numbers.

    `scratch` may be the weight itself, which is then lost.
    """
    # Magnitudes are ordered as their bit patterns are, and integers reduce four times faster.
    bits = weight.view(_BITS[weight.dtype])
    magnitude = scratch.view(bits.dtype)
    torch.bitwise_and(bits, torch.iinfo(bits.dtype).max, out=magnitude)
    return magnitude.unflatten(1, (-1, group_size)).amax(-1).view(weight.dtype)
