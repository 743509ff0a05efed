"""INT4 triplets: `weight_packed`, `weight_scale` and `weight_shape` of a module stand for its `weight`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kimi_bridge.checkpoint.quantization import Int4Quantization
from kimi_bridge.checkpoint.shards import Problem, TensorInfo
from kimi_bridge.errors import CheckpointError

PARTS = ("weight_packed", "weight_scale", "weight_shape")
SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPE_DTYPES = (torch.int32, torch.int64)
CODES_PER_WORD = 8


def part_names(weight_name: str) -> tuple[str, str, str]:
    """The names of the packed, scale and shape tensors behind `<module>.weight`."""
    packed, scale, shape = (weight_name.removesuffix("weight") + part for part in PARTS)
    return packed, scale, shape


def group_weights(
    table: Mapping[str, TensorInfo], quantization: Int4Quantization | None, problem: Problem
) -> dict[str, bool]:
    """Logical weights in file order, and whether each is an INT4 triplet.

    `problem` is called for a triplet that is incomplete or of wrong shapes or dtypes, and wherever the
    tensors and the quantization_config disagree about what is INT4.
    """
    weights: dict[str, bool] = {}
    for name in table:
        module, _, parameter = name.rpartition(".")
        weights[f"{module}.weight" if parameter in PARTS else name] = parameter in PARTS
    for name, is_triplet in weights.items():
        should_be = quantization is not None and quantization.is_int4(name)
        fault = None
        if is_triplet:
            fault = _triplet_fault(name, table, quantization if should_be else None)
        elif should_be:
            fault = (
                f"{name} ({table[name].filename}) is a plain tensor, but the quantization_config says that "
                "it is INT4: remove quantization_config from config.json, or restore the INT4 tensors."
            )
        if fault:
            problem(fault)
    return weights


def check_shape_values(
    weight_name: str, info: TensorInfo, stated: torch.Tensor, shape: tuple[int, int]
) -> None:
    """Raises CheckpointError unless the tensor `weight_shape` holds `shape`."""
    if tuple(stated.tolist()) != shape:
        raise CheckpointError(
            f"{info.name} ({info.filename}) holds {stated.tolist()}, but the packed codes of {weight_name} "
            f"are of shape {list(shape)}: download the file again."
        )


def _triplet_fault(
    weight_name: str, table: Mapping[str, TensorInfo], quantization: Int4Quantization | None
) -> str | None:
    parts = [table.get(name) for name in part_names(weight_name)]
    there = [info for info in parts if info is not None]
    names = part_names(weight_name)
    if len(there) < len(parts):
        missing = ", ".join(name for name in names if name not in table)
        return (
            f"{missing} is missing, but {there[0].name} is there ({there[0].filename}): an INT4 weight needs "
            "packed, scale and shape; download the checkpoint again."
        )
    where = f"({', '.join(dict.fromkeys(info.filename for info in there))})"
    if weight_name in table:
        return f"{weight_name} {where} is there both plain and as INT4: remove one of them."
    if quantization is None:
        return (
            f"{weight_name} {where} is an INT4 triplet, but the quantization_config does not say so: "
            "use the config.json that belongs to these weights."
        )
    packed, scale, shape = there
    if packed.dtype != torch.int32 or len(packed.shape) != 2 or not packed.nbytes:
        return _wrong(packed, "int32 [out, in/8]")
    rows, columns = packed.shape[0], packed.shape[1] * CODES_PER_WORD
    groups, rest = divmod(columns, quantization.group_size)
    if rest:
        return _wrong(packed, f"int32 [out, in/8] with rows in groups of {quantization.group_size}")
    if scale.dtype not in SCALE_DTYPES or scale.shape != (rows, groups):
        return _wrong(scale, f"bfloat16, float16 or float32 {[rows, groups]}")
    if shape.dtype not in SHAPE_DTYPES or shape.shape != (2,):
        return _wrong(shape, "int32 or int64 [2]")
    return None


def _wrong(info: TensorInfo, expected: str) -> str:
    dtype = str(info.dtype).removeprefix("torch.")
    return (
        f"{info.name} ({info.filename}) is {dtype} {list(info.shape)}, expected {expected}: the file is "
        "damaged or belongs to another config.json; download both again."
    )
