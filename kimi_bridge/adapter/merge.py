"""An adapter merged into its base: one streaming pass, as the other conversions are."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kimi_bridge.adapter.peft_format import Adapter, check_base, check_fingerprint
from kimi_bridge.checkpoint.convert import Options, Progress, Summary, run_plan
from kimi_bridge.checkpoint.convert_config import quantized_config
from kimi_bridge.checkpoint.convert_plan import Plan, new_plan, with_group_size
from kimi_bridge.checkpoint.convert_staging import check_folders
from kimi_bridge.checkpoint.convert_units import (
    Unit,
    check_quantizable,
    copy_int4_unit,
    copy_unit,
    dequantize_unit,
    int4_specs,
    open_checkpoint,
    quantize_unit,
    region_of,
    triplet_of,
)
from kimi_bridge.checkpoint.files import destination
from kimi_bridge.checkpoint.kinds import KINDS, tensor_kind
from kimi_bridge.checkpoint.quantization import read_quantization, without_quantization
from kimi_bridge.checkpoint.reader import CheckpointReader
from kimi_bridge.checkpoint.triplets import SCALE_DTYPES
from kimi_bridge.checkpoint.writer import TensorSpec
from kimi_bridge.conversion.jobs import Findings, Merge, Region
from kimi_bridge.errors import CheckpointError
from kimi_bridge.int4 import KIMI_QAT, Int4Scheme

# Below it, INT4 has lost more than half of an update: its noise is that loud.
_UPDATE_LOST_DB = 3.0


class MergedKind(NamedTuple):
    """Merged weights of a kind, and how well the result holds what was merged.

    `snr_db`: the exact merge (float32, before rounding) against the result's distance from it.
    `update_snr_db`: the update alone (the exact merge's distance from the base) against the same. None where
    there is no signal or no noise. `groups` are those of INT4 results, `changed_groups` those whose codes or
    scale are not the base's; both are 0 for bf16 results.
    """

    kind: str
    weights: int
    snr_db: float | None
    update_snr_db: float | None
    groups: int
    changed_groups: int

    @property
    def warning(self) -> str | None:
        """Where INT4 does not resolve the update."""
        if not self.groups or self.update_snr_db is None or self.update_snr_db >= _UPDATE_LOST_DB:
            return None
        return (
            f"{self.kind}: the update is smaller than the INT4 grid resolves: {self.changed_groups:,} of"
            f" {self.groups:,} groups ({self.changed_groups / self.groups:.1%}) of the adapted weights"
            f" changed, and the update's signal-to-noise ratio is {self.update_snr_db:.1f} dB: merge into"
            " bf16 (--output bf16), or serve the adapter on the INT4 base"
        )


@dataclass
class MergeSummary(Summary):
    """What a merge did; `kinds` is empty where it was not verified."""

    adapter: str = ""
    int4: bool = True
    kinds: list[MergedKind] = field(default_factory=list)

    @property
    def warnings(self) -> list[str]:
        """Kinds whose update is lost in INT4."""
        return [entry.warning for entry in self.kinds if entry.warning is not None]

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        kinds = [entry._asdict() for entry in self.kinds]
        return super().to_dict() | {"kinds": kinds, "warnings": self.warnings}


def merge_adapter(
    base: str | Path,
    adapter: str | Path,
    dst: str | Path,
    *,
    int4: bool | None = None,
    scheme: Int4Scheme = KIMI_QAT,
    workers: int | None = None,
    ray_address: str | None = None,
    max_shard_size: int | str = "5GB",
    verify: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> MergeSummary:
    """Writes the checkpoint `base` with the PEFT adapter in the folder `adapter` merged into it to `dst`.

    An adapted weight becomes `float32(W) + scale * (B A)`, rounded once to W's dtype (of an INT4 weight, that
    of its scales; its values are exact in float32). B A is a float32 torch.mm of A with 128 rows of B at a
    time, from the first on, so the bytes do not depend on workers and shards. -0.0 may become 0.0.
    `int4` is whether the result is an INT4 checkpoint (None: as the base is). Adapted groups of an INT4 base
    whose rounded values are still the base's keep its codes and scale, others are quantized by `scheme`;
    weights without an adapter keep all their bits. From a bf16 base, what becomes INT4 is as in
    quantize_checkpoint. A bf16 result has no quantization_config.
    `verify` makes the report, and everything else is as in dequantize_checkpoint.

    Raises:
        CheckpointError: an adapter of another base, see `check_base` and `check_fingerprint`, NaN or Inf in
            it, and all that `Adapter` and dequantize_checkpoint raise it for.
    """
    dst = destination(dst)
    check_folders(dst, Path(base), Path(adapter))
    plan = plan_merge(base, adapter, int4, scheme, max_shard_size)
    summary, findings = run_plan(plan, dst, Options(workers, ray_address, verify, False, overwrite, progress))
    return MergeSummary(
        **vars(summary),
        adapter=str(adapter),
        int4=plan.identity["int4"],
        kinds=_kinds(findings),
    )


def plan_merge(
    base: str | Path,
    adapter: str | Path,
    int4: bool | None = None,
    scheme: Int4Scheme = KIMI_QAT,
    max_shard_size: int | str = "5GB",
) -> Plan:
    """The plan of merge_adapter: reads the whole adapter, and of the base its headers and norms."""
    reader = open_checkpoint(base)
    # Absolute, because workers may have another working directory.
    lora = Adapter(Path(adapter).resolve())
    check_base(lora.modules, reader, str(adapter))
    check_fingerprint(lora, reader)
    base_int4 = reader.quantization is not None
    int4 = base_int4 if int4 is None else int4
    scheme = with_group_size(scheme, reader.quantization)
    config = reader.config_dict
    if not int4:
        config = without_quantization(config)
    elif not base_int4:
        config = quantized_config(config, None, scheme.group_size)
    quantization = read_quantization(config)
    units = []
    for name in reader.weights():
        to_int4 = quantization is not None and quantization.is_int4(name)
        if name.removesuffix(".weight") in lora.modules:
            units.append(_merge_unit(reader, lora, name, to_int4, scheme))
        else:
            units.append(_plain_unit(reader, name, to_int4, scheme))
    return new_plan(
        "merge-adapter",
        reader,
        config,
        scheme,
        units,
        max_shard_size,
        int4=int4,
        adapter=_identity(lora),
    )


def _plain_unit(reader: CheckpointReader, name: str, to_int4: bool, scheme: Int4Scheme) -> Unit:
    """A weight without an adapter."""
    if reader.is_triplet(name):
        return copy_int4_unit(reader, name) if to_int4 else dequantize_unit(reader, name)
    return quantize_unit(reader, name, scheme, None) if to_int4 else copy_unit(reader, name)


def _merge_unit(
    reader: CheckpointReader, adapter: Adapter, name: str, to_int4: bool, scheme: Int4Scheme
) -> Unit:
    dtype, shape = reader.dtype(name), reader.shape(name)
    rows, columns = shape
    if dtype not in SCALE_DTYPES:
        raise CheckpointError(
            f"{name} of {reader.path} is {dtype}: adapters are merged into bfloat16, float16, float32 and"
            " INT4."
        )
    shape_dtype = None
    if reader.is_triplet(name):
        triplet = triplet_of(reader, name)
        source: Any = triplet
        shape_dtype = triplet.shape_dtype if to_int4 else None
    else:
        info = reader.info(name)
        source = region_of(reader, info)
        if to_int4:
            check_quantizable(info, scheme)
            shape_dtype = torch.int32
    module = name.removesuffix(".weight")
    spec = adapter.modules[module]
    a, b = (
        Region(f"{adapter.path}/{info.filename}", info.offset, info.nbytes) for info in adapter.infos(module)
    )
    job = Merge(
        name,
        tensor_kind(name),
        source,
        rows,
        columns,
        dtype,
        a,
        b,
        spec.dtype,
        spec.rank,
        spec.scale,
        shape_dtype,
    )
    if shape_dtype is None:
        return Unit(job, (TensorSpec(name, dtype, shape),))
    return Unit(job, int4_specs(name, (rows, columns), dtype, shape_dtype, scheme))


def _identity(adapter: Adapter) -> dict[str, str]:
    """An adapter by its folder, what is said of its modules, and its bytes, which are checked on the way.

    Raises CheckpointError for NaN or Inf: before anything is written.
    """
    headers, content = hashlib.sha256(), hashlib.sha256()
    for module, spec in adapter.modules.items():
        headers.update(repr((module, spec, adapter.infos(module))).encode())
        for tensor in adapter.tensors(module):
            content.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return {"path": str(adapter.path), "headers": headers.hexdigest(), "bytes": content.hexdigest()}


def _kinds(findings: Findings) -> list[MergedKind]:
    return [
        MergedKind(
            kind,
            sums.weights,
            _decibels(sums.signal, sums.noise),
            _decibels(sums.update, sums.noise),
            sums.groups,
            sums.changed,
        )
        for kind, sums in sorted(findings.merged.items(), key=lambda item: KINDS.index(item[0]))
    ]


def _decibels(signal: int, noise: int) -> float | None:
    return 10 * (math.log10(signal) - math.log10(noise)) if signal and noise else None
