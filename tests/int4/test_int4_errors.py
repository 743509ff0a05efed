"""What the format cannot hold is refused, with the cause and the cure in one sentence."""

from typing import Any

import pytest
import torch

from kimi_bridge.errors import Int4Error
from kimi_bridge.int4 import (
    KIMI_QAT,
    Int4Scheme,
    Int4Weight,
    dequantize,
    fake_quantize,
    pack,
    quantize,
    requantize,
    unpack,
)

PACKED = torch.zeros(4, 8, dtype=torch.int32)
SCALE = torch.ones(4, 2, dtype=torch.bfloat16)
WEIGHT = torch.ones(4, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": 12}, "group_size is 12"),
        ({"scale_divisor": 0.5}, "scale_divisor is 0.5"),
        ({"scale_divisor": float("nan")}, "scale_divisor is nan"),
        ({"scale_divisor": float("inf")}, "scale_divisor is inf"),
        ({"q_min": -9}, "q_min is -9"),
        ({"q_min": 0}, "q_min is 0"),
    ],
)
def test_scheme(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(Int4Error, match=message):
        Int4Scheme(**arguments)


def test_scheme_defaults() -> None:
    assert Int4Scheme() == KIMI_QAT == Int4Scheme(32, 7.0, -7)
    assert KIMI_QAT.q_max == 7


@pytest.mark.parametrize(
    ("packed", "scale", "shape", "message"),
    [
        (PACKED.long(), SCALE, (4, 64), "packed is torch.int64: convert it to torch.int32"),
        (PACKED[0], SCALE, (4, 64), "packed is of shape"),
        (PACKED, SCALE, (4, 60), "no multiple of 8"),
        (PACKED, SCALE, (4, 72), r"packed is \(4, 8\).*pass \(4, 9\)"),
        (PACKED, SCALE, (5, 64), r"pass \(5, 8\)"),
        (PACKED, SCALE, (1, 4, 64), "shape has 3 numbers"),
        (PACKED, SCALE.double(), (4, 64), "scale is torch.float64"),
        (PACKED, SCALE[:, 0], (4, 64), "scale is of shape"),
        (PACKED, SCALE[:3], (4, 64), "one per row and group"),
        (PACKED, torch.ones(4, 3), (4, 64), "groups of one size"),
        (PACKED, torch.ones(4, 16), (4, 64), "a multiple of 8"),
        (PACKED, SCALE.to("meta"), (4, 64), "scale is on meta, packed on cpu"),
    ],
)
def test_int4_weight(packed: torch.Tensor, scale: torch.Tensor, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(Int4Error, match=message):
        Int4Weight(packed, scale, shape)  # type: ignore[arg-type]


def test_int4_weight_takes_the_shape_of_a_checkpoint_and_moves() -> None:
    weight = Int4Weight(PACKED, SCALE, torch.tensor([4, 64], dtype=torch.int32))  # type: ignore[arg-type]
    assert weight.shape == (4, 64)
    assert all(type(n) is int for n in weight.shape)
    moved = weight.to("meta")
    assert moved.packed.device.type == moved.scale.device.type == "meta"
    assert moved.shape == weight.shape


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (torch.zeros(4, 12, dtype=torch.int8), "12 columns, which is no multiple of 8"),
        (torch.zeros(4, 8), "codes is torch.float32"),
        (torch.zeros(2, 4, 8, dtype=torch.int8), "one expert at a time"),
        (torch.zeros(0, 8, dtype=torch.int8), "at least one element"),
        (torch.full((4, 8), 8, dtype=torch.int8), "codes range from 8 to 8"),
        (torch.full((4, 8), -9, dtype=torch.int8), "codes range from -9 to -9"),
    ],
)
def test_pack(codes: torch.Tensor, message: str) -> None:
    with pytest.raises(Int4Error, match=message):
        pack(codes)


def test_unpack() -> None:
    with pytest.raises(Int4Error, match=r"packed is \(4, 8\) for a weight of \(4, 32\)"):
        unpack(PACKED, (4, 32))
    with pytest.raises(Int4Error, match=r"packed is torch\.int16"):
        unpack(PACKED.to(torch.int16), (4, 64))


@pytest.mark.parametrize("function", [quantize, fake_quantize])
@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (WEIGHT[:, :40], "40 columns, which is no multiple of 32"),
        (WEIGHT.to(torch.float64), r"weight is torch\.float64: convert it to"),
        (WEIGHT.to(torch.int8), r"weight is torch\.int8"),
        (WEIGHT[0], "weight is of shape"),
        (WEIGHT.expand(2, 4, 64), "one expert at a time"),
        (WEIGHT[:, :0], "at least one element"),
    ],
)
def test_quantize(function: Any, weight: torch.Tensor, message: str) -> None:
    with pytest.raises(Int4Error, match=message):
        function(weight, KIMI_QAT)


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nan_and_inf(dtype: torch.dtype, bad: float) -> None:
    weight = torch.randn(600, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    reference = quantize(weight, KIMI_QAT)
    weight[590, 65] = bad
    message = r"NaN or Inf, first in row 590, columns 64\.\.95"
    for function in (quantize, fake_quantize):
        with pytest.raises(Int4Error, match=message):
            function(weight, KIMI_QAT)
    with pytest.raises(Int4Error, match=message):
        requantize(weight, reference, KIMI_QAT)


def test_inf_that_the_reference_dequantizes_to_is_still_refused() -> None:
    reference = Int4Weight(
        pack(torch.full((1, 32), 7, dtype=torch.int8)),
        torch.full((1, 1), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16),
        (1, 32),
    )
    weight = dequantize(reference)
    assert weight.isinf().all()
    with pytest.raises(Int4Error, match="NaN or Inf"):
        requantize(weight, reference, KIMI_QAT)


def test_dequantize() -> None:
    weight = Int4Weight(PACKED, SCALE, (4, 64))
    with pytest.raises(Int4Error, match=r"dtype is torch\.float64"):
        dequantize(weight, torch.float64)
    with pytest.raises(Int4Error, match=r"out is torch\.float32"):
        dequantize(weight, out=torch.empty(4, 64))
    with pytest.raises(Int4Error, match=r"of \(4, 32\)"):
        dequantize(weight, out=torch.empty(4, 32, dtype=torch.bfloat16))
    with pytest.raises(Int4Error, match="out is on meta"):
        dequantize(weight, out=torch.empty(4, 64, dtype=torch.bfloat16, device="meta"))


def test_requantize() -> None:
    reference = Int4Weight(PACKED, SCALE, (4, 64))
    with pytest.raises(Int4Error, match="pass the same slice"):
        requantize(WEIGHT[:2], reference, KIMI_QAT)
    with pytest.raises(Int4Error, match="groups of 64"):
        requantize(WEIGHT, reference, Int4Scheme(64))
    with pytest.raises(Int4Error, match="convert the weight to the dtype of the scales"):
        requantize(WEIGHT.float(), reference, KIMI_QAT)
    with pytest.raises(Int4Error, match="no multiple of 32"):
        requantize(WEIGHT[:, :40], reference, KIMI_QAT)
