"""The INT4 arithmetic written a second time, slowly, in NumPy's float64, and the data to try it on.

A float64 quotient of two float32 numbers, rounded again to 24 bits or fewer, is the correctly rounded
quotient (53 >= 2 * 24 + 2), so each line below rounds once.
"""

from dataclasses import dataclass

import numpy as np
import torch

from kimi_bridge.int4 import Int4Scheme, Int4Weight


@dataclass(frozen=True)
class Format:
    """Bits of the significand, exponent of the smallest positive number, and the largest number."""

    precision: int
    smallest_exponent: int
    largest: float
    bits: torch.dtype


FORMATS = {
    torch.bfloat16: Format(8, -133, (2 - 2.0**-7) * 2.0**127, torch.int16),
    torch.float16: Format(11, -24, 65504.0, torch.int16),
    torch.float32: Format(24, -149, (2 - 2.0**-23) * 2.0**127, torch.int32),
}
FLOAT32 = FORMATS[torch.float32]


def round_to(x: np.ndarray, fmt: Format) -> np.ndarray:
    """float64 to the nearest number of a format, ties to even, Inf beyond its largest."""
    exponent = np.frexp(x)[1] - fmt.precision
    step = np.ldexp(1.0, np.maximum(exponent, fmt.smallest_exponent))
    rounded = np.rint(x / step) * step
    return np.where(np.abs(rounded) > fmt.largest, np.copysign(np.inf, x), rounded)


def reference_quantize(weight: torch.Tensor, scheme: Int4Scheme) -> tuple[np.ndarray, np.ndarray]:
    """Codes int64 `[out, in]` and scales float64 `[out, in/group_size]`."""
    fmt = FORMATS[weight.dtype]
    groups = weight.double().numpy().reshape(weight.shape[0], -1, scheme.group_size)
    scale = round_to(round_to(np.abs(groups).max(-1) / np.float32(scheme.scale_divisor), FLOAT32), fmt)
    quotient = np.zeros_like(groups)
    np.divide(groups, scale[..., None], out=quotient, where=scale[..., None] != 0)
    codes = np.clip(np.rint(round_to(quotient, fmt)), scheme.q_min, 7).astype(np.int64)
    return codes.reshape(weight.shape), scale


def reference_dequantize(codes: np.ndarray, scale: np.ndarray, fmt: Format) -> np.ndarray:
    """float64 `[out, in]`, each a number of `fmt`."""
    groups = codes.reshape(*scale.shape, -1) * scale[..., None]
    return round_to(round_to(groups, FLOAT32), fmt).reshape(codes.shape)


def reference_pack(codes: np.ndarray) -> np.ndarray:
    """int32 `[out, in/8]`, one code after the other."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint32)
    for column in range(codes.shape[1]):
        nibble = (codes[:, column] + 8).astype(np.uint32)
        words[:, column // 8] |= nibble << np.uint32(4 * (column % 8))
    return words.view(np.int32)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a float tensor, for comparisons that tell -0.0 from 0.0."""
    return x.contiguous().view(FORMATS[x.dtype].bits)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def same_weight(a: Int4Weight, b: Int4Weight) -> bool:
    return a.shape == b.shape and torch.equal(a.packed, b.packed) and same_bits(a.scale, b.scale)


def exactly(x: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of these numbers, each of which `dtype` holds exactly."""
    tensor = torch.from_numpy(np.ascontiguousarray(x)).to(dtype)
    assert np.array_equal(tensor.double().numpy(), x)
    return tensor


def random_bit_patterns(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Any finite number of a dtype, denormals and both zeros among them, as likely as any other."""
    integers = torch.iinfo(FORMATS[dtype].bits)
    pattern = torch.randint(integers.min, integers.max + 1, shape, generator=generator)
    x = pattern.to(FORMATS[dtype].bits).view(dtype)
    return torch.where(x.isfinite(), x, torch.zeros_like(x))


GROUP_KINDS = ("normal", "bit patterns", "zero", "denormal", "underflow", "ties", "one weight", "large")


def random_group(kind: str, size: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """One group `[size]` of the kind that its name says."""
    smallest = 2.0 ** FORMATS[dtype].smallest_exponent
    normal = torch.randn(size, generator=generator, dtype=torch.float64)
    integer = torch.randint(-14, 15, (size,), generator=generator)
    match kind:
        case "normal":
            x = normal * 0.02
        case "bit patterns":
            return random_bit_patterns((size,), dtype, generator)
        case "zero":
            x = normal * 0 * integer.sign()
        case "denormal":
            x = integer * 9 * smallest
        case "underflow":
            x = integer.clamp(-4, 4) * smallest
        case "ties":
            x = integer * 0.5
        case "one weight":
            x = torch.zeros(size)
            x[int(integer[0]) % size] = normal[0]
        case "large":
            x = normal.clamp(-4, 4) / 8 * FORMATS[dtype].largest
        case _:
            raise ValueError(kind)
    return x.to(dtype)
