"""Fixtures of all tests."""

from collections.abc import Iterator

import pytest

from tests.helpers import stop_zygote


@pytest.fixture(scope="session", autouse=True)
def zygote() -> Iterator[None]:
    """The parent of the tests' ranks is started by the first `run_ranks` and ended here."""
    yield
    stop_zygote()
