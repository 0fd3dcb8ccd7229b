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

FILES = {"tests/gpu/test_accelerator.py": (12, 6), "tests/gpu/test_offload.py": (3, 0)}  # how many pass, are skipped
REST = {"tests/gpu/test_sharded.py": (9, 2)}
HOW: dict[str, Any] = {"order": "main_last", "devices": 1}


def pytest_here(placement: Placement, files: list[str]) -> list[Any]:
    """Exit code and output of pytest, whose process and ranks have the device, as on a machine with a GPU."""
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    helpers.run_ranks = functools.partial(run_on_device, **HOW)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = pytest.main(["-p", "no:cacheprovider", *files])
    return [int(code), out.getvalue()]


@needs_device
def test_the_tests_of_gpus_pass_on_the_simulated_device() -> None:
    files = FILES | REST if EVERYTHING else FILES
    ((code, out),) = run_on_device(pytest_here, files=list(files), timeout_s=600, **HOW)
    assert code == 0, out[-8000:]
    passed, skipped = (sum(numbers) for numbers in zip(*files.values(), strict=True))
    assert re.search(rf"^{passed} passed, {skipped} skipped", out, re.M), out[-1000:]
