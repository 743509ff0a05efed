"""The check's outcome: tables on the terminal, Markdown, JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.gpu.check.state import BATCH, CONTINUATION, PROMPT, Check, Row
from tests.gpu.check.steps_lora import AIM, BAR

_PACKAGES = {
    "torch": "torch",
    "megatron-core": "megatron-core",
    "megatron-bridge": "megatron-bridge",
    "transformer-engine": "transformer-engine",
    "transformers": "transformers",
    "triton": "triton",
}
_HOW = (
    f"Mean KL(engine || trainer) in nats over {BATCH} sequences of {CONTINUATION} tokens, sampled by vLLM at"
    f" temperature 1 after {PROMPT} prompt tokens, with batches of their own at each step. k3 is Schulman's"
    " estimator r - 1 - log r on the sampled tokens, r = p_trainer / p_engine. top-k is exact over the"
    " engine's k most likely tokens and one bucket for the others, a lower bound. A flip is a (token, layer)"
    " whose top-k experts differ between trainer and engine; KL without flips leaves out tokens with one at"
    " their own position, KL in a clean context also those with one anywhere before. Columns marked * show"
    " what is lost without a sync or without QAT; the bar does not hold for them."
)


def facts(rows: list[Row], check: Check) -> dict[str, Any]:
    """Date, versions, GPU and command."""
    versions = {}
    for name, package in _PACKAGES.items():
        try:
            versions[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not found"
    versions["vllm"] = next((e.ready["vllm"] for e in check.engines.values() if e.ready), "not started")
    gpu = "none"
    if torch.cuda.is_available():
        gpu = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "gpu": gpu,
        "python": sys.version.split()[0],
        "versions": versions,
        "command": f"python {shlex.join(_without_folders(sys.argv))}",
        "seconds": sum(row.seconds for row in rows),
        "passed": all(row.passed for row in rows),
        "bar": BAR,
        "aim": AIM,
    }


def _without_folders(arguments: list[str]) -> list[str]:
    """Where packages and folders lie on one machine says nothing to a reader."""
    return [Path(arguments[0]).name if "/" in arguments[0] else arguments[0], *arguments[1:]]


def write_json(path: Path, rows: list[Row], check: Check) -> None:
    content = {
        **facts(rows, check),
        "steps": [{**vars(row), "passed": row.passed} for row in rows],
        "mismatch": check.mismatches,
    }
    path.write_text(json.dumps(_finite(content), indent=1) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def print_tables(rows: list[Row], check: Check) -> None:
    """The steps and the mismatch on the terminal."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    table = Table("step", "", "s", "figures")
    for row in rows:
        text = "\n".join([*_figures(row), *(f"FAILED: {failure}" for failure in row.failures)])
        table.add_row(row.title, "pass" if row.passed else "FAIL", f"{row.seconds:.1f}", escape(text))
    console.print(table)
    for name, header, lines in mismatch_tables(check.mismatches):
        table = Table(*header, title=name)
        for line in lines:
            table.add_row(*line)
        console.print(table)


def write_markdown(path: Path, rows: list[Row], check: Check) -> None:
    found = facts(rows, check)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        f"`{found['command']}` on {found['gpu']}, {found['date']}: "
        f"{'passed' if found['passed'] else 'FAILED'} in {found['seconds']:.0f} s."
        f" Python {found['python']}, {versions}.",
        "",
        *_markdown(
            ["step", "", "s", "figures"],
            [
                [
                    row.title,
                    "pass" if row.passed else "**fail**",
                    f"{row.seconds:.1f}",
                    "; ".join([*_figures(row), *(f"**{failure[:300]}**" for failure in row.failures)]),
                ]
                for row in rows
            ],
        ),
    ]
    tables = mismatch_tables(check.mismatches)
    if tables:
        lines += ["", _HOW]
    for name, header, body in tables:
        lines += ["", f"**{name}**", "", *_markdown(header, body)]
    path.write_text("\n".join(lines) + "\n")


def _markdown(header: list[str], body: list[list[str]]) -> list[str]:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [line(header), line(["---"] * len(header)), *map(line, body)]


def mismatch_tables(mismatches: list[dict[str, Any]]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, header, rows) of the KL at every step, and of its means with the routing flips."""
    tables = []
    for name in dict.fromkeys(entry["table"] for entry in mismatches):
        entries = [entry for entry in mismatches if entry["table"] == name]
        columns = list(dict.fromkeys(entry["column"] for entry in entries))
        steps = list(dict.fromkeys(entry["step"] for entry in entries))
        by_place = {(entry["step"], entry["column"]): entry for entry in entries}
        marks = {e["column"]: "" if e["bar"] else " *" for e in entries}
        header = ["step", *(f"{column}{marks[column]}: k3 / top-k" for column in columns)]
        body = []
        for step in steps:
            found = [by_place.get((step, column)) for column in columns]
            body.append(
                [str(step), *("" if e is None else f"{e['k3']:.5f} / {e['top_k']:.5f}" for e in found)]
            )
        tables.append((f"Mean KL after each step, {name}", header, body))
        means = []
        for column in columns:
            chosen = [entry for entry in entries if entry["column"] == column]
            means.append(
                [
                    column + marks[column],
                    *(
                        _mean(chosen, key)
                        for key in (
                            "k3",
                            "top_k",
                            "largest",
                            "entropy",
                            "flips",
                            "flipped_tokens",
                            "clean",
                            "clean_context",
                        )
                    ),
                ]
            )
        header = [
            "mean over the steps",
            "k3",
            "top-k",
            "largest k3 of a token",
            "entropy",
            "flips",
            "tokens with a flip",
            "k3 without flips",
            "k3 in a clean context",
        ]
        tables.append((f"Routing, {name}", header, means))
    return tables


def _mean(entries: list[dict[str, Any]], key: str) -> str:
    values = [entry[key] for entry in entries if entry[key] is not None]
    return f"{sum(values) / len(values):.5f}" if values else "not known"


def _figures(row: Row) -> list[str]:
    return [f"{name} {_number(value)}" for name, value in row.figures.items()]


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
