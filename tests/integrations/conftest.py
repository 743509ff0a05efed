from collections.abc import Iterator

import pytest

from tests.megatron.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    started = Ranks("tests.integrations")
    yield started
    started.close()
