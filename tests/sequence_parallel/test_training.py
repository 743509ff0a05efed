"""The run whose curve the README shows, a few steps of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_trains_like_one_process() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/ulysses_training.py", "--steps", "5", "--tolerance", "1e-5"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("|") == 5 * 4
