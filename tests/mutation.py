"""Mutants: the package with one line that is other than it is, and the tests that notice.

A process that has imported the package and the tests forks a child for each mutant. In the child, and in the zygote of
its ranks, the functions of one file have the mutant's code; the tests that belong to the file run there until the first
is red.
"""

import argparse
import ast
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from phalanx.system.fork import die_with
from tests import helpers, zygote
from tests.helpers import ROOT

PACKAGE = ROOT / "phalanx"
TEST_S = 60  # of one test: a mutant that hangs is noticed, too
ALL_S = 1800  # of all tests of one mutant
REFERENCES = "PHALANX_TEST_REFERENCES"  # a folder of curves that no mutant has made (tests/accelerator/conftest.py)
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Mutant:
    """A place in the package, and what the file becomes."""

    file: str  # below phalanx/
    line: int
    function: str  # in which it is, with its class; "" outside all
    code: str  # what is changed, in one line
    text: str  # of the whole file

    @property
    def name(self) -> str:
        """What stays when other lines change."""
        return f"{self.file} {self.function}: {self.code}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.code}"


@dataclass(frozen=True)
class Verdict:
    """What the tests say of the package, with a mutant or as it is."""

    mutant: Mutant | None
    tests: Sequence[str]
    red: str | None  # the first test that failed; None where all passed
    seconds: float


def nodes(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.AST]]:
    """All nodes below one, in the order of the text, each with the qualified name of the function that it is in."""
    for node in ast.iter_child_nodes(tree):
        yield within, node
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from nodes(node, ".".join(filter(None, [within, node.name])) if named else within)


def replaced(text: str, node: ast.expr | ast.stmt, by: str) -> str:
    """A file's text with other code in the place of a node."""
    assert node.end_lineno is not None
    lines = text.encode().split(b"\n")
    before = [*lines[: node.lineno - 1], lines[node.lineno - 1][: node.col_offset]]
    after = [lines[node.end_lineno - 1][node.end_col_offset :], *lines[node.end_lineno :]]
    return (b"\n".join(before) + by.encode() + b"\n".join(after)).decode()


# ------------------------------------------------------------------------------------------------------------ run tests


class Warm:
    """What tests and their ranks import, in a process that forks those who run them."""

    def __init__(self, tests: Iterable[str]) -> None:
        zygote.warm_up()
        importlib.import_module("tests.conftest")
        # The same examples for each mutant, however slowly they come: what is red is so by the mutant.
        calm = hypothesis.settings(deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck))
        hypothesis.settings.register_profile("mutants", calm)
        hypothesis.settings.load_profile("mutants")
        for file in {test.partition("::")[0] for test in tests}:
            importlib.import_module(file.removesuffix(".py").replace("/", "."))
        self._texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}  # as they have been imported
        self._functions: dict[Path, list[types.FunctionType]] = {}  # of the package, by file
        gc.unfreeze()  # what is frozen is not found
        for each in gc.get_objects():
            if type(each) is types.FunctionType and each.__code__.co_filename.startswith(str(PACKAGE)):
                self._functions.setdefault(Path(each.__code__.co_filename), []).append(each)
        gc.freeze()  # nobody that is forked need look through it

    def verdicts(self, tasks: Iterable[tuple[Mutant | None, Sequence[str]]], jobs: int) -> Iterator[Verdict]:
        """Run tests (pytest's arguments, the most telling first) on mutants, `jobs` at a time; in the order of their
        ends. Raises AssertionError where tests are named that do not exist."""
        waiting, running = deque(tasks), {}
        with tempfile.TemporaryDirectory(prefix="phalanx-mutants-") as folder:
            while waiting or running:
                while waiting and len(running) < jobs:
                    mutant, tests = waiting.popleft()
                    place = Path(tempfile.mkdtemp(dir=folder))
                    running[self._start(place, mutant, tests)] = (place, mutant, tests, time.monotonic())
                for pidfd in select.select(list(running), [], [])[0]:
                    place, mutant, tests, begun = running.pop(pidfd)
                    os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
                    os.close(pidfd)
                    yield Verdict(mutant, tests, _red(place), time.monotonic() - begun)
                    shutil.rmtree(place)

    def _start(self, place: Path, mutant: Mutant | None, tests: Sequence[str]) -> int:
        """A process that has the tests run in a child and then ends all that they have left; its pidfd."""
        parent = os.getpid()
        if (pid := os.fork()) == 0:
            die_with(parent)
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            above = os.getpid()
            if (tester := os.fork()) == 0:
                die_with(above)
                os.setsid()
                try:
                    self._test(place, mutant, tests)
                except BaseException:
                    (place / "error").write_text(traceback.format_exc())
                os._exit(1)
            select.select([os.pidfd_open(tester)], [], [], ALL_S)
            children = Path(f"/proc/self/task/{above}/children")
            while left := [int(child) for child in children.read_text().split()]:
                for child in left:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
            os._exit(0)
        return os.pidfd_open(pid)

    def _test(self, place: Path, mutant: Mutant | None, tests: Sequence[str]) -> None:
        """Run tests in this process, and leave in a file what came of it."""
        log, null = os.open(place / "log", os.O_WRONLY | os.O_CREAT), os.open(os.devnull, os.O_RDONLY)
        for ours, theirs in ((null, 0), (log, 1), (log, 2)):
            os.dup2(ours, theirs)
        if mutant is not None:
            self._become(mutant)
        ranks, another = _zygote(place / "zygote.log"), helpers._zygote.__wrapped__
        helpers._zygote = functools.cache(lambda: ranks.pop() if ranks else another())  # type: ignore[assignment]
        first = _FirstRed(tests, place / "now")
        how = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--timeout={TEST_S}"]
        how += ["--timeout-method=thread"]  # which ends the process: hypothesis would try what hangs again and again
        code = pytest.main([*how, f"--basetemp={place / 'tests'}", *tests], plugins=[first])
        sys.stdout.flush()
        (place / "red").write_text(json.dumps([int(code), first.name]))

    def _become(self, mutant: Mutant) -> None:
        """Give the functions of a mutant's file, wherever they are held, the mutant's code, and module-level names its
        values. (Processes that tests start, rather than fork, have the package as it is.)"""
        path, count = PACKAGE / mutant.file, 0
        if not mutant.function:
            count = _give_values(path, mutant.text)
        before, after = (list(_codes(compile(text, path, "exec"))) for text in (self._texts[path], mutant.text))
        turns = {(code.co_qualname, code.co_firstlineno): turn for turn, code in before}
        changed = dict(after)
        for function in self._functions[path]:
            code = function.__code__
            other = changed.get(turns.get((code.co_qualname, code.co_firstlineno), ("", 0)), code)
            count += other != code
            function.__code__ = other
        assert count, f"nothing that has been imported is other than it was: {mutant}"


def _give_values(path: Path, text: str) -> int:
    """Give a module, and those that import from it, the values that its text gives to names; how many are other."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    module, made = sys.modules[name], types.ModuleType(name)
    made.__package__ = module.__package__
    exec(compile(text, path, "exec"), vars(made))  # noqa: S102
    plain = {key: value for key, value in vars(module).items() if type(value) in (int, float, bool, tuple, dict)}
    other = {key: getattr(made, key) for key, value in plain.items() if getattr(made, key) != value}
    for key, value in other.items():
        if isinstance(value, dict):
            plain[key].update(value)
        else:
            setattr(module, key, value)
    ours = (f"{ROOT}/phalanx/", f"{ROOT}/tests/")  # and not what an environment below it holds
    for each in [each for each in sys.modules.values() if str(getattr(each, "__file__", "")).startswith(ours)]:
        imports = re.findall(
            rf"^ *from {re.escape(name)} import (\([^)]*\)|.*)", Path(str(each.__file__)).read_text(), re.MULTILINE
        )
        taken = set(re.findall(r"\w+", " ".join(imports)))
        vars(each).update({key: value for key, value in vars(module).items() if key in taken & set(other)})
    return len(other)


def _codes(code: types.CodeType) -> Iterator[tuple[tuple[str, int], types.CodeType]]:
    """All functions of a module, each with its name and which of that name it is."""
    seen: Counter[str] = Counter()
    waiting = deque([code])
    while waiting:
        each = waiting.popleft()
        yield (each.co_qualname, seen[each.co_qualname]), each
        seen[each.co_qualname] += 1
        waiting.extend(constant for constant in each.co_consts if isinstance(constant, types.CodeType))


def _red(place: Path) -> str | None:
    if (place / "error").exists():
        raise RuntimeError((place / "error").read_text())
    if not (place / "red").exists():
        return (
            f"the process ended, or {TEST_S} s, in {(place / 'now').read_text() if (place / 'now').exists() else '-'}"
        )
    code, red = json.loads((place / "red").read_text())
    expected = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)
    assert code in expected, (place / "log").read_text(errors="replace")[-2000:]
    return red or (None if code == pytest.ExitCode.OK else "collecting the tests")


class _FirstRed:
    """A plugin of pytest that runs tests in the order in which they are given, and remembers what failed first."""

    def __init__(self, tests: Sequence[str], now: Path) -> None:
        self.tests, self.now, self.name = tests, now, ""  # `now`: a file with what is run

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: next(at for at, test in enumerate(self.tests) if item.nodeid.startswith(test)))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.now.write_text(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.name = self.name or report.nodeid

    pytest_collectreport = pytest_runtest_logreport


class _Process:
    """What `tests.helpers` uses of a zygote's Popen."""

    def __init__(self, pid: int, requests: int, replies: int, log: Path) -> None:
        self.pid, self.args, self.returncode = pid, [str(log)], None
        self.stdin, self.stdout = os.fdopen(requests, "w"), os.fdopen(replies)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 9)

    def wait(self) -> None:
        os.waitpid(self.pid, 0)


def _zygote(log: Path) -> list[Any]:
    """A zygote that is forked, not started."""
    requests, ours = os.pipe()
    answers, theirs = os.pipe()
    parent = os.getpid()
    if (pid := os.fork()) == 0:
        die_with(parent)
        for end in (ours, answers):
            os.close(end)
        os.dup2(requests, 0)
        os.dup2(theirs, 1)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
        sys.argv, sys.stdin = ["tests.zygote", str(parent)], os.fdopen(0)
        with contextlib.suppress(BaseException):
            zygote.main()
        os._exit(1)
    for end in (requests, theirs):
        os.close(end)
    return [_Process(pid, ours, answers, log)]


# ---------------------------------------------------------------------------------------------------------------- judge


def options(description: str | None) -> argparse.ArgumentParser:
    """What both commands take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files below phalanx/, such as comm/comm_thread.py; by default all")
    parser.add_argument("--list", action="store_true", help="only list the mutants")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="mutants at a time (default 2)")
    return parser


def judge(
    found: Sequence[Mutant],
    tests_of: Callable[[Mutant], Sequence[str]],
    equivalent: dict[str, str],
    asked: argparse.Namespace,
) -> list[Mutant] | None:
    """Print what becomes of mutants, and return the survivors; None where the package itself is not green.

    `equivalent`: why no test can notice a mutant, by its name.
    """
    begun = time.monotonic()
    for mutant in (mutant for mutant in found if mutant.name in equivalent):
        print(f"equivalent  {mutant}  ({equivalent[mutant.name]})")
    found = [mutant for mutant in found if mutant.name not in equivalent]
    if asked.list:
        for mutant in found:
            print(f"{mutant}")
        return []
    survivors = []
    with tempfile.TemporaryDirectory(prefix="phalanx-references-") as references:
        os.environ[REFERENCES] = references
        whole = sorted({test.partition("::")[0] for mutant in found for test in tests_of(mutant)})
        warm = Warm(whole)
        for verdict in warm.verdicts([(None, [file]) for file in whole], asked.jobs):
            print(f"as it is  {verdict.tests[0]}  [{verdict.seconds:.0f} s]", flush=True)
            if verdict.red is not None:
                print(f"the package itself does not pass {verdict.red}, so nothing would be seen")
                return None
        for verdict in warm.verdicts([(mutant, tests_of(mutant)) for mutant in found], asked.jobs):
            mutant = verdict.mutant
            assert mutant is not None
            survivors += [mutant] if verdict.red is None else []
            said = "SURVIVED" if verdict.red is None else "killed  "
            print(f"{said}  {mutant}  [{verdict.seconds:.0f} s, {verdict.red}]", flush=True)
    minutes = (time.monotonic() - begun) / 60
    print(f"{len(found)} mutants, {len(found) - len(survivors)} killed, {len(survivors)} survivors, {minutes:.0f} min")
    return survivors
