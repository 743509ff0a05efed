"""What a conversion will write: every output tensor, the shards, and the jobs that fill them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kimi_bridge.checkpoint.convert_config import quantized_config, truncated_config
from kimi_bridge.checkpoint.quantization import Int4Quantization, read_quantization, without_quantization
from kimi_bridge.checkpoint.reader import CheckpointReader
from kimi_bridge.checkpoint.shards import TensorInfo
from kimi_bridge.checkpoint.triplets import CODES_PER_WORD, part_names
from kimi_bridge.checkpoint.writer import TensorSpec, plan_shards, shard_header
from kimi_bridge.conversion.jobs import Copy, CopyInt4, Dequantize, Job, Quantize, Region, Triplet
from kimi_bridge.errors import CheckpointError
from kimi_bridge.int4 import KIMI_QAT, Int4Scheme

_LAYER = re.compile(r"(?:language_model\.)?model\.layers\.(\d+)\.(?:mlp\.experts\.(\d+)\.)?")
_ROUTER = re.compile(r".*\.mlp\.gate\.(weight|e_score_correction_bias)")


class Unit(NamedTuple):
    """An output weight: the job that makes it, and its tensors, which share a shard."""

    job: Job
    specs: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)


@dataclass
class Plan:
    """One conversion. `identity` is all that the output's bytes depend on: source, settings, verb."""

    verb: str
    src: Path
    config: dict[str, Any]
    scheme: Int4Scheme
    units: list[Unit]
    identity: dict[str, Any]
    shards: dict[str, list[Unit]] = field(default_factory=dict)

    @property
    def tensors(self) -> int:
        """How many tensors will be written."""
        return sum(len(unit.specs) for unit in self.units)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that will be written."""
        return sum(unit.nbytes for unit in self.units)

    @property
    def source_bytes(self) -> int:
        """Bytes that will be read, those of a reference included."""
        return sum(region.nbytes for unit in self.units for region in regions(unit.job))

    @property
    def int4_weights(self) -> int:
        """How many weights are INT4 on either side."""
        return sum(not isinstance(unit.job, Copy) for unit in self.units)

    def sources_of(self, filename: str) -> set[str]:
        """The source files that a shard is made of."""
        return {region.path for unit in self.shards[filename] for region in regions(unit.job)}

    def layout(self, filename: str) -> tuple[bytes, dict[str, int], int]:
        """A shard's header, the offset of each tensor, and its size."""
        return shard_header([spec for unit in self.shards[filename] for spec in unit.specs])

    def weight_map(self) -> dict[str, str]:
        """The shard of every tensor, for the index."""
        return {
            spec.name: filename
            for filename, units in self.shards.items()
            for unit in units
            for spec in unit.specs
        }


def plan_dequantize(
    src: str | Path, max_shard_size: int | str = "5GB", scheme: Int4Scheme = KIMI_QAT
) -> Plan:
    """The plan of dequantize_checkpoint. Raises CheckpointError for a source without INT4 weights."""
    reader = _open(src)
    if not any(reader.weights().values()):
        raise CheckpointError(f"{src} holds no INT4 weights: there is nothing to dequantize.")
    units = [
        _dequantize(reader, name) if is_triplet else _copy(reader, name)
        for name, is_triplet in reader.weights().items()
    ]
    config = without_quantization(reader.config_dict)
    scheme = _with_group_size(scheme, reader.quantization)
    return _plan("dequantize", reader, config, scheme, units, max_shard_size)


def plan_quantize(
    src: str | Path,
    scheme: Int4Scheme = KIMI_QAT,
    reference: str | Path | None = None,
    max_shard_size: int | str = "5GB",
) -> Plan:
    """The plan of quantize_checkpoint. Raises CheckpointError for a source that is INT4 already, and a
    reference that does not fit it."""
    reader = _open(src)
    if any(reader.weights().values()) or reader.quantization is not None:
        raise CheckpointError(f"{src} is INT4 already: give its bf16 version, see the verb dequantize.")
    other = _open(reference) if reference is not None else None
    config = quantized_config(reader.config_dict, other.config_dict if other else None, scheme.group_size)
    quantization = read_quantization(config)
    assert quantization is not None
    if quantization.group_size != scheme.group_size:
        raise CheckpointError(
            f"{reference} has groups of {quantization.group_size}, the scheme has groups of "
            f"{scheme.group_size}: use a scheme with the reference's group size."
        )
    units = [
        _quantize(reader, name, scheme, other) if quantization.is_int4(name) else _copy(reader, name)
        for name in reader.weights()
    ]
    if all(isinstance(unit.job, Copy) for unit in units):
        raise CheckpointError(f"{src} has no weights that the quantization_config calls INT4.")
    identity = {"reference": _identity(other)} if other else {}
    return _plan("quantize", reader, config, scheme, units, max_shard_size, **identity)


def plan_truncate(
    src: str | Path,
    layers: int,
    experts: int | None = None,
    max_shard_size: int | str = "5GB",
    scheme: Int4Scheme = KIMI_QAT,
) -> Plan:
    """The plan of truncate_checkpoint. Raises CheckpointError for more layers or experts than there are."""
    reader = _open(src)
    config = truncated_config(reader.config_dict, layers, experts)
    kept = config["text_config"].get("n_routed_experts") if experts is not None else None
    units = [
        _copy_int4(reader, name) if is_triplet else _copy(reader, name, _router_rows(name, kept))
        for name, is_triplet in reader.weights().items()
        if _is_kept(name, layers, kept)
    ]
    if not units:
        raise CheckpointError(f"Nothing of {src} is left with {layers} layers: is it a Kimi K2.5 checkpoint?")
    scheme = _with_group_size(scheme, reader.quantization)
    return _plan("truncate", reader, config, scheme, units, max_shard_size, layers=layers, experts=experts)


def regions(job: Job) -> Iterator[Region]:
    """What a job reads."""
    if isinstance(job.source, Triplet):
        yield from (job.source.packed, job.source.scale, job.source.shape)
    else:
        yield job.source
    if isinstance(job, Quantize) and job.reference is not None:
        yield from (job.reference.packed, job.reference.scale, job.reference.shape)


def _open(path: str | Path) -> CheckpointReader:
    # Absolute, because workers may have another working directory.
    reader = CheckpointReader(Path(path).resolve())
    reader.check()
    return reader


def _with_group_size(scheme: Int4Scheme, quantization: Int4Quantization | None) -> Int4Scheme:
    if quantization is None:
        return scheme
    return Int4Scheme(quantization.group_size, scheme.scale_divisor, scheme.q_min)


def _plan(
    verb: str,
    reader: CheckpointReader,
    config: dict[str, Any],
    scheme: Int4Scheme,
    units: list[Unit],
    max_shard_size: int | str,
    **settings: Any,
) -> Plan:
    identity = {
        "verb": verb,
        "source": _identity(reader),
        "scheme": [scheme.group_size, scheme.scale_divisor, scheme.q_min],
        "max_shard_size": str(max_shard_size),
        **settings,
    }
    plan = Plan(verb, reader.path, config, scheme, units, identity)
    # Sharded by weight and not by tensor: the parts of a triplet are written in one pass over its rows.
    by_name = {unit.job.name: unit for unit in units}
    whole = [TensorSpec(name, torch.uint8, (unit.nbytes,)) for name, unit in by_name.items()]
    plan.shards = {
        filename: [by_name[name] for name in names]
        for filename, names in plan_shards(whole, max_shard_size).items()
    }
    return plan


def _identity(reader: CheckpointReader) -> dict[str, str]:
    """A checkpoint by its folder, config and headers; not by times, which a repair changes."""
    digest = hashlib.sha256(repr(sorted(reader.config_dict.items())).encode())
    for name in reader.names():
        digest.update(repr(reader.info(name)).encode())
    return {"path": str(reader.path), "headers": digest.hexdigest()}


def _copy(reader: CheckpointReader, name: str, rows: int | None = None) -> Unit:
    info = reader.info(name)
    shape = info.shape if rows is None else (min(rows, info.shape[0]), *info.shape[1:])
    spec = TensorSpec(name, info.dtype, shape)
    return Unit(Copy(name, _region(reader, info)._replace(nbytes=spec.nbytes)), (spec,))


def _dequantize(reader: CheckpointReader, name: str) -> Unit:
    source = _triplet(reader, name)
    spec = TensorSpec(name, source.scale_dtype, (source.rows, source.columns))
    return Unit(Dequantize(name, source), (spec,))


def _copy_int4(reader: CheckpointReader, name: str) -> Unit:
    infos = [reader.info(part) for part in part_names(name)]
    specs = tuple(TensorSpec(info.name, info.dtype, info.shape) for info in infos)
    return Unit(CopyInt4(name, _triplet(reader, name)), specs)


def _quantize(
    reader: CheckpointReader, name: str, scheme: Int4Scheme, other: CheckpointReader | None
) -> Unit:
    info = reader.info(name)
    if len(info.shape) != 2 or info.shape[1] % scheme.group_size or not info.nbytes:
        raise CheckpointError(
            f"{name} is {list(info.shape)}, which is no matrix with rows in groups of {scheme.group_size}."
        )
    if info.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise CheckpointError(f"{name} is {info.dtype}: only bfloat16, float16 and float32 become INT4.")
    rows, columns = info.shape
    reference = None if other is None else _reference(other, name, info)
    shape_dtype = reference.shape_dtype if reference else torch.int32
    packed, scale, stated = part_names(name)
    specs = (
        TensorSpec(packed, torch.int32, (rows, columns // CODES_PER_WORD)),
        TensorSpec(scale, info.dtype, (rows, columns // scheme.group_size)),
        TensorSpec(stated, shape_dtype, (2,)),
    )
    job = Quantize(name, _region(reader, info), rows, columns, info.dtype, shape_dtype, reference)
    return Unit(job, specs)


def _reference(other: CheckpointReader, name: str, info: TensorInfo) -> Triplet:
    if not other.is_triplet(name):
        raise CheckpointError(f"{name} in {other.path} is plain: the reference must have it in INT4.")
    triplet = _triplet(other, name)
    if (triplet.rows, triplet.columns, triplet.scale_dtype) != (*info.shape, info.dtype):
        raise CheckpointError(
            f"{name} is {info.dtype} {list(info.shape)}, but {triplet.scale_dtype} "
            f"{[triplet.rows, triplet.columns]} in the reference {other.path}: give the checkpoint that "
            "training started from."
        )
    return triplet


def _triplet(reader: CheckpointReader, name: str) -> Triplet:
    packed, scale, stated = (reader.info(part) for part in part_names(name))
    rows, columns = packed.shape[0], packed.shape[1] * CODES_PER_WORD
    return Triplet(
        _region(reader, packed),
        _region(reader, scale),
        _region(reader, stated),
        rows,
        columns,
        columns // scale.shape[1],
        scale.dtype,
        stated.dtype,
    )


def _region(reader: CheckpointReader, info: TensorInfo) -> Region:
    return Region(f"{reader.path}/{info.filename}", info.offset, info.nbytes)


def _is_kept(name: str, layers: int, experts: int | None) -> bool:
    match = _LAYER.match(name)
    if match is None:
        return True
    layer, expert = match.groups()
    return int(layer) < layers and (experts is None or expert is None or int(expert) < experts)


def _router_rows(name: str, experts: int | None) -> int | None:
    return experts if experts is not None and _ROUTER.fullmatch(name) else None
