"""The command line of `scripts/gpu_check.py`."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from tests.gpu.check.runner import STEPS, run
from tests.gpu.check.state import Check, Options, Row

ROOT = Path(__file__).parents[3]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Raises SystemExit(2) for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="gpu_check.py",
        description="Does all that this library promises on a GPU, and prints a table. Exit code 1: a step"
        " failed.",
    )
    defaults = Options()
    add = parser.add_argument
    add(
        "--engine-python",
        default=default_engine(),
        help="vLLM's interpreter (default: .venv-vllm's, or this)",
    )
    add("--engine-pythonpath", help="PYTHONPATH of the engine, where its packages lie in folders")
    add("--checkpoint", type=Path, help="an INT4 checkpoint (default: synthesized, with the real widths)")
    add("--steps", type=int, default=defaults.steps, help="LoRA steps")
    add("--full-steps", type=int, default=defaults.full_steps, help="full fine-tuning steps")
    add("--lr", type=float, default=defaults.lr, help="for the adapters")
    add("--full-lr", type=float, default=defaults.full_lr, help="for full fine-tuning")
    add(
        "--layers",
        type=int,
        default=defaults.layers,
        help="of the synthesized checkpoint; the first is dense",
    )
    add("--experts", type=int, default=defaults.experts)
    add("--vocabulary", type=int, default=defaults.vocabulary)
    add("--dense", type=int, default=defaults.dense, help="width of the dense layer's MLP")
    add("--small", action="store_true", help="not the real widths, for a first try")
    add("--top", type=int, default=defaults.top, help="tokens of the exact KL")
    add(
        "--engine-memory",
        type=float,
        default=defaults.engine_memory,
        help="share of the GPU an engine asks for",
    )
    add("--no-routing", dest="routing", action="store_false", help="do not ask vLLM which experts it took")
    add("--nproc", type=int, default=1, help="processes, one a GPU; more than one adds TP 2, EP 2 and PP 2")
    add("--only", help=f"steps, with commas: {','.join(STEPS)}")
    add("--skip", help="steps to leave out, with commas")
    add("--keep", type=Path, help="a folder for checkpoints and logs, kept and used again")
    add("--time-limit", type=float, default=defaults.time_limit, help="seconds; steps after it fail")
    add("--json", type=Path)
    add("--markdown", type=Path)
    options = parser.parse_args(arguments)
    options.names = _names(parser, options.only, options.skip)
    if options.steps < 1 or options.full_steps < 1:
        parser.error("--steps and --full-steps are at least 1")
    if options.nproc > 1 and options.nproc % 2:
        parser.error("--nproc is 1 or even")
    return options


def default_engine() -> str:
    """.venv-vllm's interpreter where there is one, else this one."""
    theirs = ROOT / ".venv-vllm" / "bin" / "python"
    return str(theirs) if theirs.exists() else sys.executable


def _names(parser: argparse.ArgumentParser, only: str | None, skip: str | None) -> list[str]:
    chosen, left_out = (set(text.split(",")) if text else set() for text in (only, skip))
    if unknown := (chosen | left_out) - STEPS.keys():
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    return [name for name in STEPS if (not chosen or name in chosen) and name not in left_out]


def main(arguments: Sequence[str] | None = None) -> int:
    """0: everything passed; 1: a step failed, or there is no GPU."""
    parsed = parse(arguments)
    import torch

    if not torch.cuda.is_available() or importlib.util.find_spec("megatron") is None:
        print(
            "gpu_check needs a CUDA device and Megatron: run it in the trainer's environment.",
            file=sys.stderr,
        )
        return 1
    from tests.gpu.check import report

    options = Options(**{field.name: getattr(parsed, field.name) for field in fields(Options)})
    check = Check(options)

    def save(rows: list[Row]) -> None:
        for path, write in ((parsed.json, report.write_json), (parsed.markdown, report.write_markdown)):
            if path is not None:
                write(path, rows, check)

    try:
        rows = run(check, parsed.names, save)
        report.print_tables(rows, check)
    finally:
        check.close()
    failed = [row.name for row in rows if not row.passed]
    print(f"FAILED: {', '.join(failed)}" if failed else "passed")
    return 1 if failed else 0
