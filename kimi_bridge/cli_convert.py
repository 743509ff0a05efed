"""The verbs that convert checkpoints: dequantize, quantize, truncate, merge-adapter."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kimi_bridge.report import complain, print_merge, print_plan, print_summary

if TYPE_CHECKING:
    from kimi_bridge.checkpoint import Summary
    from kimi_bridge.int4 import Int4Scheme


class Scheme(StrEnum):
    kimi = "kimi"
    rtn = "rtn"


class Output(StrEnum):
    int4 = "int4"
    bf16 = "bf16"


Source = Annotated[str, typer.Argument(help="Folder or hub id.")]
Destination = Annotated[Path, typer.Argument(help="The folder to make.")]
SchemeOption = Annotated[Scheme, typer.Option(help="kimi: scales of amax/7; rtn: amax/7.5, codes of -8.")]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Of at most 1 GiB each (default: as many as cores, up to 8)."),
]
RayAddress = Annotated[
    str | None, typer.Option(help="Convert on this Ray cluster, whose nodes see the same folders.")
]
MaxShardSize = Annotated[str, typer.Option(help="Of the files that are written.")]
RequireFixedPoint = Annotated[
    bool,
    typer.Option("--require-fixed-point", help="Fail where quantizing the values would give other bits."),
]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Do not look at the INT4 weights on the way.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is already there.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def dequantize(
    src: Source,
    dst: Destination,
    scheme: SchemeOption = Scheme.kimi,
    workers: Workers = None,
    ray_address: RayAddress = None,
    max_shard_size: MaxShardSize = "5GB",
    require_fixed_point: RequireFixedPoint = False,
    no_verify: NoVerify = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Writes an INT4 checkpoint in bf16. Interrupted, it goes on when it is started again.

    Counts the groups that no longer are what they were when their values are quantized by --scheme.

    Example: kimi-bridge dequantize moonshotai/Kimi-K2.5 ./k25-bf16 --workers 8
    """
    from kimi_bridge.checkpoint import dequantize_checkpoint, resolve_checkpoint
    from kimi_bridge.checkpoint.convert_plan import plan_dequantize

    folder, how = resolve_checkpoint(src), _scheme(scheme)
    if dry_run:
        print_plan(plan_dequantize(folder, max_shard_size, how), dst)
        return
    options = _Options(workers, ray_address, max_shard_size, not no_verify, require_fixed_point, overwrite)
    _convert(partial(dequantize_checkpoint, folder, dst, how), options, as_json)


def quantize(
    src: Source,
    dst: Destination,
    reference: Annotated[
        str | None, typer.Option(help="INT4 checkpoint whose bits come back where the values are the same.")
    ] = None,
    scheme: SchemeOption = Scheme.kimi,
    workers: Workers = None,
    ray_address: RayAddress = None,
    max_shard_size: MaxShardSize = "5GB",
    require_fixed_point: RequireFixedPoint = False,
    no_verify: NoVerify = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Writes a bf16 checkpoint in INT4. Interrupted, it goes on when it is started again.

    Example: kimi-bridge quantize ./k25-bf16 ./k25-int4 --reference moonshotai/Kimi-K2.5
    """
    from kimi_bridge.checkpoint import CheckpointReader, quantize_checkpoint, resolve_checkpoint
    from kimi_bridge.checkpoint.convert_plan import plan_quantize

    folder, how = resolve_checkpoint(src), _scheme(scheme)
    known = resolve_checkpoint(reference) if reference is not None else None
    if known is not None and (found := CheckpointReader(known).quantization) is not None:
        how = replace(how, group_size=found.group_size)
    if dry_run:
        print_plan(plan_quantize(folder, how, known, max_shard_size), dst)
        return
    options = _Options(workers, ray_address, max_shard_size, not no_verify, require_fixed_point, overwrite)
    _convert(partial(quantize_checkpoint, folder, dst, how, known), options, as_json)


def truncate(
    src: Source,
    dst: Destination,
    layers: Annotated[int, typer.Option(min=1, help="How many layers to keep, the first ones.")],
    experts: Annotated[int | None, typer.Option(min=1, help="How many experts of each to keep.")] = None,
    workers: Workers = None,
    ray_address: RayAddress = None,
    max_shard_size: MaxShardSize = "5GB",
    require_fixed_point: RequireFixedPoint = False,
    no_verify: NoVerify = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Cuts a checkpoint down to a few layers and experts, bit for bit: a small one that loads and serves.

    Example: kimi-bridge truncate moonshotai/Kimi-K2.5 ./k25-small --layers 2 --experts 8
    """
    from kimi_bridge.checkpoint import resolve_checkpoint, truncate_checkpoint
    from kimi_bridge.checkpoint.convert_plan import plan_truncate

    folder = resolve_checkpoint(src)
    if dry_run:
        print_plan(plan_truncate(folder, layers, experts, max_shard_size), dst)
        return
    options = _Options(workers, ray_address, max_shard_size, not no_verify, require_fixed_point, overwrite)
    _convert(partial(truncate_checkpoint, folder, dst, layers, experts), options, as_json)


def merge_adapter(
    base: Annotated[str, typer.Argument(help="Folder or hub id of the checkpoint that was trained on.")],
    adapter: Annotated[str, typer.Argument(help="Folder or hub id of a PEFT LoRA adapter.")],
    dst: Destination,
    output: Annotated[Output | None, typer.Option(help="Of the result (default: as BASE is).")] = None,
    scheme: SchemeOption = Scheme.kimi,
    workers: Workers = None,
    ray_address: RayAddress = None,
    max_shard_size: MaxShardSize = "5GB",
    no_verify: NoVerify = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Merges a LoRA adapter into its base. Interrupted, it goes on when it is started again.

    Reports by kind of weight how well the result holds the update, and warns where INT4 loses it. Groups
    that the update does not change keep their bits.

    Example: kimi-bridge merge-adapter moonshotai/Kimi-K2.5 ./adapter ./merged --output bf16

    Example: kimi-bridge merge-adapter ./k25-bf16 ./adapter ./merged-int4 --output int4 --workers 8
    """
    from kimi_bridge.adapter import merge_adapter as merge
    from kimi_bridge.adapter.merge import plan_merge
    from kimi_bridge.checkpoint import resolve_checkpoint

    folder, lora, how = resolve_checkpoint(base), resolve_checkpoint(adapter), _scheme(scheme)
    int4 = None if output is None else output is Output.int4
    if dry_run:
        print_plan(plan_merge(folder, lora, int4, how, max_shard_size), dst)
        return
    job = partial(merge, folder, lora, dst, int4=int4, scheme=how, workers=workers, ray_address=ray_address)
    job = partial(job, max_shard_size=max_shard_size, verify=not no_verify, overwrite=overwrite)
    summary = _run(job)
    if as_json:
        print(json.dumps(summary.to_dict(), indent=2))
    else:
        print_merge(summary)
    for warning in summary.warnings:
        complain(f"WARNING: {warning}")


@dataclass
class _Options:
    """The keyword arguments that all conversions take."""

    workers: int | None
    ray_address: str | None
    max_shard_size: str
    verify: bool
    require_fixed_point: bool
    overwrite: bool


def _convert(job: Callable[..., Summary], options: _Options, as_json: bool) -> None:
    summary = _run(partial(job, **asdict(options)))
    if as_json:
        print(json.dumps(summary.to_dict(), indent=2))
    else:
        print_summary(summary)


def _run[T](job: Callable[..., T]) -> T:
    from kimi_bridge.progress import progress

    try:
        with progress("Converting") as advance:
            return job(progress=advance)
    except KeyboardInterrupt:
        complain("interrupted: finished shards are kept, run the same command again to go on")
        raise typer.Exit(130) from None


def _scheme(scheme: Scheme) -> Int4Scheme:
    from kimi_bridge.int4 import KIMI_QAT, RTN

    return KIMI_QAT if scheme is Scheme.kimi else RTN
