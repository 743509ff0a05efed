"""LoRA adapters out of Megatron's shards and into them.

Out: each rank sends its parts of the adapters, all experts of a layer as one tensor, in an exchange whose
number of collectives does not depend on the number of experts. In: each rank reads the file and keeps its
own parts.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.models.conversion.model_bridge import HFWeightTuple
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.lora import LoRA
from megatron.core import parallel_state

from kimi_bridge.adapter.peft_format import (
    Adapter,
    AdapterPlan,
    ModuleSpec,
    Target,
    adapter_writer,
    check_base,
    check_fingerprint,
    check_finite,
    config_dict,
    finish,
    fold_scale,
    load_adapter,
    plan_adapter,
    tensor_name,
)
from kimi_bridge.checkpoint.reader import CheckpointReader
from kimi_bridge.errors import KimiBridgeError
from kimi_bridge.megatron.adapters import Half, Pair, local_pairs
from kimi_bridge.megatron.collective import on_every_rank, raise_together, rank, world_size
from kimi_bridge.megatron.exchange import Piece, exchange
from kimi_bridge.megatron.pretrained import install_source
from kimi_bridge.megatron.transfer import DEFAULT_BUCKET_BYTES

_logger = logging.getLogger("kimi_bridge")
PER_EP_RANK = "one for all experts of an EP rank"


def export_adapter(
    bridge: Any,
    model: list[torch.nn.Module],
    lora: LoRA | CanonicalLoRA,
    dst: str | Path,
    *,
    target: Target = "vllm",
    expand_shared_experts: bool = False,
    base_name: str | None = None,
    overwrite: bool = False,
) -> AdapterPlan:
    """Writes the model's adapters as a PEFT folder. All ranks call it; rank 0 writes.

    Args:
        bridge: the `AutoBridge` that the model came from.
        model: this rank's model chunks, with the adapters of `lora` in them.
        lora: what put the adapters there; its `dim`, `alpha` and `dropout` go into the config.
        dst: the folder to make.
        target: "vllm" has every module's scale folded into its lora_B (in float32, rounded once to the
            adapter's dtype) and `lora_alpha == r`, so that any reader computes the trainer's delta; "peft"
            leaves lora_B as it is and states scales by `alpha_pattern` and `rank_pattern`: take it to resume.
        expand_shared_experts: with `share_expert_adapters=True` the file says that its adapter belongs to
            this EP size, and does not load at another; expanded it is per expert, for a model whose experts
            have an adapter each.
        base_name: how the config names the base model (default: as the bridge was given it).
        overwrite: replace an adapter that is already there.

    Returns:
        What was written; `notes` has "expert_adapters" where the adapter depends on the EP size, `warnings`
        (also logged) tells of what vLLM will not serve.

    Raises:
        KimiBridgeError: no adapters, ranks that disagree about them, NaN or Inf, a folder in use.
    """
    stream = iter_adapter_tensors(
        bridge, model, lora, target=target, expand_shared_experts=expand_shared_experts, base_name=base_name
    )
    stream.receiver = 0
    if rank() == 0:
        for warning in stream.plan.warnings:
            _logger.warning(warning)
    with contextlib.ExitStack() as stack:
        writer = None
        with raise_together():
            if rank() == 0:
                writer = stack.enter_context(adapter_writer(dst, stream.plan, overwrite))
        try:
            for names, matrices in stream.stacks():
                if writer is not None:
                    writer.write_stack(names, matrices)
        finally:
            stream.close()
        with raise_together():
            if writer is not None:
                finish(writer, stream.plan)
    return stream.plan


def iter_adapter_tensors(
    bridge: Any,
    model: list[torch.nn.Module],
    lora: LoRA | CanonicalLoRA,
    *,
    target: Target = "vllm",
    expand_shared_experts: bool = False,
    base_name: str | None = None,
) -> AdapterStream:
    """The adapter as named tensors, the same bytes as `export_adapter` writes, for a sync without a disk.

    All ranks call it, and all iterate. The stream's `config` is the content of `adapter_config.json`.
    Arguments and errors are those of `export_adapter`.
    """
    if type(lora) not in (LoRA, CanonicalLoRA):
        raise KimiBridgeError(
            f"a {type(lora).__name__} is not supported: adapters are exported for Megatron-Bridge's LoRA and"
            " CanonicalLoRA."
        )
    reader = _reader(bridge)
    with raise_together():
        pairs = local_pairs(_registry(bridge), model)
    modules = _all_modules(pairs)
    with raise_together():
        notes = {} if expand_shared_experts else _notes(pairs)
        plan = plan_adapter(
            _in_order(modules, reader),
            reader,
            target,
            rank=lora.dim,
            alpha=lora.alpha,
            dropout=lora.dropout,
            base_name=base_name or str(bridge.hf_pretrained.model_name_or_path),
            notes=notes,
        )
    return AdapterStream(plan, pairs, fold=target == "vllm")


class AdapterStream(Iterator[HFWeightTuple]):
    """`(name, tensor)` of an adapter, in the order of arrival. All ranks iterate to the end, or `close()`.

    `receiver` is the rank that gets the tensors (None: all).

    Raises (while iterating, on every rank):
        CheckpointError: NaN or Inf in an adapter.
    """

    def __init__(self, plan: AdapterPlan, pairs: list[Pair], fold: bool):
        self.plan, self.pairs, self.fold = plan, pairs, fold
        self.receiver: int | None = None
        self._tensors: Generator[HFWeightTuple] | None = None
        self._stacks: Generator[tuple[list[str], torch.Tensor]] | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The content of `adapter_config.json`."""
        return config_dict(self.plan.config)

    def __next__(self) -> HFWeightTuple:
        if self._tensors is None:
            self._tensors = self._one_by_one()
        return next(self._tensors)

    def close(self) -> None:
        """Ends the stream early and tells the other ranks, so that they do not wait."""
        for generator in (self._tensors, self._stacks):
            if generator is not None:
                generator.close()

    def stacks(self) -> Generator[tuple[list[str], torch.Tensor]]:
        """The same in bulk: names, and their matrices `[n, rows, columns]`, those of experts together."""
        self._stacks = self._exchange()
        return self._stacks

    def _one_by_one(self) -> Generator[HFWeightTuple]:
        for names, stack in self.stacks():
            yield from (HFWeightTuple(name, matrix) for name, matrix in zip(names, stack, strict=True))

    def _exchange(self) -> Generator[tuple[list[str], torch.Tensor]]:
        halves = [
            (half, pair.adapter) for pair in self.pairs for half in (pair.a, *pair.bs) if half.is_exported
        ]
        pieces = [_piece(half) for half, _ in halves]
        names = _gather({half.key: (half.part, half.modules) for half, _ in halves})
        tensors = exchange(pieces, map(self._value, halves), DEFAULT_BUCKET_BYTES, self.receiver)
        with contextlib.closing(tensors):
            for key, tensor in tensors:
                part, modules = names[key]
                if len(modules) == 1:
                    # One matrix for all.
                    yield (
                        [tensor_name(module, part) for module in modules[0]],
                        tensor.expand(len(modules[0]), -1, -1),
                    )
                    continue
                for projection in zip(*modules, strict=True):
                    yield [tensor_name(module, part) for module in projection], tensor

    def _value(self, item: tuple[Half, Any]) -> torch.Tensor:
        half, adapter = item
        check_finite(half.key, half.tensor, "the model")
        if half.part == "A" or not self.fold:
            return half.tensor
        return fold_scale(half.tensor, adapter.alpha / adapter.dim)


@dataclass(frozen=True)
class LoadedAdapter:
    """What `load_adapter_into` did on all ranks: modules that the file has, and modules set to no change."""

    loaded: int
    cleared: int


def load_adapter_into(bridge: Any, model: list[torch.nn.Module], path: str | Path) -> LoadedAdapter:
    """Loads a PEFT adapter into the adapters of this rank's model chunks, of any layout. All ranks call it.

    The delta is exact: A and B are the file's bits, and each adapter's alpha becomes the file's. So an
    adapter that was exported for vLLM, whose B holds the scale already, goes on with a scale of 1. Adapters
    of the model that the file does not have are set to no change (B zero). With a distributed optimizer, call
    its `reload_model_params()` afterwards.

    Args:
        bridge: the `AutoBridge` that the model came from.
        model: this rank's model chunks, with adapters in them (`lora(model, training=True)`).
        path: a folder with `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        CheckpointError: a damaged adapter, or one of another base model; NaN or Inf.
        KimiBridgeError: a module that has no adapter in this model, another rank, and what shared adapters
            cannot hold (projections or experts that differ). Nothing has been changed then, on any rank.
    """
    reader = _reader(bridge)
    with raise_together():
        pairs = local_pairs(_registry(bridge), model)
        adapter = load_adapter(path)
        check_fingerprint(adapter, reader)
        check_base(adapter.modules, reader, str(path))
        _check_ep_size(adapter, pairs)
    modules = _all_modules(pairs)
    with raise_together():
        _check_modules(adapter, modules)
        values = [(pair, *_values(adapter, pair)) for pair in pairs]
    with torch.no_grad():
        for pair, alpha, matrices in values:
            for half, value in zip((pair.a, *pair.bs), matrices, strict=True):
                if value is not None:
                    half.tensor.copy_(value)
            if alpha is not None:
                pair.adapter.alpha = alpha
                # The operation fuser keeps the scale it was built with.
                pair.wrapper.__dict__.pop("_fused_branches", None)
    return LoadedAdapter(len(adapter.modules), len(modules.keys() - adapter.modules.keys()))


def _values(adapter: Adapter, pair: Pair) -> tuple[float | None, list[torch.Tensor | None]]:
    """This rank's parts of A and of each B, and alpha; A and alpha None where nothing is said of them."""
    present = [
        module for b in pair.bs for modules in b.modules for module in modules if module in adapter.modules
    ]
    specs = {module: adapter.modules[module] for module in present}
    rank_here = pair.a.full_shape[0]
    for module, spec in specs.items():
        if spec.rank != rank_here:
            raise KimiBridgeError(
                f"{module} has rank {spec.rank} in {adapter.path} and {rank_here} in this model: build it"
                f" with LoRA(dim={spec.rank}), and the normalize_moe_lora that the adapter was trained with."
            )
    alphas = {spec.alpha for spec in specs.values()}
    if len(alphas) > 1:
        raise KimiBridgeError(
            f"{pair.name} has one adapter for modules to which {adapter.path} gives the scales"
            f" {sorted(alpha / rank_here for alpha in alphas)}: export that adapter for vllm, which has none."
        )
    a = _collect(adapter, pair, pair.a)
    bs = [_collect(adapter, pair, b) for b in pair.bs]
    cleared = [torch.zeros_like(half.tensor) if b is None else b for half, b in zip(pair.bs, bs, strict=True)]
    return (alphas.pop() if alphas else None), [a, *cleared]


def _collect(adapter: Adapter, pair: Pair, half: Half) -> torch.Tensor | None:
    """This rank's part of a half from the file; None where the file has none of its modules."""
    if not any(module in adapter.modules for modules in half.modules for module in modules):
        return None
    # A of a module that the file lacks stays as it is, which changes nothing while its B is zero.
    value = half.tensor.clone() if half.part == "A" else torch.zeros_like(half.tensor)
    for place, modules in zip(value, half.modules, strict=True):
        present = [module for module in modules if module in adapter.modules]
        if present and len(present) < len(modules) and half.part == "B":
            raise _differs(adapter, pair, present[0])
        matrices = [adapter.tensor(module, half.part) for module in present]
        for module, matrix in zip(present, matrices, strict=True):
            if not torch.equal(matrix, matrices[0]):
                raise _differs(adapter, pair, module)
        if matrices:
            place.copy_(half.local(matrices[0]))
    return value


def _differs(adapter: Adapter, pair: Pair, module: str) -> KimiBridgeError:
    experts = "share_expert_adapters=False and experts_shared_outer_loras=False"
    # Even with an adapter an expert, LoRA has one A for gate_proj and up_proj; CanonicalLoRA has two.
    cure = experts if pair.a.is_expert else "CanonicalLoRA, which has one for each"
    return KimiBridgeError(
        f"{module} of {adapter.path} differs from others that share an adapter in this model ({pair.name}):"
        f" build the model with {cure}."
    )


def _check_modules(adapter: Adapter, modules: dict[str, ModuleSpec]) -> None:
    missing = [module for module in adapter.modules if module not in modules]
    if missing:
        raise KimiBridgeError(
            f"{adapter.path} adapts {missing[0]}"
            + (f" and {len(missing) - 1:,} more modules" if len(missing) > 1 else "")
            + ", where this model has no adapter: add it to LoRA's target_modules."
        )


def _check_ep_size(adapter: Adapter, pairs: list[Pair]) -> None:
    size = adapter.notes.get("expert_model_parallel_size")
    here = parallel_state.get_expert_model_parallel_world_size()
    depends = adapter.notes.get("expert_adapters") == PER_EP_RANK and size != here
    if depends and any(pair.shared for pair in pairs):
        raise KimiBridgeError(
            f"{adapter.path} holds {PER_EP_RANK}, of {size} EP ranks, and this model has {here}: use EP"
            f" {size}, or a model with share_expert_adapters=False."
        )


def _notes(pairs: list[Pair]) -> dict[str, Any]:
    if not any(pair.shared for pair in pairs):
        return {}
    ep_size = parallel_state.get_expert_model_parallel_world_size()
    return {"expert_adapters": PER_EP_RANK, "expert_model_parallel_size": ep_size}


def _piece(half: Half) -> Piece:
    dim, count = (None, 1) if half.dim is None else (half.dim + 1, half.size)
    return Piece(half.key, half.tensor.dtype, tuple(half.tensor.shape), dim, half.rank, count)


def _all_modules(pairs: list[Pair]) -> dict[str, ModuleSpec]:
    """The adapted modules of all ranks. All ranks call it.

    Raises:
        KimiBridgeError: on every rank: two ranks that describe a module differently, or no adapters at all.
    """
    everywhere = _gather_list({module: spec for pair in pairs for module, spec in pair.specs()})
    modules: dict[str, ModuleSpec] = {}
    for place, theirs in enumerate(everywhere):
        for module, spec in theirs.items():
            if modules.setdefault(module, spec) != spec:
                raise on_every_rank(
                    KimiBridgeError(
                        f"rank {place} has {module} with {spec}, another rank with {modules[module]}: all"
                        " ranks must build the model with the same LoRA."
                    )
                )
    if not modules:
        raise on_every_rank(
            KimiBridgeError(
                "the model holds no adapters on any rank: apply the LoRA to it before, with"
                " lora(model, training=True)."
            )
        )
    return modules


def _in_order(modules: dict[str, ModuleSpec], reader: CheckpointReader) -> dict[str, ModuleSpec]:
    """As the checkpoint has its weights, so that every layout writes the same file."""
    places = {name.removesuffix(".weight"): place for place, name in enumerate(reader.weight_names())}
    return dict(sorted(modules.items(), key=lambda item: (places.get(item[0], len(places)), item[0])))


def _gather(local: dict[str, Any]) -> dict[str, Any]:
    return {key: value for part in _gather_list(local) for key, value in part.items()}


def _gather_list(local: dict[str, Any]) -> list[dict[str, Any]]:
    if world_size() == 1:
        return [local]
    parts: list[dict[str, Any]] = [{}] * world_size()
    dist.all_gather_object(parts, local)
    return parts


def _reader(bridge: Any) -> CheckpointReader:
    return install_source(bridge.hf_pretrained).reader


def _registry(bridge: Any) -> Any:
    model_bridge = bridge._model_bridge
    model_bridge.hf_config = bridge.hf_pretrained.config
    return model_bridge.mapping_registry()
