"""Fake-INT4 training: the routed experts' GEMMs compute with the weights that an engine will serve.

While an expert linear runs, forward or backward, its parameters point at the served values; between times
they point at the masters. The parameters themselves go into the GEMM, so that gradients, `main_grad` and the
flags of fused gradient accumulation reach them as they always do: the straight-through estimator, without
a tensor in between. The served values of one linear exist only while it runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state

from kimi_bridge.errors import KimiBridgeError
from kimi_bridge.int4 import KIMI_QAT, Int4Scheme, Int4Weight, served_values
from kimi_bridge.megatron.collective import raise_together, sum_over_ranks
from kimi_bridge.megatron.shards import local_shards, mark, origin_of
from kimi_bridge.megatron.transfer import unwrap

_STATE = "_kimi_fake_int4"
# TEGroupedMLP's two linears, and those of each of SequentialMLP's experts; under LoRA the wrapped one.
_EXPERT_LINEAR = re.compile(r"\.mlp\.experts\.(local_experts\.\d+\.)?linear_fc[12](\.to_wrap)?$")
_WEIGHT = re.compile(r"weight\d*$")


@dataclass(frozen=True)
class FakeInt4Report:
    """What `enable_fake_int4` covers, over all ranks. Gate and up of an expert count as one weight.

    `trained` are quantized whenever they are used; `frozen` are served values already and cost nothing;
    `snapped` of those were not, and were set to them once. Of the `groups`, `not_fixed` would change if they
    were quantized again although the checkpoint has them so: they are used as they are until they change.
    """

    trained: int
    frozen: int
    snapped: int
    groups: int
    not_fixed: int

    def __str__(self) -> str:
        return (
            f"fake INT4 on {self.trained + self.frozen:,} expert weights: {self.trained:,} trained,"
            f" {self.frozen:,} frozen ({self.snapped:,} of them snapped); {self.not_fixed:,} of"
            f" {self.groups:,} groups are no fixed point of the scheme and keep the checkpoint's codes"
        )


def enable_fake_int4(model: list[Any], scheme: Int4Scheme = KIMI_QAT, bridge: Any = None) -> FakeInt4Report:
    """Makes the routed experts compute with the values that an INT4 export would serve. All ranks call it.

    Groups that are still what the checkpoint holds are used as they are; changed ones are quantized by
    `scheme`. Call it after the weights are loaded and after parameters are frozen: a frozen weight is
    compared (and, if it came from bf16, set to its served values) once and costs nothing afterwards.

    Args:
        model: this rank's model chunks, wrapped or not.
        scheme: how a changed group is quantized; its group size must be the checkpoint's.
        bridge: the `AutoBridge` of the INT4 checkpoint, for a model whose weights came from a Megatron
            checkpoint; weights loaded by this library know where they came from.

    Raises:
        KimiBridgeError: no routed experts, FP8 weights, or a tensor-parallel shard that splits a group.
        Int4Error: a weight with NaN or Inf.
    """
    disable_fake_int4(model)
    if bridge is not None:
        _mark_origins(bridge, model)
    counts = dict.fromkeys(("trained", "frozen", "snapped", "groups", "not_fixed"), 0)
    with raise_together(), torch.no_grad():
        for name, module in _expert_linears(model):
            _enable(name, module, scheme, counts)
    report = FakeInt4Report(*sum_over_ranks(_without_copies(counts)))
    if report.trained + report.frozen == 0:
        raise KimiBridgeError(
            "no routed experts were found on any rank: fake INT4 covers TEGroupedMLP and SequentialMLP"
            " (mlp.experts.linear_fc1, mlp.experts.local_experts.N.linear_fc1)."
        )
    return report


def disable_fake_int4(model: list[Any]) -> None:
    """Lets the experts compute with their masters again. Frozen weights that were snapped stay so."""
    for _, module in _expert_linears(model):
        state = module.__dict__.pop(_STATE, None)
        if state is not None:
            state.restore()
            module.forward = state.forward
            if "forward" not in state.own_attributes:
                del module.forward


def _enable(name: str, module: Any, scheme: Int4Scheme, counts: dict[str, int]) -> None:
    weights = [param for key, param in module.named_parameters(recurse=False) if _WEIGHT.match(key)]
    references: list[Int4Weight | None] = []
    for param in weights:
        _check(name, param, scheme)
        reference, not_fixed = _needed_reference(param, scheme)
        references.append(reference)
        counts["groups"] += param.numel() // scheme.group_size
        counts["not_fixed"] += not_fixed
    if any(param.requires_grad for param in weights):
        counts["trained"] += len(weights)
        if any(reference is not None for reference in references):
            # All or none, for one launch: a reference that is not needed changes nothing.
            pairs = zip(weights, references, strict=True)
            references = [reference or _reference(param) for param, reference in pairs]
        _Swap(module, weights, references, scheme).install()
        return
    counts["frozen"] += len(weights)
    for param, reference in zip(weights, references, strict=True):
        served = _served([param.data], [reference], scheme)[0]
        if not torch.equal(served, param.data):
            counts["snapped"] += 1
            param.data.copy_(served)


def _without_copies(counts: dict[str, int]) -> list[int]:
    """This rank's share of the totals: no data-parallel copies, and a sharded weight once."""
    if parallel_state.get_expert_data_parallel_rank() != 0:
        return [0] * len(counts)
    whole = parallel_state.get_expert_tensor_parallel_rank() == 0
    return [count if whole or key in ("groups", "not_fixed") else 0 for key, count in counts.items()]


def _needed_reference(param: Any, scheme: Int4Scheme) -> tuple[Int4Weight | None, int]:
    """The checkpoint's codes, if quantizing again would change groups that are still as it has them.

    Also the number of those groups.
    """
    again = _served([param.data], [None], scheme)[0]
    if torch.equal(again, param.data):
        return None, 0
    reference = _reference(param)
    if reference is None:
        return None, 0
    kept = _served([param.data], [reference], scheme)[0]
    not_fixed = int((kept != again).unflatten(-1, (-1, scheme.group_size)).any(-1).sum())
    return (reference, not_fixed) if not_fixed else (None, 0)


def _reference(param: Any) -> Int4Weight | None:
    origin = origin_of(param)
    return None if origin is None else origin.int4(param.device)


def _served(
    masters: list[torch.Tensor], references: list[Int4Weight | None], scheme: Int4Scheme
) -> torch.Tensor:
    """`served_values` in the dtype of the masters.

    Engines serve bfloat16 (or what the checkpoint's scales are), so float32 masters are rounded first, as
    the export rounds them.
    """
    dtype = masters[0].dtype
    given = next((reference for reference in references if reference is not None), None)
    if given is not None:
        dtype = given.scale.dtype
    elif dtype == torch.float32:
        dtype = torch.bfloat16
    return served_values([master.to(dtype) for master in masters], references, scheme).to(masters[0].dtype)


def _check(name: str, param: Any, scheme: Int4Scheme) -> None:
    if type(param.data) is not torch.Tensor:
        raise KimiBridgeError(
            f"{name} holds a {type(param.data).__name__}: fake INT4 needs plain weights (fp8_param=False)."
        )
    if param.shape[1] % scheme.group_size:
        raise KimiBridgeError(
            f"{name}: tensor parallelism leaves {param.shape[1]} columns, which splits a group of"
            f" {scheme.group_size}: use a smaller expert_tensor_parallel_size."
        )


def _expert_linears(model: list[Any]) -> Iterator[tuple[str, Any]]:
    for chunk in unwrap(model):
        for name, module in chunk.named_modules():
            if _EXPERT_LINEAR.search(f".{name}") and any(_WEIGHT.match(key) for key in module._parameters):
                yield name, module


def _mark_origins(bridge: Any, model: list[Any]) -> None:
    tasks = bridge.get_conversion_tasks(unwrap(model))
    reader = bridge.hf_pretrained.state.source.reader
    for shard in local_shards(tasks, reader):
        mark(shard, reader)


class _Swap:
    """Points one linear's parameters at the served values while it runs, and back."""

    def __init__(
        self, module: Any, weights: list[Any], references: list[Int4Weight | None], scheme: Int4Scheme
    ):
        self.module, self.weights, self.references, self.scheme = module, weights, references, scheme
        self.forward: Callable[..., Any] = module.forward
        self.own_attributes = frozenset(module.__dict__)
        self.masters: list[torch.Tensor] | None = None

    def install(self) -> None:
        """Wraps this module's forward; its class and other models keep theirs."""
        self.module.__dict__[_STATE] = self
        self.module.forward = self.run

    def run(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The linear's forward; its backward finds the served values in place, too."""
        self.restore()
        backward = torch.is_grad_enabled() and hidden.requires_grad
        if backward:
            hidden = _InBackward.apply(hidden, self.restore)
        self.swap()
        try:
            result = self.forward(hidden, *args, **kwargs)
        finally:
            self.restore()
        if not backward:
            return result
        if isinstance(result, tuple):
            return _InBackward.apply(result[0], self.swap), *result[1:]
        return _InBackward.apply(result, self.swap)

    @torch.no_grad()
    def swap(self) -> None:
        """Nothing is kept from one use to the next: no optimizer can leave a stale value behind."""
        self.restore()
        masters = [param.data for param in self.weights]
        served = _served(masters, self.references, self.scheme)
        self.masters = masters
        for param, values in zip(self.weights, served, strict=True):
            param.data = values

    def restore(self) -> None:
        """Back to the masters; also after a backward that an error cut short."""
        if self.masters is not None:
            for param, master in zip(self.weights, self.masters, strict=True):
                param.data = master
            self.masters = None


class _InBackward(torch.autograd.Function):
    """Passes a tensor through, and does something when its gradient comes by."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, action: Callable[[], None]) -> torch.Tensor:
        ctx.action = action
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.action()
        return gradient, None
