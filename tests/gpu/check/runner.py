"""Runs the steps one by one: each is timed, and its failure is written down while the others go on."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

from tests.gpu.check import layouts, steps_faults, steps_full, steps_lora, steps_weights
from tests.gpu.check.state import Check, Row, free

# In the order in which they run: full fine-tuning changes the base model that earlier steps compare with.
STEPS: dict[str, tuple[str, Any]] = {
    **steps_weights.STEPS,
    **steps_lora.STEPS,
    **steps_full.STEPS,
    **steps_faults.STEPS,
    **layouts.STEPS,
}
# Which engine a step needs.
_ENGINES = {
    "serve": ("lora", "plain"),
    "mismatch": ("lora",),
    "full": ("plain",),
    "fault-kill": ("plain",),
}


def run(check: Check, names: list[str], save: Callable[[list[Row]], None] = lambda _rows: None) -> list[Row]:
    """The rows of the named steps. Engines start at once, and compile their kernels meanwhile.

    `save` gets the rows after each step, so that something is there if the process is killed.
    """
    rows = [_run_one(check, Row("source", "checkpoint"), _source)]
    needed = {engine for name in names for engine in _ENGINES.get(name, ())}
    if "lora" in needed:
        check.engine("lora", wait=False)
    if "plain" in needed and "roundtrip" not in names:
        check.engine("plain", check.exported if check.exported.exists() else None, wait=False)
    for name in names:
        title, function = STEPS[name]
        if name == "layouts" and check.options.nproc == 1:
            continue
        rows.append(_run_one(check, Row(name, title), function))
        if name == "roundtrip" and "plain" in needed:
            # It serves what was exported, where that went well.
            check.engine("plain", check.exported if rows[-1].passed else None, wait=False)
        save(rows)
        free()
    return rows


def _source(check: Check, row: Row) -> None:
    given = check.options.checkpoint is not None
    row.figures["origin"] = "given" if given else "synthesized, or left by an earlier run"
    row.figures["GB"] = sum(path.stat().st_size for path in check.source.iterdir()) / 1e9


def _run_one(check: Check, row: Row, function: Any) -> Row:
    begin = time.perf_counter()
    print(f"{time.monotonic() - check.begin:6.1f} s  {row.title} ...", flush=True)
    try:
        if check.left < 0:
            raise TimeoutError(f"the time limit of {check.options.time_limit:.0f} s was reached before")
        function(check, row)
    except Exception as error:
        traceback.print_exc()
        row.failures.append(f"{type(error).__name__}: {error}")
    row.seconds = time.perf_counter() - begin
    print(
        f"{time.monotonic() - check.begin:6.1f} s  {row.title}: {'pass' if row.passed else 'FAIL'}",
        flush=True,
    )
    return row
