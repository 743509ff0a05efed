"""Checkpoint folders written the Hugging Face way: a tensor at a time, in any order, atomically."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from kimi_bridge.checkpoint.files import (
    destination,
    missing_folders,
    plain_disk_errors,
    remove_empty,
    sync,
    write_json,
)
from kimi_bridge.checkpoint.shards import DTYPE_NAMES, INDEX_NAME
from kimi_bridge.errors import CheckpointError

# The kernel writes at most 2 GiB in one call.
_WRITE_BYTES = 1 << 30
_STAGING = ".incomplete-"


class TensorSpec(NamedTuple):
    """A tensor that will be written: a tuple, for a real checkpoint has 208,550."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass
class _Shard:
    filename: str
    path: Path
    header: bytes
    size: int
    missing: int
    descriptor: int | None = None


class CheckpointWriter:
    """Writes the tensors of `specs` into `dst`, which shows nothing of them before `finish()`.

    Shards follow the order of `specs`; inside a shard tensors with larger elements come first, as
    safetensors writes them. Files grow in a hidden folder of `dst` at their final size, so memory holds
    one tensor at a time, and the bytes do not depend on the order of the writes. Leaving the `with` block
    normally finishes; leaving it by an exception removes everything. Safe to use from several threads.
    Raises CheckpointError for weights that are already in `dst` (unless `overwrite`), for tensors that do
    not fit the specs, and for a disk that is full or fails.
    """

    def __init__(
        self,
        dst: str | Path,
        specs: Sequence[TensorSpec],
        max_shard_size: int | str | None = "5GB",
        overwrite: bool = False,
        *,
        stem: str = "model",
        metadata: dict[str, str] | None = None,
    ) -> None:
        self.dst = destination(dst)
        self._metadata = metadata or {}
        self._overwrite = overwrite
        specs = [TensorSpec(*spec) for spec in specs]
        self._specs = {spec.name: spec for spec in specs}
        self._missing = dict.fromkeys(self._specs)
        self._claimed: set[str] = set()
        self._lock = threading.Lock()
        self._finished = False
        self._moved: list[Path] = []
        _check_specs(specs)
        plan = self.filename_to_tensors = plan_shards(specs, max_shard_size, stem)
        self.weight_map = {name: filename for filename, names in plan.items() for name in names}
        self._refuse_old_weights()
        self._shards: dict[str, _Shard] = {}
        self._offsets: dict[str, int] = {}
        self._tmp: Path | None = None
        self._lock_file: int | None = None
        self._created = missing_folders(self.dst)
        try:
            with plain_disk_errors(self.dst):
                self.dst.mkdir(parents=True, exist_ok=True)
                _remove_stale(self.dst)
                self._tmp = Path(tempfile.mkdtemp(prefix=_STAGING, dir=self.dst))
                self._lock_file = _lock(self._tmp)
                self._lay_out(self._tmp)
        except BaseException:
            self.abort()
            raise

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes one tensor, from any device, contiguous or not.

        Raises CheckpointError for a name that is unknown or was written before, and for another dtype or
        shape than its spec's.
        """
        self.write_stack([name], tensor.unsqueeze(0))

    def write_stack(self, names: Sequence[str], stack: Tensor) -> None:
        """Writes `stack[i]` as `names[i]`: at once, where they follow each other in one shard.

        Raises CheckpointError as `write` does.
        """
        self._claim(names, stack)
        data = stack.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        size = len(data) // len(names)
        begin = 0
        while begin < len(names):
            end = self._end_of_run(names, begin, size)
            self._write_run(names[begin:end], memoryview(data)[begin * size : end * size])
            begin = end

    def _end_of_run(self, names: Sequence[str], begin: int, size: int) -> int:
        """How far names follow each other in one shard."""
        end = begin + 1
        while (
            end < len(names)
            and self._offsets[names[end]] == self._offsets[names[end - 1]] + size
            and self.weight_map[names[end]] == self.weight_map[names[begin]]
        ):
            end += 1
        return end

    def _write_run(self, names: Sequence[str], data: memoryview) -> None:
        shard = self._shards[self.weight_map[names[0]]]
        with plain_disk_errors(shard.path):
            _write_at(self._descriptor(shard), data, self._offsets[names[0]])
            with self._lock:
                shard.missing -= len(names)
                complete = shard.missing == 0
            if complete:
                # Outside the lock: it waits for the disk, and others may go on with other shards.
                _seal(shard)
            with self._lock:
                for name in names:
                    del self._missing[name]

    def finish(self) -> None:
        """Moves the complete shards into place, the index last.

        Raises CheckpointError, naming them, when tensors have not been written.
        """
        if self._finished:
            return
        if self._missing:
            names = list(self._missing)
            raise CheckpointError(
                f"{len(names)} of {len(self._specs)} tensors were not written to {self.dst}: "
                f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}; write them before finish()."
            )
        with plain_disk_errors(self.dst):
            self._publish()
        self._finished = True

    def abort(self) -> None:
        """Removes everything this writer has made."""
        for shard in self._shards.values():
            if shard.descriptor is not None:
                os.close(shard.descriptor)
                shard.descriptor = None
        for path in self._moved:
            path.unlink(missing_ok=True)
        if self._tmp is not None:
            shutil.rmtree(self._tmp, ignore_errors=True)
        self._unlock()
        # Another writer may have finished in the folder that this one made.
        if self._created and not _weights_in(self.dst) and not list(self.dst.glob(f"{_STAGING}*")):
            shutil.rmtree(self.dst, ignore_errors=True)
            remove_empty(self._created[1:])

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            if not self._finished:
                self.abort()

    def _unlock(self) -> None:
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def _refuse_old_weights(self) -> None:
        old = _weights_in(self.dst)
        if old and not self._overwrite:
            raise CheckpointError(
                f"{self.dst} already holds {old[0].name}: choose another folder, or allow overwriting."
            )

    def _lay_out(self, folder: Path) -> None:
        """Creates every shard at its final size, with its header."""
        needed = 0
        for filename, names in self.filename_to_tensors.items():
            header, offsets, size = shard_header([self._specs[name] for name in names], self._metadata)
            self._offsets.update(offsets)
            self._shards[filename] = _Shard(filename, folder / filename, header, size, len(names))
            needed += size
        free = shutil.disk_usage(self.dst).free
        if needed > free:
            raise CheckpointError(
                f"{self.dst} has {free:,} bytes free, but the checkpoint takes {needed:,}: make room, or "
                "choose another disk."
            )
        for shard in self._shards.values():
            with shard.path.open("xb") as file:
                file.write(shard.header)
                file.truncate(shard.size)

    def _claim(self, names: Sequence[str], stack: Tensor) -> None:
        dtype, shape = stack.dtype, tuple(stack.shape[1:])
        for name in names:
            spec = self._specs.get(name)
            if spec is None:
                raise CheckpointError(
                    f"{name} is not in the plan of {self.dst}: add its spec, or do not write it."
                )
            if dtype != spec.dtype or shape != tuple(spec.shape):
                raise CheckpointError(
                    f"{name} is {dtype} {list(shape)}, but the plan of {self.dst} says "
                    f"{spec.dtype} {list(spec.shape)}: convert it before it is written."
                )
        with self._lock:
            for name in names:
                if name in self._claimed:
                    raise CheckpointError(f"{name} was written to {self.dst} before: write each tensor once.")
                self._claimed.add(name)

    def _descriptor(self, shard: _Shard) -> int:
        """Opened at the first write and closed after the last: few are open when writes come in order."""
        with self._lock:
            if shard.descriptor is None:
                shard.descriptor = os.open(shard.path, os.O_WRONLY)
            return shard.descriptor

    def _publish(self) -> None:
        self._refuse_old_weights()
        old = set(_weights_in(self.dst))
        # Without an index a reader finds numbered shards that do not belong together, and says so.
        (self.dst / INDEX_NAME).unlink(missing_ok=True)
        for filename, shard in self._shards.items():
            target = self.dst / filename
            shard.path.replace(target)
            self._moved.append(target)
            old.discard(target)
        for path in old:
            path.unlink(missing_ok=True)
        if len(self._shards) > 1:
            total = sum(spec.nbytes for spec in self._specs.values())
            write_json(
                self.dst / INDEX_NAME,
                {"metadata": {"total_size": total}, "weight_map": dict(sorted(self.weight_map.items()))},
            )
            self._moved.append(self.dst / INDEX_NAME)
        if self._tmp is not None:
            shutil.rmtree(self._tmp)
        self._unlock()
        sync(self.dst)


def _check_specs(specs: Sequence[TensorSpec]) -> None:
    if not specs:
        raise CheckpointError("A checkpoint without tensors was asked for: give at least one.")
    seen: set[str] = set()
    for name, dtype, _ in specs:
        if name in seen:
            raise CheckpointError(f"{name} stands twice in the plan: write each tensor once.")
        seen.add(name)
        if dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{name} has dtype {dtype}, which safetensors cannot hold: convert it.")


def plan_shards(
    specs: Sequence[TensorSpec], max_shard_size: int | str | None = "5GB", stem: str = "model"
) -> dict[str, list[str]]:
    """File names, and the tensors of each in order: full shards in the order of `specs`.

    Without a max_shard_size there is one. Raises CheckpointError for a max_shard_size that is no size.
    """
    if max_shard_size is None:
        return {f"{stem}.safetensors": [spec.name for spec in specs]}
    try:
        if not re.fullmatch(r"0*[1-9][\d.]*\s*[A-Za-z]*", str(max_shard_size)):
            raise ValueError("no positive size")
        split = split_state_dict_into_shards_factory(
            {spec.name: spec for spec in specs},
            get_storage_size=lambda spec: spec.nbytes,
            filename_pattern=stem + "{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        raise CheckpointError(f"max_shard_size is {max_shard_size!r}: give a size such as 5GB.") from error
    return split.filename_to_tensors


def shard_header(
    specs: list[TensorSpec], metadata: dict[str, str] | None = None
) -> tuple[bytes, dict[str, int], int]:
    """The safetensors header of a file, the offset of each tensor in it, and the size of the file.

    Tensors with larger elements come first, which keeps all of them aligned.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    begins: dict[str, int] = {}
    end = 0
    for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
        begins[spec.name], end = end, end + spec.nbytes
        entries[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begins[spec.name], end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    # Spaces up to a multiple of 8 keep the data aligned.
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    offsets = {name: start + begin for name, begin in begins.items()}
    return len(text).to_bytes(8, "little") + text, offsets, start + end


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data[:_WRITE_BYTES], offset)
        data, offset = data[written:], offset + written


def _seal(shard: _Shard) -> None:
    if shard.descriptor is not None:
        os.fsync(shard.descriptor)
        os.close(shard.descriptor)
        shard.descriptor = None


def _lock(staging: Path) -> int:
    """Held by the process that writes there, and released with it, however it ends."""
    descriptor = os.open(staging / ".lock", os.O_CREAT | os.O_RDWR)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _remove_stale(folder: Path) -> None:
    """Removes what killed writers have left: their staging folders are as large as checkpoints."""
    for staging in folder.glob(f"{_STAGING}*"):
        if not staging.is_dir():
            continue
        with suppress(OSError):
            descriptor = os.open(staging / ".lock", os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(staging)
            finally:
                os.close(descriptor)


def _weights_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.suffix == ".safetensors" or p.name == INDEX_NAME)
