"""requantize keeps what did not change, bit for bit, whatever convention wrote it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from int4_reference import FORMATS, bits, random_bit_patterns, same_bits, same_weight

from kimi_bridge.int4 import (
    KIMI_QAT,
    RTN,
    Int4Scheme,
    Int4Weight,
    dequantize,
    pack,
    quantize,
    requantize,
    unpack,
)

DTYPES = list(FORMATS)
REFERENCES = (
    "qat",
    "rtn",
    "any codes and scales",
    "codes below 7",
    "zero scales",
    "zero codes",
    "denormal scales",
)


def reference_of(kind: str, group_size: int, dtype: torch.dtype, generator: torch.Generator) -> Int4Weight:
    """An Int4Weight `[12, 4 * group_size]` of the kind that its name says."""
    rows, columns = 12, 4 * group_size
    codes = torch.randint(-8, 8, (rows, columns), dtype=torch.int8, generator=generator)
    scale = random_bit_patterns((rows, 4), dtype, generator).abs()
    scale = scale.clamp(max=FORMATS[dtype].largest / 16)
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    match kind:
        case "qat":
            return quantize(weight, Int4Scheme(group_size, 7.0, -7))
        case "rtn":
            return quantize(weight, Int4Scheme(group_size, 7.5, -8))
        case "codes below 7":
            codes = codes.clamp(-5, 5)
        case "zero scales":
            scale = torch.zeros_like(scale)
        case "zero codes":
            codes = torch.zeros_like(codes)
        case "denormal scales":
            steps = torch.randint(1, 10, scale.shape, generator=generator)
            scale = (steps * 2.0 ** FORMATS[dtype].smallest_exponent).to(dtype)
    return Int4Weight(pack(codes), scale, (rows, columns))


@given(
    kind=st.sampled_from(REFERENCES),
    group_size=st.sampled_from([32, 64, 128]),
    dtype=st.sampled_from(DTYPES),
    divisor_and_q_min=st.sampled_from([(7.0, -7), (7.5, -8)]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=200, deadline=None)
def test_untouched_weights_come_back_and_touched_groups_are_quantized(
    kind: str, group_size: int, dtype: torch.dtype, divisor_and_q_min: tuple[float, int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scheme = Int4Scheme(group_size, *divisor_and_q_min)
    reference = reference_of(kind, group_size, dtype, generator)
    weight = dequantize(reference, dtype)
    assert same_weight(requantize(weight, reference, scheme), reference)
    assert same_weight(requantize(weight.t().contiguous().t(), reference, scheme), reference)

    # One step of one weight, up or down in its last bit, in some of the groups.
    touched = torch.rand(12, 4, generator=generator) < 0.3
    column = torch.randint(0, group_size, (12, 4, 1), generator=generator)
    groups = bits(weight).unflatten(1, (4, group_size)).clone()
    old = groups.gather(2, column)
    groups.scatter_(2, column, torch.where(touched.unsqueeze(-1), old ^ 1, old))
    changed = groups.flatten(1).view(dtype)
    result = requantize(changed, reference, scheme)
    fresh = quantize(changed, scheme)
    words = touched.repeat_interleave(group_size // 8, dim=1)
    assert torch.equal(result.packed, torch.where(words, fresh.packed, reference.packed))
    assert same_bits(result.scale, torch.where(touched, fresh.scale, reference.scale))


@pytest.mark.parametrize("kind", ["rtn", "codes below 7", "zero scales", "zero codes"])
def test_quantize_alone_would_not_be_lossless(kind: str) -> None:
    """Otherwise the tests above could not tell requantize from quantize."""
    reference = reference_of(kind, 32, torch.bfloat16, torch.Generator().manual_seed(0))
    assert not same_weight(quantize(dequantize(reference), KIMI_QAT), reference)


def test_zeros_of_either_sign_are_the_same_value() -> None:
    codes = torch.tensor([[-3, 0, 2, 0] * 8, [-3, 0, 2, 0] * 8], dtype=torch.int8)
    scale = torch.tensor([[0.0], [0.5]], dtype=torch.bfloat16)
    reference = Int4Weight(pack(codes), scale, (2, 32))
    weight = dequantize(reference)
    assert weight[0].signbit().any()
    flipped = torch.where(weight == 0, -weight, weight)
    assert not same_bits(flipped, weight)
    assert same_weight(requantize(flipped, reference, KIMI_QAT), reference)


def test_a_change_in_one_group_of_many_blocks() -> None:
    """Rows in several blocks, one changed weight in a late one: all else is the reference's."""
    generator = torch.Generator().manual_seed(6)
    reference = quantize(torch.randn(900, 2048, generator=generator).bfloat16(), RTN)
    weight = dequantize(reference)
    assert same_weight(requantize(weight, reference, KIMI_QAT), reference)
    weight[777, 100] += 1.0
    result = requantize(weight, reference, KIMI_QAT)
    fresh = quantize(weight[777:778, 96:128], KIMI_QAT)
    assert torch.equal(result.packed[777:778, 12:16], fresh.packed)
    assert torch.equal(result.scale[777:778, 3:4], fresh.scale)
    assert not torch.equal(result.packed, reference.packed)
    result.packed[777, 12:16] = reference.packed[777, 12:16]
    result.scale[777, 3] = reference.scale[777, 3]
    assert same_weight(result, reference)


def test_a_reference_with_other_strides() -> None:
    reference = quantize(torch.randn(16, 128, generator=torch.Generator().manual_seed(9)).bfloat16(), RTN)
    strided = Int4Weight(
        reference.packed.t().contiguous().t(), reference.scale.t().contiguous().t(), reference.shape
    )
    weight = dequantize(strided)
    assert same_bits(weight, dequantize(reference))
    assert same_weight(requantize(weight, strided, KIMI_QAT), reference)
    weight[:, :32] *= 1.5
    expected = requantize(weight, reference, KIMI_QAT)
    assert same_weight(requantize(weight, strided, KIMI_QAT), expected)
    assert not same_weight(expected, reference)


def test_a_parameter_is_as_good_as_a_tensor() -> None:
    reference = quantize(torch.randn(8, 64, generator=torch.Generator().manual_seed(8)).bfloat16(), RTN)
    weight = torch.nn.Parameter(dequantize(reference) * 1.5)
    result = requantize(weight, reference, RTN)
    assert not result.scale.requires_grad
    assert same_weight(result, requantize(weight.detach(), reference, RTN))
    assert not same_weight(result, reference)


def test_the_result_does_not_share_memory_with_the_reference() -> None:
    reference = quantize(torch.randn(8, 64, generator=torch.Generator().manual_seed(7)).bfloat16(), KIMI_QAT)
    before = unpack(reference.packed, reference.shape)
    result = requantize(dequantize(reference), reference, KIMI_QAT)
    result.packed.zero_()
    assert torch.equal(unpack(reference.packed, reference.shape), before)
