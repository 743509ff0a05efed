"""Kimi's INT4 weights, the `pack-quantized` format of compressed-tensors: pack, quantize, dequantize.

A row is cut into groups that share a scale. The arithmetic, for a group of weights `w` in one dtype:

    scale = round(float32(amax) / scale_divisor)        float32 division, rounded to the dtype
    code  = clamp(round_half_even(w / scale), q_min, 7) w / scale rounded to the dtype
    value = code * scale                                rounded to the dtype

No epsilon: a group whose scale is zero has the codes 0. Just below the largest number of a dtype, a scale
that was rounded up can make a value Inf; the server would compute the same.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from kimi_bridge.errors import Int4Error
from kimi_bridge.int4 import torch_kernels
from kimi_bridge.int4.scheme import CODES_PER_WORD, Q_MAX, Q_MIN, Int4Scheme

# A CUDA build of PyTorch brings Triton; elsewhere PyTorch's own kernels do the same, more slowly.
_HAVE_TRITON = importlib.util.find_spec("triton") is not None
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class Int4Weight:
    """One quantized matrix, as a checkpoint stores it.

    packed: int32 `[out, in/8]`; scale: bfloat16, float16 or float32 `[out, in/group_size]`; shape:
    `(out, in)`, from any two integers. Both tensors on one device.
    Raises Int4Error when these disagree.
    """

    packed: Tensor
    scale: Tensor
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _check_packed(self.packed, self.shape))
        _check_matrix("scale", self.scale, FLOAT_DTYPES)
        rows, columns = self.shape
        groups = self.scale.shape[1]
        if self.scale.shape[0] != rows or columns % (groups * CODES_PER_WORD):
            raise Int4Error(
                f"scale is {tuple(self.scale.shape)} for a weight {self.shape}: pass one per row and group, "
                f"with groups of one size, a multiple of {CODES_PER_WORD}."
            )
        _check_device("scale", self.scale, "packed", self.packed)

    @property
    def group_size(self) -> int:
        """How many neighbours in a row share a scale."""
        return self.shape[1] // self.scale.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together."""
        return self.packed.nbytes + self.scale.nbytes

    def to(self, device: torch.device | str | int) -> Int4Weight:
        """The same weight on another device."""
        return Int4Weight(self.packed.to(device), self.scale.to(device), self.shape)


@torch.no_grad()
def pack(codes: Tensor) -> Tensor:
    """Eight codes to an int32: nibble = code + 8, the first code in the lowest bits.

    codes: int8 `[out, in]` in -8..7. Returns int32 `[out, in/8]`.
    Raises Int4Error for another dtype, a width that is no multiple of 8, or a code out of range.
    Source: compressed_tensors, `pack_to_int32` with 4 bits.
    """
    _check_matrix("codes", codes, (torch.int8,))
    _check_width("codes", codes.shape[1], CODES_PER_WORD, "the codes in an int32")
    smallest, largest = (int(code) for code in torch.aminmax(codes))
    if smallest < Q_MIN or largest > Q_MAX:
        raise Int4Error(
            f"codes range from {smallest} to {largest}: four bits hold {Q_MIN}..{Q_MAX}, so clamp them first."
        )
    packed = codes.new_empty(_packed_shape(codes), dtype=torch.int32)
    _kernels(codes.device).pack(codes, packed)
    return packed


@torch.no_grad()
def unpack(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """The codes of a packed matrix.

    packed: int32 `[out, in/8]`; shape: `(out, in)`. Returns int8 `[out, in]` in -8..7.
    Raises Int4Error when the two disagree.
    """
    codes = packed.new_empty(_check_packed(packed, shape), dtype=torch.int8)
    _kernels(packed.device).unpack(packed, codes)
    return codes


@torch.no_grad()
def quantize(weight: Tensor, scheme: Int4Scheme) -> Int4Weight:
    """Quantize a matrix by the arithmetic at the top of this file.

    weight: bfloat16, float16 or float32 `[out, in]`; the scales get its dtype.
    Raises Int4Error for another dtype, a width that is no multiple of the group size, NaN or Inf.
    """
    _check_weight(weight, scheme)
    packed = weight.new_empty(_packed_shape(weight), dtype=torch.int32)
    scale = weight.new_empty(_scale_shape(weight, scheme))
    _kernels(weight.device).quantize(weight, scheme, packed, scale)
    _check_finite(scale, scheme)
    return Int4Weight(packed, scale, (weight.shape[0], weight.shape[1]))


@torch.no_grad()
def dequantize(
    int4_weight: Int4Weight, dtype: torch.dtype = torch.bfloat16, *, out: Tensor | None = None
) -> Tensor:
    """`code * scale`: the product in float32, rounded to `dtype`.

    The product of a code and a 16-bit scale is exact in float32, so it is rounded once, and equals the
    native product where `dtype` is the scale's own (what vLLM and compressed-tensors compute). A float32
    scale gives a float32 product, rounded again to a 16-bit `dtype`.
    Returns `[out, in]` of bfloat16, float16 or float32: `out` where given, which spares new memory.
    Raises Int4Error for another dtype, or an `out` that does not fit.
    """
    if dtype not in FLOAT_DTYPES:
        raise Int4Error(f"dtype is {dtype}: dequantize to {_names(FLOAT_DTYPES)}.")
    if out is None:
        out = int4_weight.scale.new_empty(int4_weight.shape, dtype=dtype)
    elif out.dtype != dtype or out.shape != int4_weight.shape:
        raise Int4Error(
            f"out is {out.dtype} of {tuple(out.shape)}: pass {dtype} of {int4_weight.shape}, or leave it out."
        )
    _check_device("out", out, "int4_weight", int4_weight.packed)
    _kernels(out.device).dequantize(int4_weight.packed, int4_weight.scale, out)
    return out


@torch.no_grad()
def requantize(weight: Tensor, reference: Int4Weight, scheme: Int4Scheme) -> Int4Weight:
    """Quantize, but keep the reference's codes and scale, bit for bit, where a group did not change.

    A group did not change when it equals what `reference` dequantizes to, value for value. That is bit
    for bit but for the sign of zero: -0.0 and 0.0 are one value, since a zero can have come from code 0
    as well as from a scale of zero. Every other group is quantized by `scheme`.
    weight: `[out, in]` in the dtype of the reference's scales, shape and group size as the reference.
    Raises Int4Error as `quantize` does, and when weight, reference and scheme disagree.
    """
    _check_weight(weight, scheme)
    _check_reference(weight, reference, scheme)
    packed = weight.new_empty(_packed_shape(weight), dtype=torch.int32)
    scale = weight.new_empty(_scale_shape(weight, scheme))
    _kernels(weight.device).requantize(weight, reference.packed, reference.scale, scheme, packed, scale)
    _check_finite(scale, scheme)
    return Int4Weight(packed, scale, reference.shape)


@torch.no_grad()
def fake_quantize_values(weight: Tensor, scheme: Int4Scheme) -> Tensor:
    """`dequantize(quantize(weight, scheme), weight.dtype)` without the codes in between.

    `fake_quant` adds the gradient. Raises Int4Error as `quantize` does.
    """
    _check_weight(weight, scheme)
    values = weight.new_empty(weight.shape)
    scale = weight.new_empty(_scale_shape(weight, scheme))
    _kernels(weight.device).fake_quantize(weight, scheme, scale, values)
    _check_finite(scale, scheme)
    return values


@torch.no_grad()
def served_values(
    weights: Sequence[Tensor], references: Sequence[Int4Weight | None], scheme: Int4Scheme
) -> Tensor:
    """What an engine would compute with if these matrices were exported now, for many at once.

    That is `dequantize(requantize(weight, reference, scheme))`, or `fake_quantize(weight, scheme)` where the
    reference is None. weights: matrices `[out, in]` of one shape, dtype and device; references: one a weight.
    Returns `[len(weights), out, in]`.
    Raises Int4Error as `requantize` does; but on a GPU a group with NaN or Inf gives NaN or Inf, since
    looking for them would make every forward pass wait for the GPU.
    """
    out = weights[0].new_empty((len(weights), *weights[0].shape))
    kernels = _kernels(out.device)
    _check_alike(weights, references, scheme)
    if kernels is not torch_kernels:
        kernels.served_values(weights, references, scheme, out)
        return out
    for weight, reference, values in zip(weights, references, out, strict=True):
        if reference is None:
            values.copy_(fake_quantize_values(weight, scheme))
        else:
            dequantize(requantize(weight, reference, scheme), weight.dtype, out=values)
    return out


def _check_finite(scale: Tensor, scheme: Int4Scheme) -> None:
    """Raise Int4Error for the first group whose fresh scale says that it held NaN or Inf."""
    # One pass over the scales; a sum that overflows is looked at again.
    if math.isfinite(float(scale.sum(dtype=torch.float32))):
        return
    finite = scale.isfinite()
    if finite.all():
        return
    row, group = (int(i) for i in (~finite).nonzero()[0])
    first = group * scheme.group_size
    raise Int4Error(
        f"The weight holds NaN or Inf, first in row {row}, columns {first}..{first + scheme.group_size - 1}: "
        "INT4 has no code for them, so find the step or the file that they came from."
    )


def _kernels(device: torch.device) -> ModuleType:
    """The back end for a device: the one place that chooses."""
    if device.type == "cuda" and _HAVE_TRITON:
        from kimi_bridge.int4 import triton_kernels

        return triton_kernels
    return torch_kernels


def _check_weight(weight: Tensor, scheme: Int4Scheme) -> None:
    _check_matrix("weight", weight, FLOAT_DTYPES)
    _check_width("weight", weight.shape[1], scheme.group_size, "the group size")


def _check_reference(weight: Tensor, reference: Int4Weight, scheme: Int4Scheme) -> None:
    if reference.shape != tuple(weight.shape) or reference.group_size != scheme.group_size:
        raise Int4Error(
            f"The reference is {reference.shape} in groups of {reference.group_size}, the weight "
            f"{tuple(weight.shape)} in groups of {scheme.group_size}: pass the same slice of the checkpoint "
            "that the weight came from, and a scheme of its group size."
        )
    if reference.scale.dtype != weight.dtype:
        raise Int4Error(
            f"The reference has scales of {reference.scale.dtype}, the weight is {weight.dtype}: convert the "
            "weight to the dtype of the scales first."
        )
    _check_device("reference", reference.packed, "weight", weight)


def _check_alike(
    weights: Sequence[Tensor], references: Sequence[Int4Weight | None], scheme: Int4Scheme
) -> None:
    first = weights[0]
    _check_weight(first, scheme)
    for weight, reference in zip(weights, references, strict=True):
        if weight.shape != first.shape or weight.dtype != first.dtype or weight.device != first.device:
            raise Int4Error(
                f"One weight is {weight.dtype} {tuple(weight.shape)} on {weight.device}, the first is "
                f"{first.dtype} {tuple(first.shape)} on {first.device}: pass matrices of one kind."
            )
        if reference is not None:
            _check_reference(weight, reference, scheme)


def _check_packed(packed: Tensor, shape: Sequence[int]) -> tuple[int, int]:
    _check_matrix("packed", packed, (torch.int32,))
    if len(shape) != 2:
        raise Int4Error(f"shape has {len(shape)} numbers: pass (out, in).")
    rows, columns = int(shape[0]), int(shape[1])
    _check_width("shape", columns, CODES_PER_WORD, "the codes in an int32")
    if tuple(packed.shape) != (rows, columns // CODES_PER_WORD):
        raise Int4Error(
            f"packed is {tuple(packed.shape)} for a weight of {(rows, columns)}: pass "
            f"{(rows, columns // CODES_PER_WORD)}, {CODES_PER_WORD} codes to an int32."
        )
    return rows, columns


def _check_matrix(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.ndim != 2 or not tensor.numel():
        raise Int4Error(
            f"{name} is of shape {tuple(tensor.shape)}: pass a matrix with at least one element, one expert "
            "at a time."
        )
    if tensor.dtype not in dtypes:
        raise Int4Error(f"{name} is {tensor.dtype}: convert it to {_names(dtypes)} first.")


def _check_width(name: str, columns: int, unit: int, what: str) -> None:
    if columns % unit:
        raise Int4Error(
            f"{name} has {columns} columns, which is no multiple of {unit} ({what}): pad it, or leave this "
            "weight unquantized."
        )


def _check_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.device != other.device:
        raise Int4Error(
            f"{name} is on {tensor.device}, {other_name} on {other.device}: move them to one device."
        )


def _packed_shape(matrix: Tensor) -> tuple[int, int]:
    return matrix.shape[0], matrix.shape[1] // CODES_PER_WORD


def _scale_shape(weight: Tensor, scheme: Int4Scheme) -> tuple[int, int]:
    return weight.shape[0], weight.shape[1] // scheme.group_size


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)
