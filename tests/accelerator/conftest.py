"""What the tests on the simulated device share."""

from pathlib import Path

import pytest

from tests.accelerator.curves import References


@pytest.fixture(scope="session")
def references(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> References:
    """Curves of the CPU."""
    return References(tmp_path_factory.mktemp("references"), tokens)
