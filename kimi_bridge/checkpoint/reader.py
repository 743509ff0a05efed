"""A checkpoint folder, read lazily: each shard is opened once, and only what is asked for is read."""

from __future__ import annotations

import builtins
import copy
import threading
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kimi_bridge.checkpoint.config import CONFIG_CLASSES, KimiConfig
from kimi_bridge.checkpoint.families import Family, family_of
from kimi_bridge.checkpoint.quantization import Int4Quantization, read_quantization
from kimi_bridge.checkpoint.shards import TensorInfo, load_json, read_tensor_table
from kimi_bridge.checkpoint.triplets import CODES_PER_WORD, check_shape_values, group_weights, part_names
from kimi_bridge.errors import CheckpointError
from kimi_bridge.int4 import Int4Weight, dequantize

HUB_PATTERNS = ["*.safetensors", "*.json", "*.py", "*.model", "*.jinja", "*.txt", "*.tiktoken"]

Slice = builtins.slice


class CheckpointReader:
    """The tensors, logical weights and config of a local folder.

    A tensor is what a file holds; a weight is what the model has: `<module>.weight` of an INT4 module
    stands for its three tensors. With `tolerate=True` faults that can be stepped over are collected in
    `problems` instead of raised. Safe to use from several threads.
    Raises CheckpointError for a folder that is not what its index, headers and config claim.
    """

    def __init__(self, path: str | Path, tolerate: bool = False) -> None:
        self.path = Path(path)
        self.problems: list[str] = []
        self.bytes_read = 0
        self._tolerate = tolerate
        self._handles: dict[str, Any] = {}
        self._lock = threading.Lock()
        if not self.path.is_dir():
            raise CheckpointError(f"{path} is no folder: give the folder that holds config.json.")
        self._table = read_tensor_table(self.path, self._problem)

    @cached_property
    def config_dict(self) -> dict[str, Any]:
        """config.json as it is."""
        if not (self.path / "config.json").is_file():
            raise CheckpointError(f"{self.path} has no config.json: download it beside the weights.")
        content = load_json(self.path / "config.json")
        if not isinstance(content, dict):
            raise CheckpointError(f"{self.path / 'config.json'} is no JSON object: download it again.")
        return content

    @property
    def family(self) -> Family:
        """The row of config.json's model_type."""
        return family_of(self.config_dict.get("model_type"), str(self.path / "config.json"))

    @cached_property
    def config(self) -> KimiConfig:
        """config.json as AutoConfig loads it, without remote code."""
        config_class = CONFIG_CLASSES[self.family.model_type]
        return config_class.from_dict(copy.deepcopy(self.config_dict), name_or_path=str(self.path))

    @cached_property
    def quantization(self) -> Int4Quantization | None:
        """Which weights are INT4, by config.json; None for a checkpoint without quantization_config."""
        return read_quantization(self.config_dict)

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """Shard file name of every tensor, in the order of shards and offsets."""
        return {name: info.filename for name, info in self._table.items()}

    def names(self) -> list[str]:
        """Names of all tensors, in the order of shards and offsets."""
        return list(self._table)

    def __contains__(self, name: object) -> bool:
        return name in self._table

    def info(self, name: str) -> TensorInfo:
        """File, dtype, shape, size and offset of a tensor. Raises CheckpointError for an unknown name."""
        try:
            return self._table[name]
        except KeyError:
            raise CheckpointError(
                f"{name} is not in {self.path}: check the name, or download the checkpoint again."
            ) from None

    def tensor(self, name: str) -> Tensor:
        """A whole tensor: a view of the mapped file, whose bytes are read when they are used.

        Do not write to it: the file would stay as it is, but later reads by this reader would see it.
        """
        info = self.info(name)
        try:
            tensor = self._open(info.filename).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{name} in {info.filename} cannot be read ({error}).") from error
        return self._counted(tensor)

    def slice(self, name: str, rows: Slice | None = None, columns: Slice | None = None) -> Tensor:
        """Rows (first dimension) and columns (second) of a tensor; a column slice is copied.

        Raises CheckpointError for a range that is not within the tensor.
        """
        if rows is None and columns is None:
            return self.tensor(name)
        info = self.info(name)
        view: Any
        ranges = [_within(info, 0, rows)]
        if columns is not None:
            ranges.append(_within(info, 1, columns))
        try:
            view = self._open(info.filename).get_slice(name)[tuple(ranges)]
        except SafetensorError as error:
            raise CheckpointError(f"{name} in {info.filename} cannot be read ({error}).") from error
        return self._counted(view if columns is None else view.contiguous())

    def weights(self) -> dict[str, bool]:
        """Logical weights in file order, and whether each is an INT4 triplet. See group_weights."""
        return self._weights

    def weight_names(self) -> list[str]:
        """Names of all logical weights, in file order."""
        return list(self._weights)

    def is_triplet(self, weight_name: str) -> bool:
        """Whether a weight is stored as INT4. Raises CheckpointError for an unknown weight."""
        try:
            return self._weights[weight_name]
        except KeyError:
            raise CheckpointError(
                f"{weight_name} is not in {self.path}: check the name, or download the checkpoint again."
            ) from None

    def shape(self, weight_name: str) -> tuple[int, ...]:
        """The shape of a weight: for INT4 that of its dequantized values."""
        if not self.is_triplet(weight_name):
            return self.info(weight_name).shape
        rows, words = self.info(part_names(weight_name)[0]).shape
        return rows, words * CODES_PER_WORD

    def dtype(self, weight_name: str) -> torch.dtype:
        """The dtype of a weight: for INT4 that of its scale, in which its values are defined."""
        name = part_names(weight_name)[1] if self.is_triplet(weight_name) else weight_name
        return self.info(name).dtype

    def int4(self, weight_name: str, rows: Slice | None = None, columns: Slice | None = None) -> Int4Weight:
        """The codes and scales of an INT4 weight, or of a slice of it.

        `columns` count weights, not int32 words, and must begin and end at a group.
        Raises CheckpointError for a plain weight, a range that is empty or not whole groups, a weight_shape
        that disagrees, and scales that are NaN or Inf.
        """
        if not self.is_triplet(weight_name):
            raise CheckpointError(f"{weight_name} in {self.path} is plain, not INT4: read it with weight().")
        packed_name, scale_name, shape_name = part_names(weight_name)
        packed, scale = self.info(packed_name), self.info(scale_name)
        shape = (packed.shape[0], packed.shape[1] * 8)
        check_shape_values(weight_name, self.info(shape_name), self.tensor(shape_name), shape)
        words = groups = None
        if columns is not None:
            start, stop = self._whole_groups(weight_name, columns, shape[1], shape[1] // scale.shape[1])
            words = Slice(start // 8, stop // 8)
            groups = Slice(start * scale.shape[1] // shape[1], stop * scale.shape[1] // shape[1])
        codes, scales = self.slice(packed_name, rows, words), self.slice(scale_name, rows, groups)
        if not codes.numel():
            raise CheckpointError(f"An empty slice of {weight_name} was asked for: ask for rows and columns.")
        if not torch.isfinite(scales).all():
            raise CheckpointError(
                f"{scale_name} ({scale.filename}) holds NaN or Inf: the file is damaged; download it again."
            )
        return Int4Weight(codes, scales, (codes.shape[0], codes.shape[1] * 8))

    def weight(
        self,
        weight_name: str,
        rows: Slice | None = None,
        columns: Slice | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """A weight, or a slice of it, as a plain tensor; INT4 becomes `dtype` or its scale's dtype."""
        if self.is_triplet(weight_name):
            int4 = self.int4(weight_name, rows, columns)
            return dequantize(int4, dtype or int4.scale.dtype)
        plain = self.slice(weight_name, rows, columns)
        return plain if dtype is None else plain.to(dtype)

    def check(self) -> None:
        """Checks all that costs no reading of weights: index, headers, sizes, config, triplets."""
        for look in (lambda: self.config, lambda: self._weights):
            try:
                look()
            except CheckpointError as error:
                self._problem(str(error))

    def close(self) -> None:
        """Closes the shards; tensors that were handed out stay valid."""
        with self._lock:
            self._handles.clear()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @cached_property
    def _weights(self) -> dict[str, bool]:
        try:
            quantization = self.quantization
        except CheckpointError as error:
            self._problem(str(error))
            # Without a config no triplet can be right or wrong: the names are all there is to know.
            return group_weights(self._table, None, lambda fault: None)
        return group_weights(self._table, quantization, self._problem)

    def _problem(self, fault: str) -> None:
        if not self._tolerate:
            raise CheckpointError(fault)
        if fault not in self.problems[-1:]:
            self.problems.append(fault)

    def _open(self, filename: str) -> Any:
        with self._lock:
            handle = self._handles.get(filename)
            if handle is None:
                try:
                    handle = safe_open(self.path / filename, framework="pt", device="cpu")
                except (SafetensorError, OSError) as error:
                    raise CheckpointError(
                        f"{filename} cannot be opened ({error}): download it again."
                    ) from error
                self._handles[filename] = handle
            return handle

    def _counted(self, tensor: Tensor) -> Tensor:
        with self._lock:
            self.bytes_read += tensor.nbytes
        return tensor

    def _whole_groups(self, weight_name: str, columns: Slice, width: int, group_size: int) -> tuple[int, int]:
        start, stop = _bounds(columns, width)
        if not 0 <= start <= stop <= width or start % group_size or stop % group_size:
            raise CheckpointError(
                f"Columns {start}:{stop} of {weight_name} are not whole groups of {group_size} within "
                f"{width}: choose a tensor-parallel size that divides the groups."
            )
        return start, stop


def resolve_checkpoint(path_or_hub_id: str | Path, revision: str | None = None) -> Path:
    """The local folder of a checkpoint: as given, or downloaded from the hub into its cache.

    Raises CheckpointError when it is neither a folder nor a hub id that can be downloaded.
    """
    if not str(path_or_hub_id):
        raise CheckpointError("An empty path was given: name the checkpoint's folder or its hub id.")
    folder = Path(path_or_hub_id).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    name = str(path_or_hub_id)
    not_found = f"{name} is neither a folder nor a hub id such as moonshotai/Kimi-K2.5"
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise CheckpointError(f"{not_found}: check the path.") from error
    if folder.exists() or name.count("/") != 1 or name.startswith((".", "~")):
        raise CheckpointError(f"{not_found}: check the path.")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=HUB_PATTERNS))
    # Every kind of failure of a download means the same here; OSError covers the network and the disk.
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{not_found} that can be downloaded ({reason}): check the path, the id, and the network."
        ) from error


def _within(info: TensorInfo, dimension: int, wanted: Slice | None) -> Slice:
    size = info.shape[dimension] if dimension < len(info.shape) else 0
    start, stop = _bounds(wanted, size)
    if dimension >= len(info.shape) or not 0 <= start <= stop <= size:
        raise CheckpointError(
            f"Range {start}:{stop} is not within dimension {dimension} of {info.name} {list(info.shape)} "
            f"({info.filename}): ask for a range that is."
        )
    return Slice(start, stop)


def _bounds(wanted: Slice | None, size: int) -> tuple[int, int]:
    """Start and stop without Python's clamping: a range beyond the end is a mistake, not a shorter range."""
    if wanted is None:
        return 0, size
    if wanted.step not in (None, 1):
        raise CheckpointError(f"A slice with step {wanted.step} was asked for: only steps of 1 are read.")
    return (
        0 if wanted.start is None else wanted.start,
        size if wanted.stop is None else wanted.stop,
    )
