"""What a conversion will write: every output tensor, the shards, and the jobs that fill them."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kimi_bridge.checkpoint.convert_config import quantized_config, truncated_config
from kimi_bridge.checkpoint.convert_units import (
    Unit,
    copy_int4_unit,
    copy_unit,
    dequantize_unit,
    open_checkpoint,
    quantize_unit,
    regions,
    uses_int4,
)
from kimi_bridge.checkpoint.quantization import Int4Quantization, read_quantization, without_quantization
from kimi_bridge.checkpoint.reader import CheckpointReader
from kimi_bridge.checkpoint.writer import TensorSpec, plan_shards, shard_header
from kimi_bridge.conversion.jobs import Copy
from kimi_bridge.errors import CheckpointError
from kimi_bridge.int4 import KIMI_QAT, Int4Scheme

_LAYER = re.compile(r"(?:language_model\.)?model\.layers\.(\d+)\.(?:mlp\.experts\.(\d+)\.)?")
_ROUTER = re.compile(r".*\.mlp\.gate\.(weight|e_score_correction_bias)")


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
        return sum(uses_int4(unit.job) for unit in self.units)

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
    reader = open_checkpoint(src)
    if not any(reader.weights().values()):
        raise CheckpointError(f"{src} holds no INT4 weights: there is nothing to dequantize.")
    units = [
        dequantize_unit(reader, name) if is_triplet else copy_unit(reader, name)
        for name, is_triplet in reader.weights().items()
    ]
    config = without_quantization(reader.config_dict)
    scheme = with_group_size(scheme, reader.quantization)
    return new_plan("dequantize", reader, config, scheme, units, max_shard_size)


def plan_quantize(
    src: str | Path,
    scheme: Int4Scheme = KIMI_QAT,
    reference: str | Path | None = None,
    max_shard_size: int | str = "5GB",
) -> Plan:
    """The plan of quantize_checkpoint. Raises CheckpointError for a source that is INT4 already, and a
    reference that does not fit it."""
    reader = open_checkpoint(src)
    if any(reader.weights().values()) or reader.quantization is not None:
        raise CheckpointError(f"{src} is INT4 already: give its bf16 version, see the verb dequantize.")
    other = open_checkpoint(reference) if reference is not None else None
    config = quantized_config(reader.config_dict, other.config_dict if other else None, scheme.group_size)
    quantization = read_quantization(config)
    assert quantization is not None
    if quantization.group_size != scheme.group_size:
        raise CheckpointError(
            f"{reference} has groups of {quantization.group_size}, the scheme has groups of "
            f"{scheme.group_size}: use a scheme with the reference's group size."
        )
    units = [
        quantize_unit(reader, name, scheme, other) if quantization.is_int4(name) else copy_unit(reader, name)
        for name in reader.weights()
    ]
    if all(isinstance(unit.job, Copy) for unit in units):
        raise CheckpointError(f"{src} has no weights that the quantization_config calls INT4.")
    identity = {"reference": identity_of(other)} if other else {}
    return new_plan("quantize", reader, config, scheme, units, max_shard_size, **identity)


def plan_truncate(
    src: str | Path,
    layers: int,
    experts: int | None = None,
    max_shard_size: int | str = "5GB",
    scheme: Int4Scheme = KIMI_QAT,
) -> Plan:
    """The plan of truncate_checkpoint. Raises CheckpointError for more layers or experts than there are."""
    reader = open_checkpoint(src)
    config = truncated_config(reader.config_dict, layers, experts)
    kept = config["text_config"].get("n_routed_experts") if experts is not None else None
    units = [
        copy_int4_unit(reader, name) if is_triplet else copy_unit(reader, name, _router_rows(name, kept))
        for name, is_triplet in reader.weights().items()
        if _is_kept(name, layers, kept)
    ]
    if not units:
        raise CheckpointError(f"Nothing of {src} is left with {layers} layers: is it a Kimi checkpoint?")
    scheme = with_group_size(scheme, reader.quantization)
    return new_plan("truncate", reader, config, scheme, units, max_shard_size, layers=layers, experts=experts)


def with_group_size(scheme: Int4Scheme, quantization: Int4Quantization | None) -> Int4Scheme:
    """A scheme for a checkpoint's groups."""
    if quantization is None:
        return scheme
    return Int4Scheme(quantization.group_size, scheme.scale_divisor, scheme.q_min)


def new_plan(
    verb: str,
    reader: CheckpointReader,
    config: dict[str, Any],
    scheme: Int4Scheme,
    units: list[Unit],
    max_shard_size: int | str,
    **settings: Any,
) -> Plan:
    """A plan with its shards. `settings` are what else the output's bytes depend on."""
    identity = {
        "verb": verb,
        "source": identity_of(reader),
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


def identity_of(reader: CheckpointReader) -> dict[str, str]:
    """A checkpoint by its folder, config and headers; not by times, which a repair changes."""
    digest = hashlib.sha256(repr(sorted(reader.config_dict.items())).encode())
    for name in reader.names():
        digest.update(repr(reader.info(name)).encode())
    return {"path": str(reader.path), "headers": digest.hexdigest()}


def _is_kept(name: str, layers: int, experts: int | None) -> bool:
    match = _LAYER.match(name)
    if match is None:
        return True
    layer, expert = match.groups()
    return int(layer) < layers and (experts is None or expert is None or int(expert) < experts)


def _router_rows(name: str, experts: int | None) -> int | None:
    return experts if experts is not None and _ROUTER.fullmatch(name) else None
