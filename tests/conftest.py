"""Fixtures of all tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.helpers import stop_zygote

# On CI the same examples each time; elsewhere new ones, which is how they find what nobody thought of.
settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session", autouse=True)
def zygote() -> Iterator[None]:
    """The parent of the tests' ranks is started by the first `run_ranks` and ended here."""
    yield
    stop_zygote()


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with token files to train and to evaluate on."""
    from tests.numerics import runs  # imports torch, which not every test needs

    folder = tmp_path_factory.mktemp("tokens")
    runs.write_tokens(folder)
    return folder
