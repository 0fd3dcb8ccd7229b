"""What is written for real GPUs runs on the simulated one, too, but for compiled code: so it still runs when there is
one."""

import contextlib
import functools
import io
import os
import re
from typing import Any

import pytest

from phalanx.core.placement import Placement
from tests import helpers
from tests.accelerator.curves import EVERYTHING
from tests.accelerator.device import needs_device, run_on_device
from tests.helpers import ALL

# How many pass, are skipped. `make test` runs each test function of the first file with one of its values.
FILES = {"tests/gpu/test_accelerator.py": (12, 6), "tests/gpu/test_offload.py": (3, 0)}
FEW = {"tests/gpu/test_accelerator.py": (9, 4)}
REST = {"tests/gpu/test_sharded.py": (9, 2)}
ONCE = ["-k", "not fsdp2 and not selective and not adadelta and not nadam and not delayed"]
HOW: dict[str, Any] = {"order": "main_last", "devices": 1}


def pytest_here(placement: Placement, words: list[str]) -> list[Any]:
    """Exit code and output of pytest, whose process and ranks have the device, as on a machine with a GPU."""
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    helpers.run_ranks = functools.partial(run_on_device, **HOW)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = pytest.main(["-p", "no:cacheprovider", *words])
    return [int(code), out.getvalue()]


@needs_device
def test_the_tests_of_gpus_pass_on_the_simulated_device() -> None:
    files, words = (FILES | REST, []) if EVERYTHING else (FILES, []) if ALL else (FEW, ONCE)
    ((code, out),) = run_on_device(pytest_here, words=[*words, *files], timeout_s=600, **HOW)
    assert code == 0, out[-8000:]
    passed, skipped = (sum(numbers) for numbers in zip(*files.values(), strict=True))
    assert re.search(rf"^{passed} passed, {skipped} skipped", out, re.M), out[-1000:]
