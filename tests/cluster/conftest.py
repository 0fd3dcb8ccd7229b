"""What the tests of several nodes share."""

from collections.abc import Iterator

import pytest

from tests.cluster import warm_nodes as parents


@pytest.fixture(scope="session")
def warm_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[parents.WarmNodes]:
    """The parent of nodes that are agents without torch."""
    with parents.running(tmp_path_factory.mktemp("nodes")) as made:
        yield made
