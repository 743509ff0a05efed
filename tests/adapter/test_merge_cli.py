"""`kimi-bridge merge-adapter` as a user meets it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_bridge.checkpoint import verify_checkpoints
from tests.adapter.adapters import adapter


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kimi_bridge", "merge-adapter", *map(str, arguments)]
    # A narrow terminal would wrap what the tests look for.
    environment = os.environ | {"COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)


@pytest.fixture(scope="module")
def lora(kimi: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter(tmp_path_factory.mktemp("cli") / "lora", kimi)


def test_the_table(kimi: Path, lora: Path, tmp_path: Path) -> None:
    done = run(kimi, lora, tmp_path / "out", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("merge-adapter ")
    assert not (tmp_path / "out").exists()
    done = run(kimi, lora, tmp_path / "out", "--workers", "2", "--max-shard-size", "500KB")
    assert (done.returncode, done.stderr) == (0, "")
    assert "verified 48 INT4 weights" in done.stdout
    rows = {line.split("│")[1].strip(): line for line in done.stdout.splitlines() if "│" in line}
    assert list(rows) == ["attention", "experts", "shared experts", "dense mlp"]
    assert rows["experts"].split("│")[5].strip() == "4,352"
    again = run(kimi, lora, tmp_path / "other", "--output", "bf16", "--scheme", "rtn", "--no-verify")
    assert again.stdout.splitlines()[-1] == "not verified"
    assert not verify_checkpoints(tmp_path / "out", tmp_path / "other").identical


def test_json_and_the_warning(kimi: Path, tmp_path: Path) -> None:
    tiny = adapter(tmp_path / "tiny", kimi, gain=1e-6)
    done = run(kimi, tiny, tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert done.stderr.startswith("WARNING: experts: the update is smaller than the INT4 grid resolves: 0 of")
    assert len(done.stderr.strip().splitlines()) == len(found["warnings"]) == 1
    assert "--output bf16" in done.stderr
    experts = found["kinds"][1]
    assert (experts["kind"], experts["weights"], experts["changed_groups"]) == ("experts", 17, 0)
    assert (found["int4"], found["verb"], found["adapter"]) == (True, "merge-adapter", str(tiny))


def test_one_line_for_an_error(bases: Path, lora: Path, tmp_path: Path) -> None:
    done = run(bases / "other", lora, tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "was trained on another base model" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert run(bases / "kimi", lora).returncode == 2
    assert run(bases / "kimi", lora, tmp_path / "out", "--output", "fp8").returncode == 2
    assert not (tmp_path / "out").exists()
