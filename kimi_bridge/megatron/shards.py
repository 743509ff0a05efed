"""Which part of which checkpoint weight a Megatron parameter holds on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.bridge.models.conversion.param_mapping import GatedMLPMapping
from megatron.core import parallel_state

from kimi_bridge.checkpoint.reader import CheckpointReader
from kimi_bridge.errors import CheckpointError, KimiBridgeError
from kimi_bridge.int4 import Int4Weight

_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_ORIGIN = "kimi_int4_origin"
_TP_DIM = {"column": 0, "row": 1, "replicated": None}


@dataclass(frozen=True)
class Shard:
    """One checkpoint weight's part in one Megatron parameter.

    `param` is the parameter, `tensor` the view of it that holds the weight's part, `dim` the dimension
    along which the weight is split over `size` ranks (None: every rank holds all of it), `rank` this
    rank's place among them.
    """

    weight: str
    param: torch.Tensor
    tensor: torch.Tensor
    dim: int | None
    rank: int
    size: int
    is_expert: bool

    @property
    def full_shape(self) -> tuple[int, ...]:
        shape = list(self.tensor.shape)
        if self.dim is not None:
            shape[self.dim] *= self.size
        return tuple(shape)

    def ranges(self, shape: Sequence[int]) -> tuple[slice | None, slice | None]:
        """Rows and columns of the weight of `shape` that this shard covers; None stands for all."""
        if self.dim is None or self.size == 1:
            return None, None
        length = self.tensor.shape[self.dim]
        start = min(self.rank * length, shape[self.dim])
        span = slice(start, min(start + length, shape[self.dim]))
        return (span, None) if self.dim == 0 else (None, span)

    @property
    def is_exported(self) -> bool:
        """Whether this rank is the one that speaks for the shard: copies on other ranks stay silent."""
        return speaks(self.dim, self.rank, self.is_expert)


def speaks(dim: int | None, rank: int, is_expert: bool) -> bool:
    """Whether this rank sends its part of a tensor that is split along `dim` (None: whole on every rank)."""
    if dim is None and rank != 0:
        return False
    if is_expert:
        return parallel_state.get_expert_data_parallel_rank() == 0
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0


def local_shards(tasks: Sequence[Any], reader: CheckpointReader) -> list[Shard]:
    """The shards behind Megatron-Bridge's conversion tasks on this rank, checked against the checkpoint.

    Raises:
        CheckpointError: a weight of another shape than the parameter's.
        KimiBridgeError: a parameter type that cannot be filled slice by slice, or an INT4 group that
            tensor parallelism splits.
    """
    shards = [shard for task in tasks if task.megatron_module is not None for shard in _shards_of(task)]
    for shard in shards:
        _check(shard, reader)
    return shards


@dataclass
class Origin:
    """Which INT4 weights of a checkpoint a parameter's values came from, one below the other.

    Names and ranges only: a tensor here would keep the memory alive that DDP moves parameters out of.
    """

    reader: CheckpointReader
    parts: dict[str, tuple[slice | None, slice | None]]

    def int4(self, device: torch.device) -> Int4Weight:
        """The codes and scales behind the parameter's rows."""
        parts = [self.reader.int4(weight, *ranges) for weight, ranges in self.parts.items()]
        packed = torch.cat([part.packed for part in parts])
        scale = torch.cat([part.scale for part in parts])
        return Int4Weight(packed, scale, (len(packed), parts[0].shape[1])).to(device)


def mark(shard: Shard, reader: CheckpointReader) -> None:
    """Notes on a parameter that its values are those of an INT4 weight."""
    if not reader.is_triplet(shard.weight):
        return
    origin = getattr(shard.param, _ORIGIN, None)
    if origin is None or origin.reader is not reader:
        origin = Origin(reader, {})
        setattr(shard.param, _ORIGIN, origin)
    origin.parts[shard.weight] = shard.ranges(reader.shape(shard.weight))


def origin_of(param: torch.Tensor) -> Origin | None:
    """What `mark` noted; None for a parameter that was not loaded from INT4."""
    return getattr(param, _ORIGIN, None)


def is_vocabulary(weight: str) -> bool:
    """Megatron may pad the rows of these to a multiple; the checkpoint never does."""
    return weight.endswith(_VOCABULARY)


def _shards_of(task: Any) -> list[Shard]:
    mapping, data = task.mapping, _plain(task)

    def shard(weight: str, tensor: torch.Tensor, dim: int | None) -> Shard:
        rank, size = mapping.tp_rank, mapping.tp_size
        return Shard(weight, task.param_weight, tensor, dim, rank, size, mapping.is_expert)

    if isinstance(mapping, GatedMLPMapping):
        gate, up = data.chunk(2, dim=0)
        return [shard(mapping.hf_param["gate"], gate, 0), shard(mapping.hf_param["up"], up, 0)]
    dim = _TP_DIM[mapping._detect_parallelism_type(task.megatron_module)]
    return [shard(mapping.hf_param, data, dim)]


def _plain(task: Any) -> torch.Tensor:
    param = task.param_weight
    data = param.data if isinstance(param, torch.nn.Parameter) else param
    if type(data) is not torch.Tensor:
        raise KimiBridgeError(
            f"{task.param_name} is a {type(data).__name__}: FP8 parameters and Megatron-FSDP shards are not"
            " supported; keep the weights in bf16 (fp8_param=False) under DDP."
        )
    return data


# Parameters that hold a stored dtype's values exactly.
_HOLDS = {
    torch.bfloat16: (torch.bfloat16, torch.float32),
    torch.float16: (torch.float16, torch.float32),
    torch.float32: (torch.float32,),
}


def _check(shard: Shard, reader: CheckpointReader) -> None:
    shape, full = reader.shape(shard.weight), shard.full_shape
    if is_vocabulary(shard.weight):
        # Megatron's parameter may have rows of padding.
        full = (min(full[0], reader.config.text_config.vocab_size), *full[1:])
    if shape != full:
        raise CheckpointError(
            f"{shard.weight} is {list(shape)} in {reader.path}, the model wants {list(full)}: the checkpoint"
            " and the model's configuration do not belong together."
        )
    stored, held = reader.dtype(shard.weight), shard.tensor.dtype
    if held not in _HOLDS.get(stored, ()):
        raise CheckpointError(
            f"{shard.weight} is {stored} in {reader.path}, the model's parameter {held} would round it:"
            " convert the checkpoint to one dtype, or state its own in config.json (text_config.torch_dtype)."
        )
    quantization = reader.quantization
    if reader.is_triplet(shard.weight) and quantization and shard.tensor.shape[1] % quantization.group_size:
        raise KimiBridgeError(
            f"{shard.weight}: {shard.size} tensor-parallel ranks split its groups of"
            f" {quantization.group_size} columns ({shape[1]} / {shard.size}): use a smaller"
            " expert_tensor_parallel_size."
        )
