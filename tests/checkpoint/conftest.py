"""Synthesized checkpoints shared by all tests of a session (never changed), and copies to spoil."""

import shutil
from pathlib import Path

import pytest

from kimi_bridge.checkpoint import synthesize_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny checkpoints: kimi, rtn and mixed in INT4, and kimi_bf16, rtn_bf16, mixed_bf16."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for convention in ("kimi", "rtn", "mixed"):
        synthesize_checkpoint(folder / convention, convention=convention)
        synthesize_checkpoint(folder / f"{convention}_bf16", convention=convention, int4=False)
    return folder


@pytest.fixture(scope="session")
def tiny(checkpoints: Path) -> Path:
    return checkpoints / "kimi"


@pytest.fixture
def spoiled(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that a test may change."""
    return Path(shutil.copytree(tiny, tmp_path / "spoiled"))
