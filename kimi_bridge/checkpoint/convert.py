"""Checkpoints converted in one streaming pass: INT4 to plain weights, back, and cut down to a few layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kimi_bridge.checkpoint.convert_plan import Plan, plan_dequantize, plan_quantize, plan_truncate
from kimi_bridge.checkpoint.convert_pool import LocalWorkers
from kimi_bridge.checkpoint.convert_ray import RayWorkers
from kimi_bridge.checkpoint.convert_staging import Staging, check_folders
from kimi_bridge.checkpoint.convert_units import Unit
from kimi_bridge.checkpoint.cores import usable_cores
from kimi_bridge.checkpoint.files import destination
from kimi_bridge.conversion.jobs import Copy, Findings, Job, Loose, Piece, Reply
from kimi_bridge.errors import CheckpointError
from kimi_bridge.int4 import KIMI_QAT, Int4Scheme

# Of output. Small enough for an even load and a smooth progress bar, large enough to be worth an order.
_PIECE_BYTES = 1 << 26
# Of output. To import torch takes a process as long as to convert one or two gigabytes.
_PROCESSES_FROM = 16 << 30

Progress = Callable[[int, int], None]
"""Called with the bytes written so far and the bytes to write."""


@dataclass
class Summary:
    """What a conversion did. `loose_groups` are those that quantizing the values again would change."""

    verb: str
    src: str
    dst: str
    tensors: int
    bytes: int
    shards: int
    resumed_shards: int = 0
    written_bytes: int = 0
    seconds: float = 0.0
    verified: bool = True
    int4_weights: int = 0
    groups: int = 0
    loose_groups: int = 0
    worst: list[Loose] = field(default_factory=list)

    @property
    def gb_per_second(self) -> float:
        """Of what this run wrote."""
        return self.written_bytes / max(self.seconds, 1e-9) / 1e9

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        worst = [entry._asdict() for entry in self.worst]
        return asdict(self) | {"gb_per_second": self.gb_per_second, "worst": worst}


def dequantize_checkpoint(
    src: str | Path,
    dst: str | Path,
    scheme: Int4Scheme = KIMI_QAT,
    *,
    workers: int | None = None,
    ray_address: str | None = None,
    max_shard_size: int | str = "5GB",
    verify: bool = True,
    require_fixed_point: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Writes the INT4 checkpoint `src` with plain weights, in the dtype of its scales, to `dst`.

    By `workers` processes (default: as many as there are cores, at most 8), or as tasks of the Ray cluster
    at `ray_address`. A run that was interrupted goes on when it is started again with the same arguments; one
    that is complete already is left as it is.
    `verify` looks at every INT4 weight: shapes, finite scales, and how many groups are no fixed point of
    `scheme` (its group size is the checkpoint's), which `require_fixed_point` makes an error.
    Raises CheckpointError, with the cure, for everything that goes wrong; `dst` shows nothing until the end.
    """
    dst = destination(dst)
    check_folders(dst, Path(src))
    plan = plan_dequantize(src, max_shard_size, scheme)
    options = Options(workers, ray_address, verify, require_fixed_point, overwrite, progress)
    return run_plan(plan, dst, options)[0]


def quantize_checkpoint(
    src: str | Path,
    dst: str | Path,
    scheme: Int4Scheme = KIMI_QAT,
    reference: str | Path | None = None,
    *,
    workers: int | None = None,
    ray_address: str | None = None,
    max_shard_size: int | str = "5GB",
    verify: bool = True,
    require_fixed_point: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Writes the plain checkpoint `src` in INT4 to `dst`.

    What becomes INT4 is what the quantization_config of `reference` says, or the published one. Groups that
    are what `reference` (an INT4 checkpoint) dequantizes to come back with its bits, the others by `scheme`.
    Everything else is as in dequantize_checkpoint.
    """
    dst = destination(dst)
    check_folders(dst, Path(src), None if reference is None else Path(reference))
    plan = plan_quantize(src, scheme, reference, max_shard_size)
    options = Options(workers, ray_address, verify, require_fixed_point, overwrite, progress)
    return run_plan(plan, dst, options)[0]


def truncate_checkpoint(
    src: str | Path,
    dst: str | Path,
    layers: int,
    experts: int | None = None,
    *,
    scheme: Int4Scheme = KIMI_QAT,
    workers: int | None = None,
    ray_address: str | None = None,
    max_shard_size: int | str = "5GB",
    verify: bool = True,
    require_fixed_point: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Writes the first `layers` layers of `src`, with the first `experts` of each, to `dst`.

    The result is a checkpoint like any other: router, expert bias, top-k and config fit; the tensors' bits
    are those of `src`. Everything else is as in dequantize_checkpoint.
    """
    dst = destination(dst)
    check_folders(dst, Path(src))
    plan = plan_truncate(src, layers, experts, max_shard_size, scheme)
    options = Options(workers, ray_address, verify, require_fixed_point, overwrite, progress)
    return run_plan(plan, dst, options)[0]


@dataclass
class Options:
    """How a plan is carried out, whatever it is."""

    workers: int | None
    ray_address: str | None
    verify: bool
    require_fixed_point: bool
    overwrite: bool
    progress: Progress | None


def run_plan(plan: Plan, dst: Path, options: Options) -> tuple[Summary, Findings]:
    """Writes what a plan says, or what an earlier run has left to write; and what was found on the way.

    Raises CheckpointError, see dequantize_checkpoint.
    """
    if options.require_fixed_point and not options.verify:
        raise CheckpointError("Without verification nothing can be required of it: drop one of the options.")
    if options.workers is not None and options.workers < 1:
        raise CheckpointError(f"{options.workers} workers were asked for: ask for at least 1.")
    begin = time.perf_counter()
    staging = Staging(dst, plan, options.verify, options.overwrite)
    try:
        findings, resumed = Findings(), len(staging.finished)
        for found in staging.finished.values():
            _take(findings, found, plan, options)
        todo = [filename for filename in plan.shards if filename not in staging.finished]
        written = _fill(plan, staging, todo, findings, options) if todo else 0
        if not staging.complete:
            staging.publish()
    finally:
        staging.close()
    summary = Summary(
        plan.verb,
        str(plan.src),
        str(dst),
        plan.tensors,
        plan.nbytes,
        len(plan.shards),
        resumed,
        written,
        time.perf_counter() - begin,
        options.verify,
        plan.int4_weights,
        findings.groups,
        findings.loose,
        findings.worst,
    )
    return summary, findings


def _fill(plan: Plan, staging: Staging, todo: list[str], findings: Findings, options: Options) -> int:
    """Makes the shards; returns the bytes written."""
    total = sum(unit.nbytes for filename in todo for unit in plan.shards[filename])
    done = 0
    waiting: list[Future[None]] = []
    with _workers(options, total) as workers, ThreadPoolExecutor(1) as disk:
        try:
            open_shards = _OpenShards(plan, staging, todo, workers, options.verify)
            for reply in workers.run(open_shards.pieces()):
                if reply.bug:
                    raise RuntimeError(f"{reply.error}\n{reply.bug}")
                if reply.error:
                    raise CheckpointError(reply.error)
                _take(findings, reply.findings, plan, options)
                complete = open_shards.take(reply)
                # The disk is waited for by a thread beside the workers, who go on with other pieces.
                if complete is not None:
                    waiting.append(disk.submit(staging.finish, reply.shard, complete, workers.whole_shards))
                else:
                    waiting.append(disk.submit(staging.flush, reply.shard))
                done += reply.nbytes
                if options.progress is not None:
                    options.progress(done, total)
                while waiting and waiting[0].done():
                    waiting.pop(0).result()
            for future in waiting:
                future.result()
        except BaseException:
            disk.shutdown(wait=False, cancel_futures=True)
            raise
    return done


def _workers(options: Options, total: int) -> LocalWorkers | RayWorkers:
    if options.ray_address is not None:
        return RayWorkers(options.ray_address, options.workers)
    count = min(options.workers or min(8, usable_cores()), max(1, total // _PIECE_BYTES))
    return LocalWorkers(count, in_threads=total < _PROCESSES_FROM)


def _take(findings: Findings, found: Findings, plan: Plan, options: Options) -> None:
    findings.add(found)
    if options.require_fixed_point and found.loose:
        worst = found.worst[0]
        raise CheckpointError(
            f"{worst.loose:,} of {worst.groups:,} groups of {worst.name} are no fixed point of "
            f"amax/{plan.scheme.scale_divisor:g}: quantizing their values would give other bits. Keep the "
            "INT4 checkpoint as a reference for the way back, and do not require fixed points."
        )


class _OpenShards:
    """Cuts shards into pieces, from as many shards at a time as there are workers.

    Two workers that write to one file wait for each other, and fewer open shards lose less when a run is
    killed: so one shard a worker.
    """

    def __init__(
        self,
        plan: Plan,
        staging: Staging,
        todo: list[str],
        workers: LocalWorkers | RayWorkers,
        verify: bool,
    ) -> None:
        self._plan, self._staging, self._todo, self._verify = plan, staging, todo, verify
        self._workers = workers
        self._missing: dict[str, int] = {}
        self._findings: dict[str, Findings] = {}

    def pieces(self) -> Iterator[Piece]:
        """All pieces, each shard's file made before its first."""
        todo = iter(self._todo)
        cutting: list[Iterator[Piece]] = []
        turn = 0
        while True:
            while len(cutting) < self._workers.count and (filename := next(todo, None)) is not None:
                cutting.append(iter(self._open(filename)))
            if not cutting:
                return
            turn %= len(cutting)
            piece = next(cutting[turn], None)
            if piece is None:
                del cutting[turn]
            else:
                turn += 1
                yield piece

    def take(self, reply: Reply) -> Findings | None:
        """The findings of a shard when this was its last piece."""
        self._findings[reply.shard].add(reply.findings)
        self._missing[reply.shard] -= 1
        return None if self._missing[reply.shard] else self._findings.pop(reply.shard)

    def _open(self, filename: str) -> list[Piece]:
        header, offsets, size = self._plan.layout(filename)
        part = str(self._staging.part(filename))
        plan, verify = self._plan, self._verify
        if self._workers.whole_shards:
            jobs = [_with_offsets(unit, offsets) for unit in plan.shards[filename]]
            nbytes = sum(unit.nbytes for unit in plan.shards[filename])
            final = str(self._staging.path / filename)
            pieces = [Piece(filename, part, jobs, nbytes, plan.scheme, verify, size, header, final)]
        else:
            self._staging.begin(filename)
            pieces = [
                Piece(filename, part, jobs, nbytes, plan.scheme, verify)
                for jobs, nbytes in _cut(plan.shards[filename], offsets)
            ]
        self._missing[filename], self._findings[filename] = len(pieces), Findings()
        return pieces


_Jobs = list[tuple[Job, tuple[int, ...]]]


def _cut(units: list[Unit], offsets: dict[str, int]) -> list[tuple[_Jobs, int]]:
    """Jobs in parts of about _PIECE_BYTES, and their bytes; large copies are divided."""
    parts: list[tuple[_Jobs, int]] = []
    jobs: _Jobs = []
    held = 0
    for unit in units:
        for job, targets, nbytes in _divided(unit, offsets):
            if jobs and held + nbytes > _PIECE_BYTES:
                parts.append((jobs, held))
                jobs, held = [], 0
            jobs.append((job, targets))
            held += nbytes
    return [*parts, (jobs, held)]


def _divided(unit: Unit, offsets: dict[str, int]) -> Iterator[tuple[Job, tuple[int, ...], int]]:
    job, targets = _with_offsets(unit, offsets)
    if not isinstance(job, Copy) or unit.nbytes <= _PIECE_BYTES:
        yield job, targets, unit.nbytes
        return
    for begin in range(0, unit.nbytes, _PIECE_BYTES):
        nbytes = min(_PIECE_BYTES, unit.nbytes - begin)
        source = job.source._replace(offset=job.source.offset + begin, nbytes=nbytes)
        yield Copy(job.name, source), (targets[0] + begin,), nbytes


def _with_offsets(unit: Unit, offsets: dict[str, int]) -> tuple[Job, tuple[int, ...]]:
    return unit.job, tuple(offsets[spec.name] for spec in unit.specs)
