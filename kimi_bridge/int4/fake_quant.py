"""Training through INT4: the forward sees the served values, the gradient passes as if nothing happened."""

from typing import Any

import torch
from torch import Tensor

from kimi_bridge.int4.codec import fake_quantize_values
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
    values = _StraightThrough.apply(weight, scheme)
    for name in _GRADIENT_BUFFER_ATTRIBUTES:
        if hasattr(weight, name):
            setattr(values, name, getattr(weight, name))
    if values.grad_fn is not None:
        # The attributes, not the tensor: a tensor in its own graph would live until the next gc.
        values.grad_fn.attributes = vars(values)
    return values


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, scheme: Int4Scheme) -> Tensor:
        # A GEMM without a gradient to pass on says None; zeros in its place would cost memory.
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return fake_quantize_values(weight, scheme)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        # A GEMM that has added to main_grad says so on the tensor it was given, and returns a dummy whose
        # content is not to be used. Megatron's hook looks for that flag on the parameter.
        if ctx.attributes.get("grad_added_to_main_grad", False):
            ctx.weight.grad_added_to_main_grad = True
        return gradient, None
