"""What the tests on the simulated device share."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.recovery import shared_memory
from tests import mutation
from tests.accelerator.curves import References


@pytest.fixture(scope="session")
def references(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> References:
    """Curves of the CPU; where mutants are tried, those that the package itself has made."""
    kept = os.environ.get(mutation.REFERENCES)
    return References(Path(kept) if kept else tmp_path_factory.mktemp("references"), tokens)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in shared memory, as an agent makes it."""
    folder = shared_memory.SHM_ROOT / f"phalanx-test-{os.getpid()}-{random.randrange(1 << 30)}"
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder)
