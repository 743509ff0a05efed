from collections.abc import Iterator
from importlib.metadata import version

import pytest

from tests.megatron.ranks import Ranks

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
