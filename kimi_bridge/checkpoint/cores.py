"""How many cores there are to work with."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Those that this process may use: fewer than the machine has, under taskset or in many a batch job."""
    # Linux alone has it; Python 3.13 has os.process_cpu_count.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
