"""Where a conversion grows: finished shards and a manifest in a hidden folder, until all can be shown."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kimi_bridge.checkpoint.convert_plan import Plan
from kimi_bridge.checkpoint.files import (
    copy_artifacts,
    destination,
    missing_folders,
    plain_disk_errors,
    remove_empty,
    sync,
    write_json,
)
from kimi_bridge.checkpoint.shards import INDEX_NAME
from kimi_bridge.conversion.execute import create, seal
from kimi_bridge.conversion.jobs import Findings, Loose, Merged
from kimi_bridge.errors import CheckpointError

FOLDER = ".unfinished-conversion"
MANIFEST = "manifest.json"
RECORD = ".kimi-bridge-conversion.json"
_LOCK = "lock"
_PART = ".part"
# Of the files that `files.atomic` makes.
_TEMPORARY = ".incomplete-*"


class Staging:
    """The hidden folder of `dst`, held by one run at a time.

    `finished` are the shards of an earlier run of the same plan; where that came to its end, `complete` is
    True, and nothing is left to do: a run that was killed just before its exit can be started again.
    Raises CheckpointError for a `dst` that holds other weights or another conversion (unless `overwrite`),
    that another process writes to, or that has too little room.
    """

    def __init__(self, dst: Path, plan: Plan, verify: bool, overwrite: bool) -> None:
        # Absolute, because workers may have another working directory.
        dst = dst.absolute()
        self.dst, self.plan = dst, plan
        self.path = dst / FOLDER
        self.finished: dict[str, Findings] = {}
        self._identity = plan.identity | {"verify": verify}
        # As it will be read again: JSON knows no tuples.
        self._identity = json.loads(json.dumps(self._identity))
        self._records: dict[str, dict[str, Any]] = {}
        self._publishing = False
        self._lock: int | None = None
        self._created = missing_folders(dst)
        self.complete = not overwrite and self._is_complete()
        if self.complete:
            self._sweep()
            return
        old = self._read_manifest()
        if old is not None and old["identity"] != self._identity:
            if not overwrite:
                raise CheckpointError(self._other_conversion(old["identity"]))
            old = None
        if not overwrite and not (old and old["publishing"]):
            self._refuse_old_weights()
        try:
            with plain_disk_errors(dst):
                self._begin(old)
        except BaseException:
            self.close()
            raise

    def part(self, filename: str) -> Path:
        """The file that a shard grows in."""
        return self.path / (filename + _PART)

    def begin(self, filename: str) -> None:
        """Makes the file of a shard, with its header."""
        header, _, size = self.plan.layout(filename)
        with plain_disk_errors(self.path):
            create(self.part(filename), header, size)

    def flush(self, filename: str) -> None:
        """Starts what `finish` would have to wait for."""
        with plain_disk_errors(self.path):
            sync(self.part(filename))

    def finish(self, filename: str, findings: Findings, sealed: bool) -> None:
        """Gives a complete shard its name, and writes it down."""
        with plain_disk_errors(self.path):
            if not sealed:
                seal(self.part(filename), self.path / filename)
            sync(self.path)
            self._records[filename] = {
                "size": self.plan.layout(filename)[2],
                "sources": {source: _stamp(source) for source in sorted(self.plan.sources_of(filename))},
                "findings": asdict(findings),
            }
            self._write_manifest()

    def publish(self) -> None:
        """Shows the checkpoint: other files, shards, index, and config.json last."""
        with plain_disk_errors(self.dst):
            self._publishing = True
            self._write_manifest()
            copy_artifacts(self.plan.src, self.dst)
            # Until all is there, the folder has neither config nor index, and is no checkpoint to anyone.
            (self.dst / "config.json").unlink(missing_ok=True)
            for name in (RECORD, INDEX_NAME):
                (self.dst / name).unlink(missing_ok=True)
            for filename in self.plan.shards:
                if (self.path / filename).exists():
                    (self.path / filename).replace(self.dst / filename)
            for path in self.dst.glob("*.safetensors"):
                if path.name not in self.plan.shards:
                    path.unlink()
            if len(self.plan.shards) > 1:
                index = {
                    "metadata": {"total_size": self.plan.nbytes},
                    "weight_map": dict(sorted(self.plan.weight_map().items())),
                }
                write_json(self.dst / INDEX_NAME, index)
            write_json(self.dst / "config.json", self.plan.config)
            write_json(self.dst / RECORD, self._record())
            sync(self.dst)
            self._sweep()

    def close(self) -> None:
        """Lets go of the folder; removes it where nothing in it is worth keeping."""
        if self._lock is None:
            return
        if not self._records and not self._publishing:
            shutil.rmtree(self.path, ignore_errors=True)
            remove_empty(self._created)
        os.close(self._lock)
        self._lock = None

    def _record(self) -> dict[str, Any]:
        """What tells this conversion from any other, without the names of folders, which may be private."""
        digest = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()
        findings = {filename: self._records[filename]["findings"] for filename in self.plan.shards}
        return {"conversion": digest, "findings": findings}

    def _is_complete(self) -> bool:
        try:
            record = json.loads((self.dst / RECORD).read_text(encoding="utf-8"))
            sizes = {name: (self.dst / name).stat().st_size for name in (*self.plan.shards, "config.json")}
            self._records = {name: {"findings": found} for name, found in record["findings"].items()}
            same = record == self._record()
        except (OSError, ValueError, TypeError, KeyError):
            same, sizes = False, {}
        complete = same and all(sizes[name] == self.plan.layout(name)[2] for name in self.plan.shards)
        if complete:
            self.finished = {name: _findings(held["findings"]) for name, held in self._records.items()}
        else:
            self._records = {}
        return complete

    def _sweep(self) -> None:
        """Removes what is of no use anymore, half-written small files of killed runs too."""
        for path in self.dst.rglob(_TEMPORARY):
            if path.is_file():
                path.unlink()
        shutil.rmtree(self.path, ignore_errors=True)

    def _begin(self, old: dict[str, Any] | None) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        if old is None:
            self._clear()
        else:
            self._resume(old)
        self._check_room()
        self._write_manifest()

    def _read_manifest(self) -> dict[str, Any] | None:
        path = self.path / MANIFEST
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(manifest, dict) or not isinstance(manifest.get("identity", {}), dict):
                raise ValueError("it is no manifest")
            return manifest if {"identity", "publishing", "shards"} <= manifest.keys() else None
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}): remove {self.path}, and the conversion begins anew."
            ) from error

    def _other_conversion(self, other: dict[str, Any]) -> str:
        mine = self._identity
        keys = [key for key in sorted(mine | other) if mine.get(key) != other.get(key)]
        was = ", ".join(_change(key, _short(other.get(key)), _short(mine.get(key))) for key in keys)
        return (
            f"{self.dst} holds an unfinished conversion with other settings ({was}): give the same settings "
            "to go on with it, choose another folder, or allow overwriting to give it up."
        )

    def _refuse_old_weights(self) -> None:
        if not self.dst.is_dir():
            return
        old = sorted(p.name for p in self.dst.iterdir() if p.suffix == ".safetensors" or p.name == INDEX_NAME)
        if old:
            raise CheckpointError(
                f"{self.dst} already holds {old[0]}: choose another folder, or allow overwriting."
            )

    def _take_lock(self) -> None:
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            self._lock = None
            raise CheckpointError(
                f"Another process is writing to {self.dst}: wait until it ends, or choose another folder."
            ) from error

    def _clear(self) -> None:
        for path in self.path.iterdir():
            if path.name != _LOCK:
                path.unlink()

    def _resume(self, manifest: dict[str, Any]) -> None:
        """Keeps the finished shards whose sources have not changed since; the rest is made again."""
        self._publishing = manifest["publishing"]
        for filename, record in manifest["shards"].items():
            places = [self.path / filename, *([self.dst / filename] if self._publishing else [])]
            there = any(path.exists() and path.stat().st_size == record["size"] for path in places)
            if there and all(_stamp(source) == stamp for source, stamp in record["sources"].items()):
                self._records[filename] = record
                self.finished[filename] = _findings(record["findings"])
        for path in self.path.iterdir():
            if path.name not in (_LOCK, MANIFEST) and path.name not in self._records:
                path.unlink()

    def _check_room(self) -> None:
        missing = [filename for filename in self.plan.shards if filename not in self.finished]
        needed = sum(self.plan.layout(filename)[2] for filename in missing)
        free = shutil.disk_usage(self.path).free
        if needed > free:
            raise CheckpointError(
                f"{self.dst} has {free:,} bytes free, but the conversion needs {needed:,}: make room, or "
                "choose another disk."
            )

    def _write_manifest(self) -> None:
        manifest = {
            "identity": self._identity,
            "publishing": self._publishing,
            "shards": self._records,
        }
        write_json(self.path / MANIFEST, manifest)


def check_folders(dst: Path, *sources: Path | None) -> None:
    """Raises CheckpointError for a destination that is a source, lies inside one, or is a file."""
    resolved = destination(dst).resolve()
    if resolved == Path.cwd():
        raise CheckpointError("The destination is the current folder: name a folder of its own.")
    for source in sources:
        if source is None:
            continue
        if resolved == source.resolve():
            raise CheckpointError(f"{dst} is source and destination at once: choose another folder.")
        if resolved.is_relative_to(source.resolve()):
            raise CheckpointError(f"{dst} lies inside the source {source}: choose a folder outside of it.")


def _change(key: str, was: str, now: str) -> str:
    return f"the content of {key} {now} has changed" if was == now else f"{key} {was}, now {now}"


def _findings(content: dict[str, Any]) -> Findings:
    worst = [Loose(*entry) for entry in content["worst"]]
    merged = {kind: Merged(*sums) for kind, sums in content.get("merged", {}).items()}
    return Findings(content["weights"], content["groups"], content["loose"], worst, merged)


def _stamp(source: str) -> list[int]:
    """Tells a file from another version of it under the same name."""
    with suppress(OSError):
        found = Path(source).stat()
        return [found.st_size, found.st_mtime_ns]
    return []


def _short(value: Any) -> str:
    text = value.get("path", "") if isinstance(value, dict) else repr(value)
    return text if len(text) < 100 else text[:100] + "..."
