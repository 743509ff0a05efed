from __future__ import annotations

from pathlib import Path

import pytest

from tests.multimodal import folders


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.qwen_folder(tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="session")
def kimi_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.kimi_folder(tmp_path_factory.mktemp("kimi_k25"))
