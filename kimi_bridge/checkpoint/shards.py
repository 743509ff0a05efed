"""Shard files and their index, read as untrusted input: nothing is believed before it is checked."""

from __future__ import annotations

import gc
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kimi_bridge.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
WEIGHT_SUFFIXES = (
    *PICKLE_SUFFIXES,
    ".safetensors",
    ".gguf",
    ".ggml",
    ".h5",
    ".msgpack",
    ".onnx",
    ".npz",
    ".npy",
    ".index.json",
)

# safetensors' own limit for a header; the real headers are about 0.5 MB each, the real index 18 MB.
MAX_JSON_BYTES = 100_000_000

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Problem = Callable[[str], None]
"""What to do with a fault: raise it, or write it down and go on."""


class TensorInfo(NamedTuple):
    """Where a tensor lies. `offset` counts from the start of the file; a tuple, for there are 208,550."""

    name: str
    filename: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    offset: int


def read_tensor_table(folder: Path, problem: Problem) -> dict[str, TensorInfo]:
    """Every tensor of the folder by name, in the order of shards and offsets, from index and headers.

    `problem` is called with each fault that can be stepped over (a missing, broken or truncated shard,
    index and headers that disagree). Raises CheckpointError when there is nothing to read at all.
    """
    with _without_garbage_collection():
        return _read_tensor_table(folder, problem)


def _read_tensor_table(folder: Path, problem: Problem) -> dict[str, TensorInfo]:
    index = _read_index(folder)
    files = sorted(index) if index is not None else _files_without_index(folder, problem)
    table: dict[str, TensorInfo] = {}
    for filename in files:
        try:
            entries = _read_header(folder, filename, problem)
        except CheckpointError as error:
            problem(str(error))
            continue
        if index is None:
            _check_duplicates(entries, table, problem)
        else:
            _check_against_index(filename, entries, index[filename], problem)
        table.update((entry.name, entry) for entry in entries)
    return table


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Parsing makes a million objects and no cycles; collecting amid that takes two thirds of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def load_json(path: Path) -> Any:
    """The content of a JSON file of at most 100 MB without duplicate keys, or CheckpointError."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_JSON_BYTES:,} bytes: it is no such file.")
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): check the folder.") from error
    return parse_json(raw, str(path))


def parse_json(raw: bytes, where: str) -> Any:
    try:
        return json.loads(raw, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON ({error}): download it again.") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice!r} stands there twice")
    return result


def _read_index(folder: Path) -> dict[str, set[str]] | None:
    """The tensors of every file that the index names; None without an index."""
    path = folder / INDEX_NAME
    if not path.exists():
        return None
    content = load_json(path)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map: download it again.")
    files: dict[str, set[str]] = {}
    for name, filename in weight_map.items():
        if not isinstance(filename, str):
            raise CheckpointError(f"{path} gives {filename!r} as the file of {name}: download it again.")
        files.setdefault(filename, set()).add(name)
    for filename in files:
        if not _is_plain_shard_name(filename):
            raise CheckpointError(
                f"{path} names the file {filename!r}: shards are plain names that end in .safetensors and "
                "lie beside the index; do not use this checkpoint."
            )
    return files


def _is_plain_shard_name(filename: str) -> bool:
    return (
        filename.endswith(".safetensors")
        and not filename.startswith(".")
        and not any(character in "/\\:\0\r\n" for character in filename)
    )


def _files_without_index(folder: Path, problem: Problem) -> list[str]:
    files = sorted(p.name for p in folder.iterdir() if p.suffix == ".safetensors" and p.is_file())
    if not files:
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
        if pickles:
            raise CheckpointError(
                f"{folder} holds {pickles[0]}, a pickle file, which can run code when it is loaded: only "
                "safetensors are read, so download the safetensors version of this checkpoint."
            )
        raise CheckpointError(f"{folder} holds no weights: it needs *.safetensors files.")
    for missing in _missing_numbers(files):
        problem(f"{missing} is missing in {folder}, which has no {INDEX_NAME} either: download it again.")
    return files


def _missing_numbers(files: list[str]) -> list[str]:
    """`model-00002-of-00003.safetensors` when only 1 and 3 are there."""
    numbered = [m for m in (re.fullmatch(r"(.*)-(\d+)-of-(\d+)\.safetensors", f) for f in files) if m]
    series = {(m[1], m[3]): len(m[2]) for m in numbered}
    expected = [
        f"{stem}-{number:0{width}d}-of-{total}.safetensors"
        for (stem, total), width in series.items()
        for number in range(1, min(int(total), 100_000) + 1)
    ]
    return [name for name in expected if name not in set(files)]


def _check_duplicates(entries: list[TensorInfo], table: dict[str, TensorInfo], problem: Problem) -> None:
    for entry in entries:
        if entry.name in table:
            problem(
                f"{entry.name} is in {table[entry.name].filename} and in {entry.filename}, and there is no "
                f"{INDEX_NAME} to say which counts: remove the file that does not belong."
            )


def _check_against_index(
    filename: str, entries: list[TensorInfo], listed: set[str], problem: Problem
) -> None:
    held = {entry.name for entry in entries}
    for names, fault in (
        (listed - held, "does not hold {}, which the index lists there"),
        (held - listed, "holds {}, which the index does not list there"),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            problem(f"{filename} {fault.format(min(names) + more)}: download both again.")


def _read_header(folder: Path, filename: str, problem: Problem) -> list[TensorInfo]:
    path = folder / filename
    if not path.is_file():
        raise CheckpointError(f"{filename}, which the index names, is not in {folder}: download it again.")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if prefix == b"version ":
                raise CheckpointError(f"{filename} is a Git LFS pointer, not weights: run `git lfs pull`.")
            length = int.from_bytes(prefix, "little")
            if length > MAX_JSON_BYTES:
                raise CheckpointError(
                    f"{filename} claims a header of {length:,} bytes: it is no safetensors file; "
                    "download it again."
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{filename} cannot be read ({error.strerror}): check the disk.") from error
    if len(prefix) < 8 or len(raw) < length:
        raise CheckpointError(_truncated(filename, 8 + length, size))
    header = parse_json(raw, f"The header of {filename}")
    entries, end = _parse_entries(header, filename, 8 + length)
    if size < end:
        problem(_truncated(filename, end, size))
    elif size > end:
        problem(f"{filename} has {size - end:,} bytes after its last tensor: download it again.")
    return entries


def _truncated(filename: str, expected: int, size: int) -> str:
    return f"{filename} is truncated: expected {expected:,} bytes, has {size:,}; download it again."


def _parse_entries(header: Any, filename: str, start: int) -> tuple[list[TensorInfo], int]:
    """The tensors of one header in the order of their offsets, and the size the file must have."""
    if not isinstance(header, dict):
        raise CheckpointError(f"The header of {filename} is no JSON object: download it again.")
    entries = [
        _parse_entry(name, entry, filename, start) for name, entry in header.items() if name != "__metadata__"
    ]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    end = start
    for entry in entries:
        # As in safetensors itself: tensors fill the file without overlaps and without gaps.
        if entry.offset != end:
            fault = "overlaps the tensor before it" if entry.offset < end else "leaves a gap before it"
            raise CheckpointError(f"{entry.name} in {filename} {fault}: download the file again.")
        end += entry.nbytes
    return entries, end


def _parse_entry(name: str, entry: Any, filename: str, start: int) -> TensorInfo:
    try:
        dtype_name, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sizes = [begin, end, *shape]
        known = dtype_name in DTYPES
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{name} in {filename} lacks dtype, shape or data_offsets: download the file again."
        ) from error
    if not known:
        raise CheckpointError(
            f"{name} in {filename} has dtype {dtype_name!r}, which is not read here: use a checkpoint in "
            f"{', '.join(DTYPES)}."
        )
    count = 1
    for size in sizes:
        # JSON numbers may also be floats, booleans and negative.
        if type(size) is not int or size < 0:
            raise CheckpointError(f"{name} in {filename} has the size {size!r}: download the file again.")
    for size in shape:
        count *= size
    dtype = DTYPES[dtype_name]
    if end - begin != count * dtype.itemsize:
        raise CheckpointError(
            f"{name} in {filename} takes {end - begin:,} bytes, but {dtype_name} {list(shape)} needs "
            f"{count * dtype.itemsize:,}: download the file again."
        )
    return TensorInfo(name, filename, dtype, tuple(shape), end - begin, start + begin)
