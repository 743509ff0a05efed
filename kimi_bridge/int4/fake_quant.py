"""Training through INT4: the forward sees the served values, the gradient passes as if nothing happened."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kimi_bridge.int4.codec import fake_quantize_values, served_values
from kimi_bridge.int4.scheme import Int4Scheme

# What the fused weight-gradient GEMMs read off the weight they are given: Megatron's
# `LinearWithGradAccumulationAndAsyncCommunication` and Transformer Engine's `_Linear` and `_GroupedLinear`.
# The last two are Megatron-FSDP's, which creates the buffer only when it is asked for.
_GRADIENT_BUFFER_ATTRIBUTES = (
    "main_grad",
    "grad_added_to_main_grad",
    "zero_out_wgrad",
    "overwrite_main_grad",
    "get_main_grad",
    "__fsdp_param__",
)


def fake_quantize(weight: Tensor, scheme: Int4Scheme) -> Tensor:
    """What the server will compute with, as a differentiable function of the weight.

    weight: bfloat16, float16 or float32 `[out, in]`. Returns the same shape and dtype, equal to
    `dequantize(quantize(weight, scheme), weight.dtype)` bit for bit; its gradient is the weight's gradient.
    A gradient buffer that Megatron hung on the weight (`main_grad` and its flags) hangs on the result too,
    and a GEMM that adds to it is reported back to the weight.
    Raises Int4Error as `quantize` does.
    """
    return _straight_through([weight], lambda weights: (fake_quantize_values(weights[0], scheme),))[0]


def fake_quantize_all(weights: Sequence[Tensor], scheme: Int4Scheme) -> list[Tensor]:
    """`fake_quantize` of each of several matrices of one shape, dtype and device, on a GPU in one launch.

    Raises Int4Error as `quantize` does; but on a GPU a group with NaN or Inf gives NaN or Inf, since looking
    for them would make every forward pass wait for the GPU.
    """
    references = [None] * len(weights)
    return _straight_through(weights, lambda given: served_values(given, references, scheme).unbind())


def _straight_through(
    weights: Sequence[Tensor], compute: Callable[[Sequence[Tensor]], Sequence[Tensor]]
) -> list[Tensor]:
    results = _StraightThrough.apply(compute, *weights)
    for weight, values in zip(weights, results, strict=True):
        for name in _GRADIENT_BUFFER_ATTRIBUTES:
            if hasattr(weight, name):
                setattr(values, name, getattr(weight, name))
    if results[0].grad_fn is not None:
        # The attributes, not the tensors: a tensor in its own graph would live until the next gc.
        results[0].grad_fn.attributes = [vars(values) for values in results]
    return list(results)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, compute: Callable[[Sequence[Tensor]], Sequence[Tensor]], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        # A GEMM without a gradient to pass on says None; zeros in its place would cost memory.
        ctx.set_materialize_grads(False)
        ctx.weights = weights
        return tuple(compute(weights))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # A GEMM that has added to main_grad says so on the tensor it was given, and returns a dummy whose
        # content is not to be used. Megatron's hook looks for that flag on the parameter.
        for weight, attributes in zip(ctx.weights, ctx.attributes, strict=True):
            if attributes.get("grad_added_to_main_grad", False):
                weight.grad_added_to_main_grad = True
        return None, *gradients
