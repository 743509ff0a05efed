import os
from collections.abc import Iterator
from importlib.metadata import version

import pytest

from tests.megatron.ranks import Ranks

# In the names of test_lora.py's tests: kinds of adapters on experts, which are the same in both families.
_ABOUT_EXPERTS = ("per-expert", "shared", "outer", "canonical-normalized", "expert_tensor_parallelism")
# See kimi_bridge.megatron.compat.
HAVE_MEGATRON_CHECKPOINTS = tuple(map(int, version("megatron-core").split(".")[:2])) >= (0, 19)
needs_megatron_checkpoints = pytest.mark.skipif(
    not HAVE_MEGATRON_CHECKPOINTS, reason="Megatron-Bridge's checkpoints need megatron-core 0.19"
)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the adapters' tests Kimi-VL runs those its queries matter to; with KIMI_BRIDGE_ALL_TESTS all."""
    if os.environ.get("KIMI_BRIDGE_ALL_TESTS"):
        return
    skipped = [
        item
        for item in items
        if item.nodeid.startswith("tests/megatron/test_lora.py")
        and "kimi_vl" in item.name
        and any(word in item.name for word in _ABOUT_EXPERTS)
    ]
    if skipped:
        config.hook.pytest_deselected(items=skipped)
        items[:] = [item for item in items if item not in skipped]
