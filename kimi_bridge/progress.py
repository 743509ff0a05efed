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
def progress(description: str, total: int, enabled: bool = True) -> Iterator[Callable[[int], None]]:
    """Shows how many of `total` bytes are done, their rate and the time left, on stderr.

    Only rank 0 of a distributed job shows anything. Yields the function to call with each number of bytes.
    """
    if not enabled or os.environ.get("RANK", "0") != "0":
        yield lambda _count: None
    elif sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task(description, total=total)
            yield lambda count: bar.advance(task, count)
    else:
        yield _PlainLines(description, total)


class _PlainLines:
    def __init__(self, description: str, total: int):
        self.description, self.total, self.done = description, total, 0
        self.started = self.last = time.monotonic()

    def __call__(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if now - self.last < _SECONDS_BETWEEN_LINES:
            return
        self.last = now
        rate = self.done / (now - self.started)
        left = (self.total - self.done) / rate if rate else float("inf")
        print(
            f"{self.description}: {self.done / 1e9:.1f} of {self.total / 1e9:.1f} GB,"
            f" {rate / 1e9:.2f} GB/s, {left / 60:.0f} min left",
            file=sys.stderr,
            flush=True,
        )
