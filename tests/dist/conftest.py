"""What the tests of distributed runs share."""

from pathlib import Path

import pytest

from tests.numerics import runs


@pytest.fixture(scope="session")
def undisturbed(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> runs.Outcome:
    """Two ranks, float64, without an incident."""
    return runs.walk(2, tmp_path_factory.mktemp("undisturbed"), tokens)
