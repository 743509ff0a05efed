"""Ulysses in two processes (NCCL): bfloat16 is as far from float32 as in one, for sdpa and flash.

On two GPUs, or on one where NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share it (NCCL 2.30.7).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < (1 if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else 2),
        reason="needs two CUDA devices",
    ),
]

ROOT = Path(__file__).parents[2]


def test_half_precision() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, "-m", "tests.gpu.ulysses_rank"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) >= 4
    for line in lines:
        print(line)
        # Logits, then gradients.
        for alone, together in zip(line["alone"], line["ulysses"], strict=True):
            assert 0 < together < 1.2 * alone < 0.1, line
