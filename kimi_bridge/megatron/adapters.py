"""Which part of which LoRA pair an adapter of Megatron-Bridge holds on this rank.

A fused linear has one adapter: its A is the A of gate_proj and of up_proj, its B is theirs one above the
other. Grouped experts have a matrix each, or one that all of a rank's experts share, or one half of each
kind. CanonicalLoRA has one adapter a projection. All of it is told in `Half`: one tensor, and which
modules of the checkpoint each matrix in it belongs to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.bridge.models.conversion.model_bridge import _megatron_local_name_to_global
from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.canonical_lora import ModuleDict
from megatron.bridge.peft.utils import (
    GroupedExpertLinearAdapter,
    PackedPerExpertLinear,
    ParallelLinearAdapter,
    SharedOuterGroupedExpertAdapter,
)
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from kimi_bridge.adapter.peft_format import ModuleSpec, Part, tensor_name
from kimi_bridge.errors import KimiBridgeError
from kimi_bridge.megatron.shards import speaks
from kimi_bridge.megatron.transfer import unwrap

_EXPERT = re.compile(r"(?<=\.mlp\.experts\.)\d+(?=\.)")
_CANONICAL = {"adapter_gate": "gate", "adapter_up": "up"}


@dataclass(frozen=True)
class Half:
    """A or B of an adapter on this rank.

    `tensor` `[n, rows, columns]` is a view of the parameter; matrix `i` is that of each module in
    `modules[i]`. `dim` (0 or 1) is the dimension of a matrix that tensor parallelism splits over `size`
    ranks, of which this is number `rank`; None: it is whole.
    """

    part: Part
    modules: tuple[tuple[str, ...], ...]
    tensor: torch.Tensor
    dim: int | None
    rank: int
    size: int
    is_expert: bool

    @property
    def key(self) -> str:
        """The same on all tensor-parallel ranks, and of no other half."""
        return tensor_name(self.modules[0][0], self.part)

    @property
    def is_exported(self) -> bool:
        """Whether this rank speaks for the half: copies on other ranks stay silent."""
        return speaks(self.dim, self.rank, self.is_expert)

    @property
    def full_shape(self) -> tuple[int, int]:
        """Of a whole matrix."""
        rows, columns = self.tensor.shape[1:]
        return (rows * (self.size if self.dim == 0 else 1), columns * (self.size if self.dim == 1 else 1))

    def local(self, matrix: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole matrix."""
        if self.dim is None:
            return matrix
        length = self.tensor.shape[1 + self.dim]
        return matrix.narrow(self.dim, self.rank * length, length)


@dataclass(frozen=True)
class Pair:
    """One adapter of Megatron-Bridge on this rank: its A, and its B for each projection it adapts.

    `shared` tells that the experts of a rank share a half.
    """

    adapter: Any
    wrapper: Any
    name: str
    a: Half
    bs: tuple[Half, ...]
    shared: bool

    def specs(self) -> Iterator[tuple[str, ModuleSpec]]:
        """Rank, alpha, dtype and shape of the weight, for each module."""
        rank, width = self.a.full_shape
        for b in self.bs:
            spec = ModuleSpec(rank, float(self.adapter.alpha), self.a.tensor.dtype, (b.full_shape[0], width))
            for modules in b.modules:
                yield from ((module, spec) for module in modules)


def local_pairs(registry: Any, model: list[Any]) -> list[Pair]:
    """This rank's adapters.

    Args:
        registry: the bridge's `mapping_registry()`.
        model: this rank's model chunks.

    Raises:
        KimiBridgeError: an adapter of a kind that LoRA and CanonicalLoRA do not make, or on a module that
            the checkpoint has no weight for.
    """
    chunks = unwrap(model)
    pairs = []
    for stage, chunk in enumerate(chunks):
        for name, wrapper in chunk.named_modules():
            if isinstance(wrapper, AdapterWrapper):
                targets = _targets(registry, chunks, stage, name, wrapper)
                for key, adapter in _adapters(wrapper):
                    pairs.append(_pair(name, wrapper, key, adapter, targets))
    return pairs


def _adapters(wrapper: Any) -> Iterator[tuple[str | None, Any]]:
    if isinstance(wrapper.adapter, ModuleDict):
        yield from ((key, adapter) for key, adapter in wrapper.adapter.items() if adapter is not None)
    else:
        yield None, wrapper.adapter


def _targets(registry: Any, chunks: list[Any], stage: int, name: str, wrapper: Any) -> list[dict[str, str]]:
    """The checkpoint modules behind a wrapped linear by role ("gate", "up", or ""), an entry an expert."""
    count = getattr(wrapper.to_wrap, "num_gemms", None) if ".mlp.experts.linear_fc" in name else None
    local = f"{name}.weight" if count is None else f"{name}.weight0"
    mapping = registry.megatron_to_hf_lookup(
        _megatron_local_name_to_global(chunks, chunks[0].config, local, stage)
    )
    if mapping is None:
        raise KimiBridgeError(
            f"{name} has an adapter, but no weight of the checkpoint belongs to it: leave it out of"
            " target_modules."
        )
    names = {"": mapping.hf_param} if isinstance(mapping.hf_param, str) else mapping.hf_param
    if len(names) > 1 and list(names) != ["gate", "up"]:
        raise KimiBridgeError(f"{name} fuses {', '.join(names)}, which no Kimi model does.")
    first = {role: weight.removesuffix(".weight") for role, weight in names.items()}
    if count is None:
        return [first]
    # Looked up once: the experts of a rank are numbered in a row.
    begin = int(_EXPERT.search(next(iter(first.values())))[0])  # type: ignore[index]
    return [
        {role: _EXPERT.sub(str(begin + i), module) for role, module in first.items()} for i in range(count)
    ]


def _pair(name: str, wrapper: Any, key: str | None, adapter: Any, targets: list[dict[str, str]]) -> Pair:
    kinds = (ParallelLinearAdapter, GroupedExpertLinearAdapter, SharedOuterGroupedExpertAdapter)
    roles = tuple(targets[0]) if key is None else (_CANONICAL.get(key, key),)
    if not isinstance(adapter, kinds) or not set(roles) <= set(targets[0]):
        raise KimiBridgeError(
            f"{name} has a {type(adapter).__name__} ({key or 'one adapter'}): only the adapters that LoRA and"
            " CanonicalLoRA put on the model's linears can be exported and loaded."
        )
    if isinstance(adapter, SharedOuterGroupedExpertAdapter) and _etp_size() > 1:
        raise KimiBridgeError(
            f"{name}: Megatron-Bridge does not split experts_shared_outer_loras over expert tensor"
            " parallelism: use expert_tensor_parallel_size=1."
        )
    weight_a, weight_b = _weight(adapter, "linear_in"), _weight(adapter, "linear_out")
    parts = weight_b.chunk(len(roles), dim=1)
    return Pair(
        adapter=adapter,
        wrapper=wrapper,
        name=name,
        a=_half("A", adapter, "linear_in", weight_a, targets, roles),
        bs=tuple(
            _half("B", adapter, "linear_out", part, targets, (role,))
            for part, role in zip(parts, roles, strict=True)
        ),
        shared=len(targets) > 1 and len(weight_a) * len(weight_b) == 1,
    )


def _weight(adapter: Any, side: str) -> torch.Tensor:
    """`[n, rows, columns]`."""
    weight = getattr(adapter, side).weight.data
    return weight if weight.ndim == 3 else weight.unsqueeze(0)


def _half(
    part: Part,
    adapter: Any,
    side: str,
    tensor: torch.Tensor,
    targets: list[dict[str, str]],
    roles: tuple[str, ...],
) -> Half:
    each = tuple(tuple(target[role] for role in roles) for target in targets)
    if len(tensor) == 1 and len(each) > 1:
        each = (tuple(module for modules in each for module in modules),)
    dim, is_expert = _split_dim(adapter, side), bool(adapter.is_expert)
    rank, size = _tp_place(is_expert)
    return Half(part, each, tensor, None if size == 1 else dim, rank, size, is_expert)


def _split_dim(adapter: Any, side: str) -> int | None:
    linear = getattr(adapter, side)
    if isinstance(linear, ColumnParallelLinear):
        return 0
    if isinstance(linear, RowParallelLinear):
        return 1
    if isinstance(linear, PackedPerExpertLinear):
        return None
    # GroupedExpertLinearAdapter's axes count the experts'.
    return getattr(adapter, f"_{side}_tp_axis") - 1


def _tp_place(is_expert: bool) -> tuple[int, int]:
    if is_expert:
        return parallel_state.get_expert_tensor_parallel_rank(), _etp_size()
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def _etp_size() -> int:
    return parallel_state.get_expert_tensor_parallel_world_size()
