"""Take out each wait on a device in turn, and see that a test notices: `python -m tests.accelerator.mutants`.

A mutant is a copy of the package without one statement that waits, or without one `non_blocking`. The tests that belong
to its file run on it until one fails: then it is killed. Survivors are printed, and the exit code is 1; what no test
can notice stands in EQUIVALENT, with the reason.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import ROOT

LIMIT_S = 240  # of one mutant's tests; a mutant that hangs is noticed, too

# Calls that hold the host or a stream until a device is somewhere, by their last name. `wait` is also that of many
# things of the host alone: it counts in these files.
WAITS = {"wait_event", "wait_stream", "synchronize", "record_stream", "used_here", "wait_here", "follow", "drain"}
WAITING = (
    "accelerator.py", "optim/*.py", "parallel/*.py", "comm/collectives.py", "comm/messages.py", "comm/transfers.py",
    "comm/ways.py", "comm/backend.py", "checkpoint/memory.py", "checkpoint/snapshot.py", "train/*.py", "tasks/task.py",
    "models/layers.py", "doctor/*.py",
)  # fmt: skip
ONE, MANY = "tests/accelerator/test_one_rank.py", "tests/accelerator/test_many_ranks.py"
KINDS = "tests/accelerator/test_kinds.py"
WAITS_TESTS = "tests/accelerator/test_waits.py"
TESTS = {  # by how a file begins
    "comm/": [WAITS_TESTS, KINDS, MANY, ONE],
    "doctor/": ["tests/accelerator/test_doctor.py"],
    "": [WAITS_TESTS, ONE, KINDS, MANY],
}

# "file: line of code" -> why no test can notice it. A line that stands there without need is an error.
EQUIVALENT: dict[str, str] = {}


@dataclass(frozen=True)
class Mutant:
    """A place in the package, and what the lines become."""

    file: str  # below phalanx/
    line: int
    code: str  # what is taken out, in one line
    text: str  # of the whole file

    @property
    def name(self) -> str:
        return f"{self.file}: {self.code}"


def mutants(package: Path) -> Iterator[Mutant]:
    """All mutants of the package, by file and line."""
    for file in sorted({path for pattern in WAITING for path in package.glob(pattern)}):
        text = file.read_text()
        lines = text.split("\n")
        for node in ast.walk(ast.parse(text)):
            name = str(file.relative_to(package))
            if isinstance(node, ast.Expr) and _waits(node.value):
                assert node.end_lineno is not None
                indent = " " * node.col_offset
                changed = [*lines[: node.lineno - 1], f"{indent}pass", *lines[node.end_lineno :]]
                yield Mutant(name, node.lineno, ast.unparse(node), "\n".join(changed))
            for keyword in node.keywords if isinstance(node, ast.Call) else ():
                if keyword.arg == "non_blocking":
                    at = keyword.value.lineno - 1
                    line = re.sub(r"non_blocking=[\w.]+", "non_blocking=False", lines[at], count=1)
                    yield Mutant(name, at + 1, lines[at].strip(), "\n".join([*lines[:at], line, *lines[at + 1 :]]))


def _waits(node: ast.expr) -> bool:
    """Whether an expression is a call that waits for a device, or for what another thread does with one."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr in WAITS or node.func.attr == "wait"


def killed_by(mutant: Mutant | None, files: list[str]) -> str | None:
    """The test that notices a mutant; None where none does, and for the package as it is."""
    with tempfile.TemporaryDirectory(prefix="phalanx-mutant-") as folder:
        copy = Path(folder)
        for each in ("phalanx", "tests"):  # where a file of the tests lies is where ranks look for the package
            shutil.copytree(ROOT / each, copy / each, ignore=shutil.ignore_patterns("__pycache__"))
        for each in ("recipes", "pyproject.toml", "docs"):
            (copy / each).symlink_to(ROOT / each)
        if mutant is not None:
            (copy / "phalanx" / mutant.file).write_text(mutant.text)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files]
        try:
            run = subprocess.run(
                command, cwd=copy, env=os.environ | {"PYTHONPATH": folder}, timeout=LIMIT_S, capture_output=True,
                text=True, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"more than {LIMIT_S} s"
    if run.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.*)$", run.stdout, re.MULTILINE)
    return failed.group(1).split(" - ")[0] if failed else run.stdout[-300:]


def main() -> int:
    """Run all mutants, or those of files that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="files below phalanx/, such as optim/lane.py; by default all")
    parser.add_argument("--list", action="store_true", help="only list the places")
    asked = parser.parse_args()
    package = ROOT / "phalanx"
    found = [each for each in mutants(package) if not asked.files or each.file in asked.files]
    survivors, begun = 0, time.monotonic()
    if not asked.list and (test := killed_by(None, [WAITS_TESTS, ONE, KINDS])) is not None:
        print(f"the package itself does not pass ({test}), so nothing would be seen")
        return 2
    for mutant in found:
        if mutant.name in EQUIVALENT:
            print(f"equivalent  {mutant.name}  ({EQUIVALENT[mutant.name]})")
            continue
        if asked.list:
            print(f"{mutant.file}:{mutant.line}: {mutant.code}")
            continue
        start = time.monotonic()
        files = next(tests for prefix, tests in TESTS.items() if mutant.file.startswith(prefix))
        test = killed_by(mutant, files)
        survivors += test is None
        print(
            f"{'SURVIVED' if test is None else 'killed  '}  {mutant.file}:{mutant.line}: {mutant.code}  "
            f"[{time.monotonic() - start:.0f} s, {test}]",
            flush=True,
        )
    print(f"{len(found)} places, {survivors} survivors, {(time.monotonic() - begun) / 60:.0f} min")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
