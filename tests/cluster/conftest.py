"""What the tests of several nodes share."""

from collections.abc import Iterator

import pytest

from tests.cluster import warm_nodes as parents
from tests.cluster import warm_python


@pytest.fixture(scope="session")
def warm_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[parents.WarmNodes]:
    """The parent of nodes that are agents without torch."""
    with parents.running(tmp_path_factory.mktemp("nodes")) as made:
        yield made


@pytest.fixture
def warm() -> Iterator[warm_python.WarmPython]:
    """Programs for nodes in namespaces; a test that has them runs no ranks besides."""
    with warm_python.running() as made:
        yield made
