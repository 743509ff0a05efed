from collections.abc import Iterator

import pytest

from tests.sequence_parallel.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.close()
