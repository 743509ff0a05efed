from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kimi_bridge.checkpoint import FAMILIES, synthesize_checkpoint
from tests.inference import vllm_cpu


@pytest.fixture(scope="session", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / request.param
    return synthesize_checkpoint(folder, int4=False, family=request.param)


@pytest.fixture(scope="session")
def built(checkpoint: Path) -> tuple[Any, Any]:
    """vLLM's config and model."""
    config = vllm_cpu.engine_config(checkpoint)
    return config, vllm_cpu.build_model(config)


@pytest.fixture(scope="session")
def shared_worker(built: tuple[Any, Any]) -> Any:
    return vllm_cpu.build_worker(*built)


@pytest.fixture
def worker(shared_worker: Any) -> Any:
    """A worker that holds no adapter."""
    manager = shared_worker.model_runner.lora_manager
    for lora_id in [*shared_worker.list_adapters_in_memory().values(), *manager.list_adapters()]:
        manager.remove_adapter(lora_id)
    return shared_worker
