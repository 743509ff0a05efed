"""Synthesized checkpoints shared by all tests of a session (never changed), and copies to spoil."""

import shutil
from pathlib import Path

import pytest

from kimi_bridge.checkpoint import synthesize_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny checkpoints: kimi, rtn and mixed in INT4, their bf16 forms, and kimi_vl."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for convention in ("kimi", "rtn", "mixed"):
        synthesize_checkpoint(folder / convention, convention=convention)
        synthesize_checkpoint(folder / f"{convention}_bf16", convention=convention, int4=False)
    synthesize_checkpoint(folder / "kimi_vl", family="kimi_vl")
    return folder


@pytest.fixture(scope="session")
def tiny(checkpoints: Path) -> Path:
    return checkpoints / "kimi"


@pytest.fixture(scope="session")
def kimi_vl(checkpoints: Path) -> Path:
    return checkpoints / "kimi_vl"


@pytest.fixture
def spoiled(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that a test may change."""
    return Path(shutil.copytree(tiny, tmp_path / "spoiled"))
