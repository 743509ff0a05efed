"""The Triton kernels give the CPU's bits: 10^8 elements of every dtype, convention and group size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kimi_bridge.errors import Int4Error
from kimi_bridge.int4 import (
    KIMI_QAT,
    RTN,
    Int4Scheme,
    Int4Weight,
    dequantize,
    fake_quantize,
    quantize,
    requantize,
    served_values,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS, COLUMNS = 2048, 4096
ROUNDS = 2
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
SCHEMES = [
    Int4Scheme(group_size, scheme.scale_divisor, scheme.q_min)
    for group_size in (32, 64, 128)
    for scheme in (KIMI_QAT, RTN)
]


def weights(dtype: torch.dtype, scheme: Int4Scheme) -> Iterator[torch.Tensor]:
    """2048 x 4096 each, six kinds, twice: together more than 10^8 elements."""
    for seed in range(ROUNDS):
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(ROWS, COLUMNS, generator=generator)
        yield (normal * 0.02).to(dtype)
        # Every finite bit pattern of a 16-bit dtype, many times.
        high = torch.iinfo(BITS[dtype]).max
        patterns = torch.randint(-high - 1, high, (ROWS, COLUMNS), generator=generator, dtype=BITS[dtype])
        values = patterns.view(dtype)
        yield torch.where(values.isfinite(), values, torch.zeros_like(values))
        # Denormals, and magnitudes that differ from group to group.
        exponents = torch.randint(-45, 5, (ROWS, COLUMNS // 32), generator=generator).repeat_interleave(32, 1)
        yield (normal * 10.0**exponents).to(dtype)
        yield (normal * torch.finfo(dtype).smallest_normal * 0.01).to(dtype)
        # Zeros of both signs, single weights among them.
        yield (normal * (torch.rand(ROWS, COLUMNS, generator=generator) < 0.02)).to(dtype)
        # What another convention left behind, values that lie on ties.
        codes = torch.randint(scheme.q_min, 8, (ROWS, COLUMNS), generator=generator)
        scales = (torch.rand(ROWS, COLUMNS // scheme.group_size, generator=generator) + 0.01).to(dtype)
        yield codes.to(dtype) * scales.repeat_interleave(scheme.group_size, 1)


def same(gpu: torch.Tensor, cpu: torch.Tensor) -> bool:
    bits = BITS.get(cpu.dtype, cpu.dtype)
    return torch.equal(gpu.cpu().view(bits), cpu.view(bits))


def same_int4(gpu: Int4Weight, cpu: Int4Weight) -> bool:
    return same(gpu.packed, cpu.packed) and same(gpu.scale, cpu.scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"group{s.group_size}-div{s.scale_divisor}")
def test_every_function_gives_the_bits_of_the_cpu(dtype: torch.dtype, scheme: Int4Scheme) -> None:
    elements = 0
    for weight in weights(dtype, scheme):
        on_gpu = weight.cuda()
        expected = quantize(weight, scheme)
        got = quantize(on_gpu, scheme)
        assert same_int4(got, expected)
        for target in DTYPES:
            assert same(dequantize(got, target), dequantize(expected, target))
        values = fake_quantize(on_gpu, scheme)
        assert same(values, dequantize(expected, dtype))
        # A reference that fits half of the rows.
        changed = weight.clone()
        served = dequantize(expected, dtype)
        # Next to the largest number of a dtype a value can be Inf, which no weight may be.
        changed[::2] = torch.where(served.isfinite(), served, weight)[::2]
        cpu_again, gpu_again = (
            requantize(changed, expected, scheme),
            requantize(changed.cuda(), got, scheme),
        )
        assert same_int4(gpu_again, cpu_again)
        many = served_values([on_gpu, changed.cuda()], [got, got], scheme)
        assert same(many[0], dequantize(requantize(weight, expected, scheme), dtype))
        assert same(many[1], dequantize(cpu_again, dtype))
        assert same(served_values([on_gpu] * 3, [None] * 3, scheme)[2], dequantize(expected, dtype))
        elements += weight.numel()
    assert elements >= 10**8


@pytest.mark.parametrize("rows", [1, 3, 65])
@pytest.mark.parametrize("columns", [32, 96, 7168])
def test_odd_shapes_and_layouts(rows: int, columns: int) -> None:
    weight = torch.randn(columns, rows, dtype=torch.bfloat16).t()
    assert not weight.is_contiguous() or 1 in weight.shape
    expected = quantize(weight, KIMI_QAT)
    assert same_int4(quantize(weight.cuda(), KIMI_QAT), expected)
    out = torch.full((rows, columns + 32), float("nan"), dtype=torch.bfloat16, device="cuda")
    dequantize(expected.to("cuda"), out=out[:, :columns])
    assert same(out[:, :columns].contiguous(), dequantize(expected))
    assert out[:, columns:].isnan().all(), "nothing is written beside the output"


def test_nan_and_inf_are_reported() -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        weight = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda")
        weight[5, 70] = bad
        for function in (quantize, fake_quantize):
            with pytest.raises(Int4Error, match="row 5"):
                function(weight, KIMI_QAT)
        assert not served_values([weight], [None], KIMI_QAT)[0, 5, 64:96].isfinite().all()


def test_gradient_passes_straight_through() -> None:
    weight = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    gradient = torch.randn_like(weight)
    fake_quantize(weight, KIMI_QAT).backward(gradient)
    assert torch.equal(weight.grad, gradient)
