"""What the tests on the simulated device share."""

import os
from pathlib import Path

import pytest

from tests import mutation
from tests.accelerator.curves import References


@pytest.fixture(scope="session")
def references(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> References:
    """Curves of the CPU; where mutants are tried, those that the package itself has made."""
    kept = os.environ.get(mutation.REFERENCES)
    return References(Path(kept) if kept else tmp_path_factory.mktemp("references"), tokens)
