#!/usr/bin/env python3
"""SkyRL's fake INT4 on the experts of a Kimi K2.5 layer on one GPU, without the plugin and with it.

    python benchmarks/skyrl_fake_quant.py                # 48 experts: 384 over 8 ranks
    python benchmarks/skyrl_fake_quant.py --experts 24

It times SkyRL's own patch of Transformer Engine's grouped linears, which every forward pass calls once a
linear, and beside it the kernels by themselves: the ratios must agree. Bandwidth counts each weight read and
written once.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from transformer_engine.pytorch import GroupedLinear

from kimi_bridge.int4 import KIMI_QAT, served_values
from kimi_bridge.integrations import skyrl

PLACES = ("fake_int4_qat", "quantization.fake_int4_qat")
HIDDEN, WIDTH = 7168, 2048


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, default=48)
    experts = parser.parse_args().experts
    module = fake_int4_module()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {experts} experts, bfloat16")
    linears = {
        "linear_fc1": grouped(experts, HIDDEN, 2 * WIDTH),
        "linear_fc2": grouped(experts, WIDTH, HIDDEN),
    }
    from megatron.core.extensions.transformer_engine import TEGroupedLinear

    # Without the plugin first, on SkyRL's module as it was imported.
    masters = TEGroupedLinear._get_weight_tensors
    module.install_fake_int4_qat(32, 7.0, -7)
    eager = {name: seconds(lambda each=each: of(each)) for name, each in linears.items()}
    values = {name: of(each) for name, each in linears.items()}
    TEGroupedLinear._get_weight_tensors, module._installed = masters, False
    skyrl.install()
    module.install_fake_int4_qat(32, 7.0, -7)
    fused = {name: seconds(lambda each=each: of(each)) for name, each in linears.items()}

    print(f"\n{'':12} {'SkyRL':>22} {'with the plugin':>22} {'ratio':>7} {'kernels alone':>14}")
    for name, linear in linears.items():
        weights = masters(linear)
        size = 2 * sum(weight.nbytes for weight in weights)
        ratio = eager[name] / fused[name]
        print(
            f"{name:12} {rate(eager[name], size):>22} {rate(fused[name], size):>22} {ratio:7.1f}"
            f" {kernels_alone(module, weights):14.1f}"
        )
        same = all(torch.equal(a, b) for a, b in zip(values.pop(name), of(linear), strict=True))
        print(f"  the same values: {same}")
    skyrl.uninstall()


def rate(time: float, size: int) -> str:
    return f"{time * 1e3:.3f} ms {size / time / 1e9:5.0f} GB/s"


def kernels_alone(module: Any, weights: list[torch.Tensor]) -> float:
    """How much faster this library's one launch is than SkyRL's function for each weight."""
    skyrls = module.fake_int4_quantize_ste.__wrapped__
    references = [None] * len(weights)
    slow = seconds(lambda: [skyrls(weight, 32, 7.0, -7) for weight in weights])
    return slow / seconds(lambda: served_values(weights, references, KIMI_QAT))


def fake_int4_module() -> Any:
    """0.3.0 and 0.4.0 have it at different places."""
    folder = "skyrl.backends.skyrl_train.workers.megatron"
    for place in PLACES:
        try:
            return importlib.import_module(f"{folder}.{place}")
        except ModuleNotFoundError:
            continue
    raise SystemExit("SkyRL is not installed here: pip install --no-deps skyrl==0.3.0")


def grouped(experts: int, columns: int, rows: int) -> Any:
    linear = GroupedLinear(experts, columns, rows, bias=False, params_dtype=torch.bfloat16, device="cuda")
    # As with LoRA, where SkyRL allows its QAT.
    return linear.requires_grad_(False)


def of(linear: Any) -> list[torch.Tensor]:
    """What the linear's forward pass asks for."""
    from megatron.core.extensions.transformer_engine import TEGroupedLinear

    return TEGroupedLinear._get_weight_tensors(linear)


def seconds(operation: Callable[[], object], repeats: int = 20) -> float:
    """The median by the GPU's clock, after three that are not counted."""
    times = []
    for run in range(repeats + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        operation()
        end.record()
        torch.cuda.synchronize()
        if run >= 3:
            times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    main()
