"""Files written atomically, and the files of a checkpoint that are not weights."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kimi_bridge.checkpoint.shards import WEIGHT_SUFFIXES
from kimi_bridge.errors import CheckpointError


def copy_artifacts(src: str | Path, dst: str | Path) -> list[Path]:
    """Copies every file of a checkpoint that is not weights, unchanged; returns their relative paths.

    Hidden files and folders stay behind, and so do weights of any format and their indices. Raises
    CheckpointError when a file cannot be read or written, and for a folder copied onto itself.
    """
    src, dst = Path(src).resolve(), Path(dst).resolve()
    if src == dst:
        raise CheckpointError(f"{src} is source and destination at once: choose another folder.")
    with plain_disk_errors(src):
        artifacts = list(_artifacts(src, dst))
    for path in artifacts:
        target = dst / path.relative_to(src)
        with plain_disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic(target) as tmp:
                shutil.copyfile(path, tmp)
    return [path.relative_to(src) for path in artifacts]


def write_json(path: Path, content: object) -> None:
    """Writes a JSON file as Hugging Face does, with an indent of 2, atomically."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, content: str) -> None:
    """Writes a text file in UTF-8, atomically."""
    with atomic(path) as tmp:
        tmp.write_text(content, encoding="utf-8")


@contextmanager
def atomic(target: Path) -> Iterator[Path]:
    """A temporary path beside `target` that takes its place when the block ends well."""
    with plain_disk_errors(target):
        descriptor, name = tempfile.mkstemp(prefix=".incomplete-", dir=target.parent)
        os.close(descriptor)
        tmp = Path(name)
        try:
            yield tmp
            # mkstemp makes files that only their owner can read.
            tmp.chmod(0o666 & ~_umask())
            sync(tmp)
            tmp.replace(target)
        finally:
            tmp.unlink(missing_ok=True)


@contextmanager
def plain_disk_errors(path: Path) -> Iterator[None]:
    """Turns the operating system's errors into one sentence."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path}: {error.strerror or error}; make room, or check the disk and the path."
        ) from error


def destination(path: str | Path) -> Path:
    """The path of a folder to write to. Raises CheckpointError where there can be none."""
    folder = Path(path)
    with suppress(RuntimeError):
        folder = folder.expanduser()
    if "\0" in str(folder):
        raise CheckpointError(f"{str(folder)!r} holds a zero byte: choose another name.")
    with plain_disk_errors(folder):
        for place in (folder, *folder.parents):
            if place.is_symlink() and not place.exists():
                raise CheckpointError(
                    f"{place} is a link to {place.readlink()}, which is not there: make that folder, or"
                    " remove the link."
                )
            if place.exists() and not place.is_dir():
                raise CheckpointError(f"{place} is a file: choose another name.")
    return folder


def missing_folders(folder: Path) -> list[Path]:
    """The folders that making `folder` will create, itself first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: list[Path]) -> None:
    """Removes folders, innermost first, as long as nothing is in them."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def sync(path: Path) -> None:
    """Waits until a file or a folder's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _artifacts(src: Path, dst: Path) -> Iterator[Path]:
    for path in sorted(src.iterdir()):
        if path.name.startswith(".") or path == dst:
            continue
        # Files of the hub's cache are links to blobs; a link to a folder may lead anywhere.
        if path.is_dir():
            if not path.is_symlink():
                yield from _artifacts(path, dst)
        elif path.is_symlink() and not path.exists():
            raise CheckpointError(f"{path} is a link to nothing: download the checkpoint again.")
        elif path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES):
            yield path


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
