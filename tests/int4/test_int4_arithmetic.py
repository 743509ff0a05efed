"""quantize, dequantize and pack against the slow reference, compressed-tensors and real weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import quantize as compressed_tensors_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st
from int4_reference import (
    FORMATS,
    GROUP_KINDS,
    bits,
    exactly,
    random_bit_patterns,
    random_group,
    reference_dequantize,
    reference_pack,
    reference_quantize,
    same_bits,
)
from safetensors.torch import load_file

from kimi_bridge.int4 import KIMI_QAT, RTN, Int4Scheme, Int4Weight, dequantize, pack, quantize, unpack

GOLDEN = Path(__file__).parents[1] / "data" / "kimi_k26_layer1_expert0_gate_proj_rows0-7.safetensors"
DTYPES = list(FORMATS)


@st.composite
def weights(draw: st.DrawFn) -> tuple[torch.Tensor, Int4Scheme]:
    """A weight of mixed groups, laid out in memory in one of three ways, and a scheme that fits."""
    scheme = Int4Scheme(
        draw(st.sampled_from([8, 32, 64, 128])), *draw(st.sampled_from([(7.0, -7), (7.5, -8), (8.3, -8)]))
    )
    dtype = draw(st.sampled_from(DTYPES))
    rows = draw(st.integers(1, 4))
    kinds = draw(st.lists(st.sampled_from(GROUP_KINDS), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    row = [
        torch.cat([random_group(kind, scheme.group_size, dtype, generator) for kind in kinds])
        for _ in range(rows)
    ]
    weight = torch.stack(row)
    match draw(st.sampled_from(["contiguous", "transposed", "every second"])):
        case "transposed":
            weight = weight.t().contiguous().t()
        case "every second":
            weight = torch.stack([weight, weight + 1], dim=-1)[..., 0]
    return weight, scheme


@given(weights())
@settings(max_examples=400, deadline=None)
def test_quantize_and_dequantize_equal_the_reference(case: tuple[torch.Tensor, Int4Scheme]) -> None:
    weight, scheme = case
    codes, scale = reference_quantize(weight, scheme)
    quantized = quantize(weight, scheme)
    assert quantized.shape == tuple(weight.shape)
    assert same_bits(quantized.scale, exactly(scale, weight.dtype))
    assert torch.equal(unpack(quantized.packed, quantized.shape), torch.from_numpy(codes).to(torch.int8))
    assert np.array_equal(quantized.packed.numpy(), reference_pack(codes))
    for dtype in DTYPES:
        values = reference_dequantize(codes, scale, FORMATS[dtype])
        assert same_bits(dequantize(quantized, dtype), exactly(values, dtype))


@pytest.mark.parametrize("scheme", [KIMI_QAT, RTN], ids=["qat", "rtn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_weight_under_many_scales(dtype: torch.dtype, scheme: Int4Scheme) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    generator = torch.Generator().manual_seed(0)
    smallest = 2.0 ** FORMATS[dtype].smallest_exponent
    largest_of_group = torch.cat(
        (
            torch.arange(1, 40).to(dtype) * smallest,  # scales of 0, 1, 2, ... denormal steps
            random_bit_patterns((400,), dtype, generator).abs(),
            torch.tensor([1.0, 7.0, 7.5, FORMATS[dtype].largest]).to(dtype),
        )
    )
    for amax in largest_of_group:
        fitting = every[every.abs() <= amax]
        groups = amax.repeat(-(-len(fitting) // 31), 32)  # column 0 keeps it, the others hold `fitting`
        padded = amax.repeat(len(groups) * 31)
        padded[: len(fitting)] = fitting
        groups[:, 1:] = padded.view(-1, 31)
        codes, scale = reference_quantize(groups, scheme)
        quantized = quantize(groups, scheme)
        assert same_bits(quantized.scale, exactly(scale, dtype))
        assert np.array_equal(unpack(quantized.packed, quantized.shape).numpy(), codes)


@pytest.mark.parametrize("scheme", [KIMI_QAT, RTN], ids=["qat", "rtn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_scale_of_every_16_bit_amax(dtype: torch.dtype, scheme: Int4Scheme) -> None:
    amax = torch.arange(2**15).to(torch.int16).view(dtype)
    weight = torch.zeros(int(amax.isfinite().sum()), 32, dtype=dtype)
    weight[:, 17] = -amax[amax.isfinite()]
    assert same_bits(quantize(weight, scheme).scale, exactly(reference_quantize(weight, scheme)[1], dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_scale_with_every_code(dtype: torch.dtype) -> None:
    scale = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    scale = scale[scale.isfinite()].unsqueeze(1)
    codes = torch.arange(-8, 8, dtype=torch.int8).expand(len(scale), 16)
    weight = Int4Weight(pack(codes), scale, (len(scale), 16))
    for target in DTYPES:
        expected = reference_dequantize(
            codes.to(torch.int64).numpy(), scale.double().numpy(), FORMATS[target]
        )
        assert same_bits(dequantize(weight, target), exactly(expected, target))
    native = codes.to(dtype) * scale
    assert same_bits(dequantize(weight, dtype), native)
    assert same_bits(dequantize(weight, dtype), decompress(weight))


def test_real_weights() -> None:
    golden = load_file(GOLDEN)
    shape = golden["weight_shape"].tolist()
    stored = Int4Weight(golden["weight_packed"], golden["weight_scale"], shape)
    assert stored.group_size == 32
    assert stored.nbytes == 8 * 64 // 2 + 8 * 2 * 2
    assert same_bits(dequantize(stored), golden["weight"])
    again = quantize(golden["weight"], KIMI_QAT)
    assert torch.equal(again.packed, stored.packed)
    assert same_bits(again.scale, stored.scale)
    assert not torch.equal(quantize(golden["weight"], RTN).packed, stored.packed)


@pytest.mark.parametrize("shape", [(1, 8), (3, 40), (64, 7168), (5, 256)])
def test_pack_and_unpack_equal_compressed_tensors(shape: tuple[int, int]) -> None:
    codes = torch.randint(-8, 8, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    packed = pack(codes)
    assert torch.equal(packed, pack_to_int32(codes, 4))
    assert np.array_equal(packed.numpy(), reference_pack(codes.numpy().astype(np.int64)))
    assert torch.equal(unpack(packed, shape), codes)
    assert torch.equal(unpack(packed, shape), unpack_from_int32(packed, 4, torch.Size(shape)))
    assert torch.equal(unpack(packed.t().contiguous().t(), shape), codes)
    assert torch.equal(pack(codes.t().contiguous().t()), packed)


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_equals_compressed_tensors(dtype: torch.dtype, group_size: int) -> None:
    generator = torch.Generator().manual_seed(group_size)
    codes = torch.randint(-8, 8, (96, 512), dtype=torch.int8, generator=generator)
    scale = random_bit_patterns((96, 512 // group_size), dtype, generator)
    weight = Int4Weight(pack(codes), scale, (96, 512))
    assert same_bits(dequantize(weight, dtype), decompress(weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rtn_equals_compressed_tensors_calibration(dtype: torch.dtype) -> None:
    weight = (torch.randn(64, 512, generator=torch.Generator().manual_seed(2)) * 0.02).to(dtype)
    arguments = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True)
    groups = weight.unflatten(1, (-1, 32))
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    codes = compressed_tensors_quantize(weight, scale, zero_point, arguments, dtype=torch.int8)
    ours = quantize(weight, RTN)
    assert same_bits(ours.scale, scale)
    assert torch.equal(ours.packed, pack_to_int32(codes, 4))


def test_blocks_of_rows_do_not_show() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = random_bit_patterns((701, 2048), torch.bfloat16, generator)
    whole = quantize(weight, KIMI_QAT)
    values = dequantize(whole)
    codes = unpack(whole.packed, whole.shape)
    assert torch.equal(pack(codes), whole.packed)
    for row in range(0, 701, 50):
        one = quantize(weight[row : row + 1], KIMI_QAT)
        assert torch.equal(one.packed[0], whole.packed[row])
        assert same_bits(one.scale[0], whole.scale[row])
        assert same_bits(dequantize(one)[0], values[row])
        assert torch.equal(unpack(one.packed, one.shape)[0], codes[row])


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "columns of a wider one"])
def test_dequantize_into_out(layout: str) -> None:
    weight = quantize(torch.randn(40, 96, generator=torch.Generator().manual_seed(4)).bfloat16(), KIMI_QAT)
    expected = dequantize(weight)
    poison = torch.full((40, 200), torch.nan, dtype=torch.bfloat16)
    out = {
        "contiguous": poison.flatten()[: 40 * 96].view(40, 96),
        "transposed": poison.flatten()[: 40 * 96].view(96, 40).t(),
        "columns of a wider one": poison[:, 50:146],
    }[layout]
    assert dequantize(weight, out=out) is out
    assert same_bits(out, expected)
    assert poison.isnan().sum() == 40 * 200 - 40 * 96


def test_flags_of_the_caller_do_not_matter() -> None:
    """A weight that requires grad and inference mode give the same bits, and no graph."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(5)).bfloat16()
    expected = quantize(weight, KIMI_QAT)
    with_gradient = quantize(torch.nn.Parameter(weight), KIMI_QAT)
    assert not with_gradient.scale.requires_grad
    assert torch.equal(with_gradient.packed, expected.packed)
    with torch.inference_mode():
        assert torch.equal(quantize(weight, KIMI_QAT).packed, expected.packed)
    assert torch.equal(bits(dequantize(with_gradient)), bits(dequantize(expected)))


def decompress(weight: Int4Weight) -> torch.Tensor:
    """What compressed-tensors makes of the triplet."""
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=weight.group_size),
    )
    state = {
        "weight_packed": weight.packed,
        "weight_scale": weight.scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    return PackedQuantizationCompressor.decompress(state, scheme)["weight"]
