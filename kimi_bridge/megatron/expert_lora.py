"""Adapters on experts under tensor parallelism, made to compute `scale * B A` and its gradients.

With expert tensor parallelism each rank's linear_fc2 returns a part of a sum, which the token dispatcher adds
up over the ranks, and the dispatcher's backward adds up what the ranks' linear_fc1 pass back. The adapters of
Megatron-Bridge (0.6.2) do not follow: on linear_fc2 they return whole results, computed from A's product with
this rank's columns alone, and on linear_fc1 the gradients of A are lost in a gather that autograd does not
see, or stay partial. Here A's products are gathered (linear_fc1) or summed (linear_fc2) over the ranks, with
the right backward, and on linear_fc2 each rank adds the rows that its part of B gives.

The shared experts' linear_fc2 returns a part of a sum, too, where `moe_shared_expert_overlap` is on (the
DeepSeek-V3 provider's default), and its adapter a whole result, which was added once a rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.peft.utils import GroupedExpertLinearAdapter, ParallelLinearAdapter
from megatron.core import parallel_state


def correct_expert_adapters() -> None:
    """From now on, adapters are built so. Idempotent."""
    for kind in (GroupedExpertLinearAdapter, ParallelLinearAdapter):
        if not hasattr(kind.__init__, "_kimi_bridge"):
            kind.__init__ = _corrected(kind.__init__)  # type: ignore[method-assign]


def undo_correction() -> None:
    """From now on, adapters are built as Megatron-Bridge has them."""
    for kind in (GroupedExpertLinearAdapter, ParallelLinearAdapter):
        if hasattr(kind.__init__, "_kimi_bridge"):
            kind.__init__ = kind.__init__.__wrapped__  # type: ignore[method-assign]


def _corrected(constructor: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(constructor)
    def wrapped(adapter: Any, *args: Any, **kwargs: Any) -> None:
        constructor(adapter, *args, **kwargs)
        if adapter.is_expert:
            if _size() > 1:
                _correct(adapter)
        elif adapter.input_is_parallel and kwargs.get("disable_tensor_parallel_comm") and _tp_size() > 1:
            _add_own_rows(adapter, parallel_state.get_tensor_model_parallel_rank, _tp_size)

    wrapped._kimi_bridge = True  # type: ignore[attr-defined]
    return wrapped


def _correct(adapter: Any) -> None:
    is_fc2 = adapter.input_is_parallel
    # The activation stands between A and B; for LoRA it does nothing.
    between = torch.nn.Sequential(_Between(_AllReduce if is_fc2 else _Gather), adapter.activation)
    if isinstance(adapter, GroupedExpertLinearAdapter):
        # Called for what comes out of B on linear_fc2, and for what comes out of A on linear_fc1.
        if is_fc2:
            adapter.activation = between
            adapter._gather_along_last_dim = lambda output: _own_rows(output, _rank(), _size())
        else:
            adapter._gather_along_last_dim = _Gather.apply
        return
    adapter.activation = between
    if is_fc2:
        _add_own_rows(adapter, _rank, _size)
    else:
        adapter.linear_in.gather_output = False


def _add_own_rows(adapter: Any, rank: Callable[[], int], size: Callable[[], int]) -> None:
    adapter.linear_out.gather_output = False
    adapter.register_forward_hook(lambda _module, _inputs, output: _own_rows(output, rank(), size()))


class _Between(torch.nn.Module):
    def __init__(self, function: type[torch.autograd.Function]):
        super().__init__()
        self.function = function

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.function.apply(hidden)


class _AllReduce(torch.autograd.Function):
    """The sum over the ranks. Each uses it for rows of its own, so their gradients are summed as well."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return _all_reduce(gradient)


class _Gather(torch.autograd.Function):
    """The ranks' columns side by side; the same of their gradients' sum comes back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(_size())]
        dist.all_gather(parts, tensor.contiguous(), group=_group())
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return _all_reduce(gradient).chunk(_size(), dim=-1)[_rank()]


def _all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=_group())
    return total


def _own_rows(output: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """`[..., out / size]` to `[..., out]`, with zeros where other ranks' rows are."""
    width = output.shape[-1]
    return torch.nn.functional.pad(output, (rank * width, (size - 1 - rank) * width))


def _group() -> Any:
    return parallel_state.get_expert_tensor_parallel_group()


def _rank() -> int:
    return parallel_state.get_expert_tensor_parallel_rank()


def _size() -> int:
    return parallel_state.get_expert_tensor_parallel_world_size() if parallel_state.is_initialized() else 1


def _tp_size() -> int:
    return parallel_state.get_tensor_model_parallel_world_size() if parallel_state.is_initialized() else 1
