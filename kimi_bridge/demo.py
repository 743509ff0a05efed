"""`kimi-bridge demo`: the main job on a tiny checkpoint, with real processes and real comparison."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kimi_bridge.checkpoint import synthesize_checkpoint, verify_checkpoints
from kimi_bridge.errors import KimiBridgeError

_LAYOUT_IN = ("--ep", "2")
_LAYOUT_OUT = ("--tp", "2")


def run_demo(folder: Path, console: Console) -> bool:
    """Synthesizes, imports with EP 2, exports with TP 2, compares; prints a table. True when identical.

    The checkpoint has groups that fit no quantization convention, so that an export which merely
    quantized again would be seen.

    Raises:
        KimiBridgeError: a step failed; its output has been printed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    source, megatron, result = folder / "checkpoint", folder / "megatron", folder / "exported"
    seconds: dict[str, float] = {}

    def step(title: str, action: Callable[[], object]) -> None:
        console.print(f"{title} ...", highlight=False)
        started = time.monotonic()
        action()
        seconds[title] = time.monotonic() - started

    step(
        "synthesize a checkpoint of the real structure",
        lambda: synthesize_checkpoint(source, convention="mixed"),
    )
    step(
        "import into Megatron, 2 processes, EP 2",
        lambda: _torchrun("import", "--hf-model", source, "--megatron-path", megatron, *_LAYOUT_IN),
    )
    step(
        "export from Megatron, 2 processes, TP 2",
        lambda: _torchrun(
            "export", "--hf-model", source, "--megatron-path", megatron, "--hf-path", result, *_LAYOUT_OUT
        ),
    )
    started = time.monotonic()
    report = verify_checkpoints(source, result)
    seconds["compare every tensor"] = time.monotonic() - started

    table = Table("checked", "tensors", "bytes", "seconds", "result")
    for row in report.rows:
        result_word = "bit-identical" if row.identical == row.count else "DIFFERENT"
        table.add_row(row.kind, f"{row.count:,}", f"{row.bytes:,}", f"{row.seconds:.2f}", result_word)
    console.print(table)
    for title, spent in seconds.items():
        console.print(f"{spent:6.1f} s  {title}", highlight=False)
    verdict = (
        "bit-identical" if report.identical else "DIFFERENT: run `kimi-bridge verify` on the two folders"
    )
    console.print(f"{source} and {result}: {verdict}", highlight=False, soft_wrap=True)
    return report.identical


def _torchrun(*arguments: str | Path) -> None:
    import torch

    # Two processes need two GPUs under NCCL; with fewer they run on the CPU under gloo.
    environment = dict(os.environ)
    if torch.cuda.device_count() < 2:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "kimi_bridge", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        raise KimiBridgeError(
            f"`{' '.join(command[1:])}` failed with exit code {done.returncode}; see above."
        )
