"""Weights from a checkpoint into Megatron's shards and back.

In: each rank reads its own slices, dequantizes them and copies them; no rank talks to another.
Out: the rank that owns a shard quantizes it, and one exchange per bucket of bytes, whatever the number
of tensors in it, carries packed INT4 to the ranks that want the result.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.models.conversion.model_bridge import HFWeightTuple
from megatron.bridge.models.conversion.utils import unwrap_model

from kimi_bridge.checkpoint.families import is_carried
from kimi_bridge.checkpoint.files import copy_artifacts, write_json
from kimi_bridge.checkpoint.quantization import with_dtype, without_quantization
from kimi_bridge.checkpoint.reader import CheckpointReader
from kimi_bridge.checkpoint.writer import CheckpointWriter, TensorSpec
from kimi_bridge.errors import KimiBridgeError
from kimi_bridge.int4 import Int4Scheme, Int4Weight, dequantize, requantize
from kimi_bridge.megatron.collective import raise_together, rank
from kimi_bridge.megatron.exchange import Piece, exchange
from kimi_bridge.megatron.shards import Shard, is_vocabulary, local_shards, mark
from kimi_bridge.progress import progress

DEFAULT_BUCKET_BYTES = 1 << 30
# Threads that read, and weights read before they are needed: real ones are about 8 MB as INT4.
_READERS, _READ_AHEAD = 2, 8


def load_checkpoint(bridge: Any, model: list[torch.nn.Module]) -> None:
    """Loads the checkpoint of an `AutoBridge` into this rank's model chunks. All ranks call it."""
    bridge.load_hf_weights(model)


def export_checkpoint(
    bridge: Any,
    model: list[torch.nn.Module],
    dst: str | Path,
    *,
    weight_dtype: torch.dtype | None = None,
    scheme: Int4Scheme | None = None,
    overwrite: bool = False,
) -> None:
    """Writes the model as a Hugging Face folder that serves. All ranks call it; rank 0 writes.

    Args:
        bridge: the `AutoBridge` that the model came from; its checkpoint is the reference.
        model: this rank's model chunks.
        dst: the folder to make. Nothing appears under its final name before it is complete.
        weight_dtype: write every text weight as a plain tensor of this dtype instead of INT4.
        scheme: how a group that training changed is quantized (default: `KIMI_QAT`'s numbers).
        overwrite: replace a checkpoint that is already there.

    Raises:
        KimiBridgeError: see `WeightStream`; also a destination that holds a checkpoint.
    """
    stream = bridge.export_hf_weights(model, cpu=True, weight_dtype=weight_dtype)
    stream.scheme = scheme or stream.scheme
    save(stream, stream.reader, Path(dst).expanduser(), overwrite=overwrite)


def iter_int4_weights(
    bridge: Any,
    model: list[torch.nn.Module],
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    scheme: Int4Scheme | None = None,
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The text weights under their checkpoint names, experts as INT4, in buckets for a weight sync.

    Every rank gets every bucket, on the device of its process group. A bucket holds whole tensors of at
    most `bucket_bytes` together (a larger tensor comes alone).
    """
    stream = bridge.export_hf_weights(model, cpu=False, show_progress=False)
    stream.scheme, stream.bucket_bytes = scheme or stream.scheme, bucket_bytes
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    with contextlib.closing(stream):
        for name, tensor in stream:
            if bucket and size + tensor.nbytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += tensor.nbytes
        if bucket:
            yield bucket


def unwrap(models: list[Any]) -> list[Any]:
    """The model chunks without DDP and Float16Module around them."""
    return unwrap_model(models)


def load(tasks: Sequence[Any], reader: CheckpointReader) -> None:
    """Fills the parameters of Megatron-Bridge's conversion tasks from this rank's slices.

    Raises:
        CheckpointError: on every rank; before anything is written where a shape does not fit.
    """
    with raise_together():
        shards = local_shards(tasks, reader)
    total, done = sum(shard.tensor.nbytes for shard in shards), 0
    with raise_together(), torch.no_grad(), progress(f"Loading {reader.path.name}") as advance:
        for shard, stored in _read_ahead(shards, reader):
            stored = stored.to(shard.tensor.device)
            value = stored if isinstance(stored, torch.Tensor) else dequantize(stored, stored.scale.dtype)
            shard.tensor[: len(value)].copy_(value)
            shard.tensor[len(value) :].zero_()
            mark(shard, reader)
            done += shard.tensor.nbytes
            advance(done, total)


def _read_ahead(
    shards: list[Shard], reader: CheckpointReader
) -> Iterator[tuple[Shard, torch.Tensor | Int4Weight]]:
    """The shards with what the files hold of them, read by threads while earlier ones are dequantized."""
    with ThreadPoolExecutor(max_workers=_READERS) as pool:
        waiting: deque[tuple[Shard, Future[torch.Tensor | Int4Weight]]] = deque()
        try:
            for shard in shards:
                waiting.append((shard, pool.submit(_read, shard, reader)))
                if len(waiting) > _READ_AHEAD:
                    earliest, future = waiting.popleft()
                    yield earliest, future.result()
            while waiting:
                earliest, future = waiting.popleft()
                yield earliest, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def _read(shard: Shard, reader: CheckpointReader) -> torch.Tensor | Int4Weight:
    # What the reader returns is a view of the mapped file: the copies are what reads it.
    rows, columns = shard.ranges(reader.shape(shard.weight))
    if not reader.is_triplet(shard.weight):
        return reader.slice(shard.weight, rows, columns).clone()
    int4 = reader.int4(shard.weight, rows, columns)
    return Int4Weight(int4.packed.clone(), int4.scale.clone(), int4.shape)


def save(stream: WeightStream, reader: CheckpointReader, dst: Path, overwrite: bool = False) -> None:
    """Writes a stream's tensors, and everything else of the source's folder unchanged, on rank 0.

    All ranks call it, and an error on one is raised on all.
    """
    stream.receiver = 0
    others = [name for name in reader.weight_map if is_carried(name)]
    with contextlib.ExitStack() as stack:
        writer: CheckpointWriter | None = None
        with raise_together():
            if rank() == 0:
                specs = [*stream.specs, *(_spec(reader, name) for name in others)]
                writer = stack.enter_context(CheckpointWriter(dst, specs, overwrite=overwrite))
        try:
            for name, tensor in stream:
                if writer is not None:
                    writer.write(name, tensor)
        finally:
            stream.close()
        with raise_together():
            if writer is not None:
                for name in others:
                    writer.write(name, reader.tensor(name))
                # Last: until here a checkpoint that is being replaced is still whole.
                copy_artifacts(reader.path, dst)
                if stream.weight_dtype is not None:
                    config = with_dtype(without_quantization(reader.config_dict), stream.weight_dtype)
                    write_json(dst / "config.json", config)
                writer.finish()


class WeightStream(Iterator[HFWeightTuple]):
    """Checkpoint tensors from all ranks' shards, as `(name, tensor)`. All ranks must iterate.

    Tensors come in the order in which they arrive, not in that of the layers. `receiver` is the rank that
    gets them (None: all). `specs` lists what will come.

    Raises (while iterating, on every rank):
        Int4Error: a weight holds NaN or Inf.
        KimiBridgeError: see `kimi_bridge.megatron.shards.local_shards`.
    """

    def __init__(
        self,
        tasks: Sequence[Any],
        reader: CheckpointReader,
        *,
        weight_dtype: torch.dtype | None = None,
        cpu: bool = True,
        show_progress: bool = True,
    ):
        self.tasks, self.reader = tasks, reader
        self.weight_dtype, self.cpu, self.show_progress = weight_dtype, cpu, show_progress
        self.receiver: int | None = None
        self.bucket_bytes = DEFAULT_BUCKET_BYTES
        group_size = reader.quantization.group_size if reader.quantization else 32
        self.scheme = Int4Scheme(group_size=group_size)
        self._tensors: Iterator[HFWeightTuple] | None = None

    @property
    def specs(self) -> list[TensorSpec]:
        """Name, dtype and shape of every text tensor of the result, in the source's order."""
        weights = [name for name in self.reader.weight_names() if not is_carried(name)]
        return [spec for weight in weights for spec in self._specs_of(weight)]

    def __next__(self) -> HFWeightTuple:
        if self._tensors is None:
            self._tensors = self._run()
        return next(self._tensors)

    def close(self) -> None:
        """Ends the stream early and tells the other ranks, so that they do not wait."""
        if self._tensors is not None:
            self._tensors.close()  # type: ignore[attr-defined]

    def _run(self) -> Iterator[HFWeightTuple]:
        with raise_together():
            shards = [shard for shard in local_shards(self.tasks, self.reader) if shard.is_exported]
            pieces = [piece for shard in shards for piece in self._pieces_of(shard)]
        total = sum(spec.nbytes for spec in self.specs)
        tensors = exchange(pieces, self._produce(shards), self.bucket_bytes, self.receiver)
        done = 0
        with contextlib.closing(tensors), progress("Exporting", self.show_progress) as advance:
            for name, tensor in tensors:
                done += tensor.nbytes
                advance(done, total)
                yield HFWeightTuple(name, tensor.cpu() if self.cpu else tensor)
                if name.endswith(".weight_packed"):
                    shape_name = name.removesuffix("_packed") + "_shape"
                    yield HFWeightTuple(shape_name, self._shape_tensor(shape_name, tensor.device))

    def _shape_tensor(self, name: str, device: torch.device) -> torch.Tensor:
        # It says nothing that the model changes, so it does not travel: the source's own is taken.
        return self.reader.tensor(name).to("cpu" if self.cpu else device)

    def _as_int4(self, weight: str) -> bool:
        return self.weight_dtype is None and self.reader.is_triplet(weight)

    def _specs_of(self, weight: str) -> list[TensorSpec]:
        if self._as_int4(weight):
            return [_spec(self.reader, f"{weight}_{part}") for part in ("packed", "scale", "shape")]
        return [TensorSpec(weight, self._dtype_of(weight), self.reader.shape(weight))]

    def _dtype_of(self, weight: str) -> torch.dtype:
        dtype = self.reader.dtype(weight)
        return self.weight_dtype if self.weight_dtype and dtype.is_floating_point else dtype

    def _pieces_of(self, shard: Shard) -> list[Piece]:
        count = shard.size if shard.dim is not None else 1

        def piece(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Piece:
            return Piece(name, dtype, shape, shard.dim, shard.rank, count)

        rows, columns = _shape_in_checkpoint(shard, self.reader)
        if not self._as_int4(shard.weight):
            shape = (rows, *shard.tensor.shape[1:])
            return [piece(shard.weight, self._dtype_of(shard.weight), shape)]
        scale = self.reader.dtype(shard.weight)
        groups = columns // self.scheme.group_size
        return [
            piece(f"{shard.weight}_packed", torch.int32, (rows, columns // 8)),
            piece(f"{shard.weight}_scale", scale, (rows, groups)),
        ]

    def _produce(self, shards: list[Shard]) -> Iterator[torch.Tensor]:
        """The tensors of `_pieces_of` each shard, in that order."""
        for shard in shards:
            rows, columns = shard.ranges(self.reader.shape(shard.weight))
            value = shard.tensor[: _shape_in_checkpoint(shard, self.reader)[0]]
            if not self._as_int4(shard.weight):
                plain = value.to(self._dtype_of(shard.weight))
                if self.weight_dtype is not None and bool((plain.isinf() & value.isfinite()).any()):
                    raise KimiBridgeError(
                        f"{shard.weight} has values that {plain.dtype} cannot hold: export it in bfloat16 or"
                        " float32."
                    )
                yield plain
                continue
            reference = self.reader.int4(shard.weight, rows, columns).to(value.device)
            # Masters may be float32; the checkpoint's values are those of its scales' dtype.
            int4 = requantize(value.to(reference.scale.dtype), reference, self.scheme)
            yield int4.packed
            yield int4.scale


def _spec(reader: CheckpointReader, name: str) -> TensorSpec:
    info = reader.info(name)
    return TensorSpec(name, info.dtype, info.shape)


def _shape_in_checkpoint(shard: Shard, reader: CheckpointReader) -> tuple[int, int]:
    """Rows and columns of the shard without the rows that Megatron padded a vocabulary with."""
    rows, columns = shard.tensor.shape[0], shard.tensor.shape[1] if shard.tensor.ndim > 1 else 1
    if is_vocabulary(shard.weight):
        span = shard.ranges(reader.shape(shard.weight))[0] or slice(0, reader.shape(shard.weight)[0])
        rows = span.stop - span.start
    return rows, columns
