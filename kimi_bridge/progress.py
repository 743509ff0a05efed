"""One progress display for every long job: a rich bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def progress(description: str, enabled: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Shows how many bytes of how many are done, their rate and the time left, on stderr.

    Only rank 0 of a distributed job shows anything. Yields the function to call with both numbers.
    """
    if not enabled or os.environ.get("RANK", "0") != "0":
        yield lambda _done, _total: None
    elif sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task(description, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        yield _PlainLines(description)


class _PlainLines:
    def __init__(self, description: str):
        self.description = description
        self.started = self.last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.last < _SECONDS_BETWEEN_LINES:
            return
        self.last = now
        rate = done / (now - self.started)
        left = (total - done) / rate / 60 if rate else float("inf")
        print(
            f"{self.description}: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s,"
            f" {left:.0f} min left",
            file=sys.stderr,
            flush=True,
        )
