"""What the proofs share: token files, and the run that the others are compared with."""

from pathlib import Path

import pytest

from tests.numerics import runs


@pytest.fixture(scope="session")
def alone(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> runs.Outcome:
    """One rank, float64, the whole batch at once, all steps."""
    return runs.walk(1, tmp_path_factory.mktemp("alone"), tokens)
