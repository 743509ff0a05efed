"""The INT4 -> bf16 conversion against compressed-tensors' own, and against writing the same bytes alone.

    python benchmarks/conversion.py --folder DIR

Makes, once, a checkpoint with 96 expert matrices of the published shapes ([2048, 7168] and [7168, 2048];
757 MB of INT4, 2.8 GB as bf16), and prints ratios within the run: other runs on the same machine may meet
it in another state. Needs 10 GB of disk and 6 GB of memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kimi_bridge.checkpoint import dequantize_checkpoint, synthesize_checkpoint

WORKERS = 2
OVERRIDES = {
    "first_k_dense_replace": 0,
    "hidden_size": 7168,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 32,
    "num_hidden_layers": 1,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("benchmark-data"), help="Where to work.")
    parser.add_argument("--rounds", type=int, default=3, help="Medians count.")
    parser.add_argument("--no-peer", action="store_true", help="Leave out compressed-tensors, which is slow.")
    arguments = parser.parse_args()
    src = arguments.folder / "int4"
    if not (src / "config.json").exists():
        print("making the checkpoint, once ...", flush=True)
        synthesize_checkpoint(src, size="tiny", overrides=OVERRIDES, overwrite=True)

    ours, plain, durable, peer = [], [], [], []
    for _ in range(arguments.rounds):
        ours.append(timed(arguments.folder / "ours", lambda dst: convert(src, dst)))
        load(arguments.folder / "ours")
        plain.append(timed(arguments.folder / "plain", lambda dst: write(dst, sync=False)))
        durable.append(timed(arguments.folder / "plain", lambda dst: write(dst, sync=True)))
        if not arguments.no_peer:
            peer.append(timed(arguments.folder / "peer", lambda dst: convert_by_peer(src, dst)))
    nbytes = sum(path.stat().st_size for path in (arguments.folder / "ours").glob("*.safetensors"))
    mine, alone, synced = (statistics.median(times) for times in (ours, plain, durable))
    print(f"dequantize with verification, {WORKERS} workers   {mine:6.2f} s   {ours}")
    print(f"writing the same {nbytes / 1e9:.1f} GB, safetensors   {alone:6.2f} s   {plain}")
    print(f"the same, and waiting for the disk        {synced:6.2f} s   {durable}")
    print(f"  ours / plain write             {mine / alone:5.2f}   (at most 1.6)")
    print(f"  ours / plain write on the disk {mine / synced:5.2f}   (ours waits for the disk)")
    if not arguments.no_peer:
        print(f"compressed-tensors, {WORKERS} workers             {statistics.median(peer):6.2f} s   {peer}")
        print(f"  peer / ours                    {statistics.median(peer) / mine:5.2f}   (at least 3)")
        print(f"  the same bits: {same(arguments.folder / 'ours', arguments.folder / 'peer')}")


def timed(dst: Path, job: Callable[[Path], None]) -> float:
    """Seconds that `job` takes, from an empty destination and a disk that nobody else's bytes wait for."""
    shutil.rmtree(dst, ignore_errors=True)
    os.sync()
    begin = time.perf_counter()
    job(dst)
    return round(time.perf_counter() - begin, 2)


def convert(src: Path, dst: Path) -> None:
    dequantize_checkpoint(src, dst, workers=WORKERS)


_LOADED: dict[str, dict[str, torch.Tensor]] = {}


def load(folder: Path) -> None:
    if not _LOADED:
        for path in sorted(folder.glob("*.safetensors")):
            _LOADED[path.name] = {name: tensor.clone() for name, tensor in load_file(path).items()}


def write(dst: Path, sync: bool) -> None:
    dst.mkdir()
    for name, tensors in _LOADED.items():
        save_file(tensors, dst / name, metadata={"format": "pt"})
        if sync:
            descriptor = os.open(dst / name, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def convert_by_peer(src: Path, dst: Path) -> None:
    from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer, convert_checkpoint

    convert_checkpoint(str(src), str(dst), CompressedTensorsDequantizer(str(src)), max_workers=WORKERS)


def same(a: Path, b: Path) -> bool:
    """Whether all tensors of two folders have the same bits, shards aside."""
    left, right = (
        {k: v for p in folder.glob("*.safetensors") for k, v in load_file(p).items()} for folder in (a, b)
    )
    return left.keys() == right.keys() and all(
        torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8)) for name in left
    )


if __name__ == "__main__":
    main()
