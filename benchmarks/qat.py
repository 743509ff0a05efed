#!/usr/bin/env python3
"""What fake INT4 costs on a GPU: each kernel beside a device copy and an eager version, and training steps.

    python benchmarks/qat.py                # kernels; with Megatron installed, training steps too
    python benchmarks/qat.py --kernels      # kernels alone

Bandwidth counts the bytes that each operation must read and write once.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable

import torch

from kimi_bridge.int4 import KIMI_QAT, Int4Weight, dequantize, quantize, served_values

SHAPES = ((2048, 7168), (7168, 2048))
MATRICES = 384


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", action="store_true", help="leave the training steps out")
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, groups of 32")
    for shape in SHAPES:
        kernels(*shape)
    if not arguments.kernels and importlib.util.find_spec("megatron"):
        from qat_steps import training_steps

        training_steps()


def kernels(rows: int, columns: int) -> None:
    """All experts' worth of one matrix of a Kimi K2.5 layer."""
    weights = list(torch.randn(MATRICES, rows, columns, device="cuda", dtype=torch.bfloat16).mul_(0.02))
    size = sum(weight.nbytes for weight in weights)
    out = torch.empty(MATRICES, rows, columns, device="cuda", dtype=torch.bfloat16)
    source = torch.stack(weights)
    int4 = [quantize(weight, KIMI_QAT) for weight in weights]
    packed = sum(weight.nbytes for weight in int4)
    one = Int4Weight(
        torch.cat([w.packed for w in int4]), torch.cat([w.scale for w in int4]), (MATRICES * rows, columns)
    )
    flat, flat_out = source.view(MATRICES * rows, columns), out.view(MATRICES * rows, columns)
    copy = bandwidth(lambda: out.copy_(source), 2 * size)
    rows_of_table = [
        ("device copy", copy),
        (
            "fake_quantize, fused",
            bandwidth(lambda: served_values(weights, [None] * MATRICES, KIMI_QAT), 2 * size),
        ),
        (
            "fake_quantize against a reference",
            bandwidth(lambda: served_values(weights, int4, KIMI_QAT), 2 * size + packed),
        ),
        ("dequantize", bandwidth(lambda: dequantize(one, out=flat_out), size + packed)),
        ("quantize", bandwidth(lambda: quantize(flat, KIMI_QAT), size + packed)),
        (
            "fake_quantize, eager PyTorch",
            bandwidth(lambda: [eager(w) for w in weights[:32]], size * 2 * 32 // MATRICES, 5),
        ),
    ]
    print(f"\n{MATRICES} matrices of [{rows}, {columns}]      GB/s   of the copy")
    for name, rate in rows_of_table:
        print(f"{name:36} {rate / 1e9:8.0f}   {rate / copy:8.1%}")


def eager(weight: torch.Tensor) -> torch.Tensor:
    """Fake quantization as one writes it in PyTorch: a kernel for each operation."""
    groups = weight.unflatten(1, (-1, 32))
    scale = (groups.abs().amax(-1, keepdim=True).float() / 7.0).to(weight.dtype)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    return ((groups / safe).round().clamp(-7, 7) * scale).flatten(1)


def bandwidth(operation: Callable[[], object], nbytes: int, repeats: int = 20) -> float:
    """Bytes per second: the median of runs timed by the GPU, after three that are not counted.

    Each run is the operation four times, so that the CPU prepares a launch while the GPU works, as it does
    in training.
    """
    for _ in range(3):
        operation()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(4):
            operation()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 4e3)
    return nbytes / sorted(times)[len(times) // 2]


if __name__ == "__main__":
    main()
