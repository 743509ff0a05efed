"""Each rank of an expert-parallel engine keeps what its own experts need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.inference.adapters import ATTENTION, EXPERTS, random_adapter, save_adapter
from tests.inference.vllm_cpu import free_port

ROOT = Path(__file__).parents[2]


def test_two_ranks(checkpoint: Path, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "adapter", *random_adapter(checkpoint, f"({ATTENTION}|{EXPERTS})"))
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.inference.rank", str(rank), port, str(checkpoint), str(folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in ranks]
    for rank, (out, err) in enumerate(outputs):
        assert ranks[rank].returncode == 0, err
        mine = list(range(4 * rank, 4 * rank + 4))
        assert json.loads(out.splitlines()[-1]) == {
            "experts": [rank, 4, 8],
            "as from disk": True,
            "values taken of experts": mine,
            "experts kept": [4, 4, 4],
            "in place": True,
        }
