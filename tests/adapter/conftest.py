"""Synthesized checkpoints shared by all tests of a session (never changed)."""

import sys
from pathlib import Path

import pytest

from kimi_bridge.checkpoint import synthesize_checkpoint

# For the helpers there: convert_runs and checkpoint_folders.
sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny checkpoints: kimi, rtn and mixed in INT4, kimi_bf16, kimi of another seed, and kimi_vl."""
    folder = tmp_path_factory.mktemp("bases")
    for convention in ("kimi", "rtn", "mixed"):
        synthesize_checkpoint(folder / convention, convention=convention)
    synthesize_checkpoint(folder / "kimi_bf16", int4=False)
    synthesize_checkpoint(folder / "other", seed=1)
    synthesize_checkpoint(folder / "kimi_vl", family="kimi_vl")
    return folder


@pytest.fixture(scope="session")
def kimi(bases: Path) -> Path:
    return bases / "kimi"
