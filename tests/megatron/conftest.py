from collections.abc import Iterator

import pytest

from tests.megatron.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.close()
