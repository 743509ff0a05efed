"""The codec on the CPU: one [4096, 7168] weight, as multiples of a bf16 clone of the result.

    python benchmarks/codec.py

All figures are medians of one run, taken by turns: other runs may meet the machine in another state.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from kimi_bridge.int4 import KIMI_QAT, dequantize, quantize, requantize

ROWS, COLUMNS = 4096, 7168
ROUNDS = 15
LIMITS = {"dequantize": 2.5, "quantize": 6.0}


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(ROWS, COLUMNS, generator=generator) * 0.02).to(torch.bfloat16)
    int4 = quantize(weight, KIMI_QAT)
    values = dequantize(int4)
    jobs: dict[str, Callable[[], object]] = {
        "clone": values.clone,
        "dequantize": lambda: dequantize(int4),
        "quantize": lambda: quantize(weight, KIMI_QAT),
        "requantize": lambda: requantize(values, int4, KIMI_QAT),
        **peer_jobs(int4.packed, weight),
    }
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(ROUNDS):
        for name, job in jobs.items():
            begin = time.perf_counter()
            job()
            times[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(measured) for name, measured in times.items()}
    print(f"one [{ROWS}, {COLUMNS}] weight, {torch.get_num_threads()} threads")
    for name, median in medians.items():
        limit = f"   (at most {LIMITS[name]})" if name in LIMITS else ""
        print(f"{name:32} {median * 1e3:7.1f} ms   {median / medians['clone']:6.2f} x clone{limit}")


def peer_jobs(packed: torch.Tensor, weight: torch.Tensor) -> dict[str, Callable[[], object]]:
    """compressed-tensors' own packing, which is a part of either direction."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    codes = unpack_from_int32(packed, 4, torch.Size((ROWS, COLUMNS)))
    return {
        "compressed-tensors unpack alone": lambda: unpack_from_int32(packed, 4, torch.Size((ROWS, COLUMNS))),
        "compressed-tensors pack alone": lambda: pack_to_int32(codes, 4),
    }


if __name__ == "__main__":
    main()
