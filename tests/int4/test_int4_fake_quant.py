"""fake_quantize: served values forward, the gradient untouched, Megatron's gradient buffer kept in reach."""

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from int4_reference import FORMATS, GROUP_KINDS, random_bit_patterns, random_group, same_bits

from kimi_bridge.int4 import KIMI_QAT, RTN, Int4Scheme, dequantize, fake_quantize, quantize

DTYPES = list(FORMATS)


@given(
    dtype=st.sampled_from(DTYPES),
    group_size=st.sampled_from([32, 64, 128]),
    divisor_and_q_min=st.sampled_from([(7.0, -7), (7.5, -8)]),
    kinds=st.lists(st.sampled_from(GROUP_KINDS), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=200, deadline=None)
def test_forward_equals_quantize_and_dequantize(
    dtype: torch.dtype, group_size: int, divisor_and_q_min: tuple[float, int], kinds: list[str], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scheme = Int4Scheme(group_size, *divisor_and_q_min)
    row = torch.cat([random_group(kind, group_size, dtype, generator) for kind in kinds])
    weight = torch.stack([row, row.flip(0)])
    expected = dequantize(quantize(weight, scheme), dtype)
    assert same_bits(fake_quantize(weight, scheme), expected)
    assert same_bits(fake_quantize(weight.t().contiguous().t(), scheme), expected)
    assert same_bits(fake_quantize(torch.nn.Parameter(weight), scheme).detach(), expected)


@pytest.mark.parametrize("scheme", [KIMI_QAT, RTN], ids=["qat", "rtn"])
def test_forward_over_several_blocks_of_rows(scheme: Int4Scheme) -> None:
    weight = random_bit_patterns((700, 2048), torch.bfloat16, torch.Generator().manual_seed(0))
    assert same_bits(fake_quantize(weight, scheme), dequantize(quantize(weight, scheme)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_passes_as_it_is(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(16, 64, generator=generator).to(dtype))
    gradient = random_bit_patterns((16, 64), dtype, generator)
    fake_quantize(weight, KIMI_QAT).backward(gradient)
    assert weight.grad is not None
    assert same_bits(weight.grad, gradient)


def test_gradient_of_a_linear_is_that_of_the_served_weight() -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.nn.Parameter(torch.randn(16, 64, generator=generator))
    x = torch.randn(5, 64, generator=generator, requires_grad=True)
    (x @ fake_quantize(weight, KIMI_QAT).t()).square().sum().backward()
    served = dequantize(quantize(weight, KIMI_QAT), torch.float32).requires_grad_()
    y = x.detach().clone().requires_grad_()
    (y @ served.t()).square().sum().backward()
    assert torch.equal(weight.grad, served.grad)
    assert torch.equal(x.grad, y.grad)


def test_no_graph_where_none_is_wanted() -> None:
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(3))
    assert not fake_quantize(weight, KIMI_QAT).requires_grad
    with torch.no_grad():
        assert not fake_quantize(torch.nn.Parameter(weight), KIMI_QAT).requires_grad


class FusedWeightGradientLinear(torch.autograd.Function):
    """A linear layer that follows Megatron's protocol: add to main_grad, raise the flag, return a dummy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(gradient.t() @ x)
        dummy = None
        if hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True
            dummy = torch.full_like(weight, torch.nan)
        return gradient @ weight, dummy


@pytest.mark.parametrize("has_flag", [True, False])
def test_a_fused_gemm_adds_to_the_parameters_own_buffer(has_flag: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.nn.Parameter(torch.randn(16, 64, generator=generator))
    weight.main_grad = torch.zeros(16, 64)
    weight.zero_out_wgrad = False
    if has_flag:
        weight.grad_added_to_main_grad = False
    expected = torch.zeros(16, 64)
    for _ in range(2):  # two micro batches
        x = torch.randn(5, 64, generator=generator, requires_grad=True)
        values = fake_quantize(weight, KIMI_QAT)
        assert values.main_grad is weight.main_grad
        assert values.zero_out_wgrad is False
        assert not hasattr(values, "overwrite_main_grad")
        gradient = torch.randn(5, 16, generator=generator)
        FusedWeightGradientLinear.apply(x, values).backward(gradient)
        expected += gradient.t() @ x.detach()
    assert torch.equal(weight.main_grad, expected)
    if has_flag:
        assert weight.grad_added_to_main_grad is True
        assert weight.grad is not None  # the dummy, for hooks that want a gradient to be there
    else:
        assert weight.grad is None
        assert not hasattr(weight, "grad_added_to_main_grad")


def test_a_plain_gemm_leaves_the_flag_down() -> None:
    weight = torch.nn.Parameter(torch.randn(16, 64, generator=torch.Generator().manual_seed(5)))
    weight.main_grad = torch.zeros(16, 64)
    weight.grad_added_to_main_grad = False
    fake_quantize(weight, KIMI_QAT).sum().backward()
    assert weight.grad_added_to_main_grad is False
    assert torch.equal(weight.grad, torch.ones(16, 64))
    assert torch.equal(weight.main_grad, torch.zeros(16, 64))


def test_buffers_made_on_demand_are_in_reach() -> None:
    """Megatron-FSDP hangs a method on the parameter instead of a buffer."""
    weight = torch.nn.Parameter(torch.randn(16, 64, generator=torch.Generator().manual_seed(6)))
    buffer = torch.zeros(16, 64)
    weight.__fsdp_param__ = True
    weight.get_main_grad = lambda: buffer
    weight.overwrite_main_grad = True
    values = fake_quantize(weight, KIMI_QAT)
    assert values.__fsdp_param__ is True
    assert values.get_main_grad() is buffer
    assert values.overwrite_main_grad is True


@pytest.mark.parametrize("backward", [True, False])
def test_the_values_are_freed_without_the_garbage_collector(backward: bool) -> None:
    weight = torch.nn.Parameter(torch.randn(16, 64, generator=torch.Generator().manual_seed(7)))
    weight.main_grad = torch.zeros(16, 64)
    gc.collect()
    gc.disable()
    try:
        values = fake_quantize(weight, KIMI_QAT)
        alive = weakref.ref(values)
        if backward:
            values.sum().backward()
        del values
        assert alive() is None
    finally:
        gc.enable()
