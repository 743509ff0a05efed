"""SkyRL's fake quantization by this library's kernels: the same values, whatever the input."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_bridge.errors import Int4Error
from kimi_bridge.int4 import KIMI_QAT, dequantize, quantize
from kimi_bridge.integrations import skyrl
from kimi_bridge.integrations.skyrl import fake_int4

pytest.importorskip("skyrl")

MODULE = "skyrl.backends.skyrl_train.workers.megatron.fake_int4_qat"
CONVENTIONS = [(32, 7.0, -7), (32, 7.5, -8), (32, 7.5, -8.0), (128, 7.0, -7.0)]


@pytest.fixture(scope="module")
def original() -> Callable[..., Any]:
    return importlib.import_module(MODULE).fake_int4_quantize_ste


@pytest.fixture
def installed() -> Iterator[Callable[..., Any]]:
    """What SkyRL's worker calls once the plugin is there."""
    module = importlib.import_module(MODULE)
    skyrl.install()
    yield module.fake_int4_quantize_ste
    skyrl.uninstall()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many matrices this library's kernels have done."""
    from kimi_bridge.int4 import fake_quant

    done: list[int] = []
    kernel = fake_quant.served_values
    monkeypatch.setattr(
        fake_quant,
        "served_values",
        lambda weights, *rest: done.append(len(weights)) or kernel(weights, *rest),
    )
    return done


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    # Bit for bit but for the sign of zero, which an engine's codes do not have.
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[theirs.element_size()]
    assert torch.equal((ours + 0.0).view(bits), (theirs + 0.0).view(bits))
    zeros = ours == 0
    assert not ours[zeros].signbit().any() or ours.dtype == torch.float32


@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 9),
    groups=st.integers(1, 5),
    convention=st.sampled_from(CONVENTIONS),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    exponent=st.floats(-6, 4),
)
@settings(max_examples=200, deadline=None)
def test_random_matrices(
    original: Callable[..., Any],
    seed: int,
    rows: int,
    groups: int,
    convention: tuple[int, float, float],
    dtype: torch.dtype,
    exponent: float,
) -> None:
    weight = torch.randn(rows, groups * convention[0], generator=torch.Generator().manual_seed(seed))
    weight = (weight * 10**exponent).clamp(-60000, 60000).to(dtype)
    same(fake_int4(original)(weight, *convention), original(weight, *convention))


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_finite_bit_pattern(
    original: Callable[..., Any], dtype: torch.dtype, convention: tuple[int, float, float]
) -> None:
    """Each as the largest of its group, beside each other one of its size, denormals and zeros included."""
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    patterns = patterns[patterns.isfinite()]
    size = convention[0]
    # A few neighbours of each, scaled down: ties and values just beside them.
    steps = torch.linspace(-1, 1, size - 1)
    weight = torch.cat([patterns[:, None].float(), patterns[:, None].float() * steps], 1).to(dtype)
    same(fake_int4(original)(weight, *convention), original(weight, *convention))


def test_special_groups(original: Callable[..., Any]) -> None:
    tiny = torch.finfo(torch.bfloat16).smallest_normal
    groups = [
        torch.zeros(32),
        -torch.zeros(32),
        torch.full((32,), tiny / 64),
        torch.full((32,), -tiny),
        torch.tensor([7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -7.0] * 4),
        torch.tensor([7.5, -8.0, 7.0, -7.5] * 8),
        torch.full((32,), torch.finfo(torch.bfloat16).max),
        torch.tensor([1e30] + [1e-30] * 31),
    ]
    weight = torch.stack(groups).to(torch.bfloat16)
    for convention in CONVENTIONS[:3]:
        same(fake_int4(original)(weight, *convention), original(weight, *convention))
        same(fake_int4(original)(weight.t().contiguous().t(), *convention), original(weight, *convention))


@pytest.mark.parametrize(
    ("weight", "convention"),
    [
        (torch.randn(4, 70).bfloat16(), (32, 7.5, -8)),
        (torch.randn(4, 24).bfloat16(), (12, 7.5, -8)),
        (torch.randn(4, 64), (32, 7.0, -7)),
        (torch.randn(4, 64).double(), (32, 7.0, -7)),
        (torch.randn(4, 64).bfloat16(), (32, 7.0, -6.5)),
        (torch.randn(4, 64).bfloat16(), (32, 0.5, -8)),
    ],
    ids=["ragged", "odd group", "float32", "float64", "half code", "small divisor"],
)
def test_what_these_kernels_do_not_take_goes_to_skyrls(
    original: Callable[..., Any],
    counted: list[int],
    weight: torch.Tensor,
    convention: tuple[int, float, float],
) -> None:
    assert torch.equal(fake_int4(original)(weight, *convention), original(weight, *convention))
    assert not counted


@pytest.mark.parametrize("shape", [(2, 4, 64), (64,), (0, 64)])
def test_other_shapes_do_as_in_skyrl(original: Callable[..., Any], shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape).bfloat16()
    results = []
    for function in (original, fake_int4(original)):
        try:
            results.append(tuple(function(weight, 32, 7.0, -7).shape))
        except (ValueError, RuntimeError, IndexError) as error:
            results.append(f"{type(error).__name__}: {error}")
    assert results[0] == results[1]
    if len(shape) != 2:
        assert "not enough values" in results[0] or "too many values" in results[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_raises_where_nobody_waits_for_a_gpu(original: Callable[..., Any], value: float) -> None:
    weight = torch.randn(4, 64).bfloat16()
    weight[2, 40] = value
    assert original(weight, 32, 7.0, -7)[2, 32:].isnan().all(), "SkyRL goes on with NaN"
    with pytest.raises(Int4Error, match=r"row 2, columns 32\.\.63"):
        fake_int4(original)(weight, 32, 7.0, -7)


def test_gradients_and_main_grad(original: Callable[..., Any]) -> None:
    for function in (original, fake_int4(original)):
        weight = torch.nn.Parameter(torch.randn(4, 64).bfloat16())
        weight.main_grad = torch.zeros(4, 64)
        values = function(weight, 32, 7.0, -7)
        assert values.main_grad is weight.main_grad
        gradient = torch.randn(4, 64).bfloat16()
        values.backward(gradient)
        assert torch.equal(weight.grad, gradient)
    assert not fake_int4(original)(torch.randn(4, 64).bfloat16(), 32, 7.0, -7).requires_grad


def test_installed_in_skyrls_module(installed: Callable[..., Any], counted: list[int]) -> None:
    weight = torch.randn(4, 64).bfloat16()
    expected = dequantize(quantize(weight, KIMI_QAT))
    assert torch.equal(installed(weight, group_size=32, scale_div=7.0, q_min=-7.0), expected)
    assert counted == [1]
    skyrl.uninstall()
    module = importlib.import_module(MODULE)
    assert not hasattr(module.fake_int4_quantize_ste, "__wrapped__")
    assert not hasattr(module.install_fake_int4_qat, "__wrapped__")


def test_skyrl_0_4_0_has_the_same(original: Callable[..., Any]) -> None:
    """It lies elsewhere there; the file needs no newer Megatron-Bridge."""
    folder = Path(sys.prefix) / "skyrl-0.4.0" / "skyrl/backends/skyrl_train/workers/megatron/quantization"
    if not folder.is_dir():
        pytest.skip("scripts/setup_skyrl.sh puts SkyRL 0.4.0 beside this environment")
    name = "skyrl_040_fake_int4_qat"
    spec = importlib.util.spec_from_file_location(name, folder / "fake_int4_qat.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    for convention in CONVENTIONS:
        newer = module.fake_int4_quantize_ste(weight, *convention)
        assert torch.equal(newer, original(weight, *convention))
        same(fake_int4(module.fake_int4_quantize_ste)(weight, *convention), newer)
