"""What is written for real GPUs runs on the simulated one, too, but for compiled code: so it still runs when there is
one."""

import os
import re
import subprocess
import sys

from tests.accelerator.curves import EVERYTHING
from tests.accelerator.device import needs_device, sim_environment
from tests.helpers import ROOT

FILES = {"tests/gpu/test_accelerator.py": (12, 6), "tests/gpu/test_offload.py": (3, 0)}  # how many pass, are skipped
REST = {"tests/gpu/test_sharded.py": (9, 2)}


@needs_device
def test_the_tests_of_gpus_pass_on_the_simulated_device() -> None:
    files = FILES | REST if EVERYTHING else FILES
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | sim_environment(order="main_last"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-8000:]
    passed, skipped = (sum(numbers) for numbers in zip(*files.values(), strict=True))
    assert re.search(rf"^{passed} passed, {skipped} skipped", done.stdout, re.M), done.stdout[-1000:]
