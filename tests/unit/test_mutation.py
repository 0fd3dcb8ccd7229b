"""What mutants are, and that they are what runs: in a process that has imported the package, and in its ranks."""

import ast
import types
from pathlib import Path

import pytest

from tests import mutants as drawn
from tests.accelerator import mutants as waits
from tests.helpers import ROOT
from tests.mutation import Mutant, Warm, nodes, replaced


def first(code: str) -> ast.expr:
    statement = ast.parse(code).body[0]
    assert isinstance(statement, ast.Expr)
    return statement.value


@pytest.mark.parametrize(
    ("code", "left"),
    [
        ("started(x).wait()", "started(x)"),
        ("accelerator.record_stream(tensor)", "accelerator"),
        ("mark.is_recorded", "True"),
        ("event.query()", "True"),
        ("event.query", None),
        ("target.copy_(source, non_blocking=True)", "target.copy_(source, non_blocking=False)"),
        ("target.copy_(source, non_blocking=self._pinned)", "target.copy_(source, non_blocking=False)"),
        ("target.copy_(source)", None),
        ("seen.waited(1.0)", None),
    ],
)
def test_a_wait_is_taken_out_and_what_it_waits_for_stays(code: str, left: str | None) -> None:
    assert waits._without(first(code)) == left


@pytest.mark.parametrize(
    ("code", "others"),
    [
        ("a < b", ["(a) <= (b)", "(a) >= (b)"]),
        ("a is None", ["(a) is not (None)"]),
        ("a + b", ["(a) - (b)"]),
        ("'a' + b", []),
        ("a and b or c", ["(a and b) and (c)"]),
        ("not a", ["a"]),
        ("3", ["4", "2"]),
        ("True", ["False"]),
        ("min(a, b)", ["max(a, b)"]),
        ("range(a, b)", ["range(a, (b) - 1)"]),
        ("a if b else c", ["a if not (b) else c"]),
        ("a(b)", []),
    ],
)
def test_an_expression_becomes_another(code: str, others: list[str]) -> None:
    assert list(drawn._others(first(code))) == others


def test_what_is_only_said_or_claimed_is_no_mutant() -> None:
    tree = ast.parse(
        "class A:\n    x: int = 1\n    def f(self, y: int = 2) -> int:\n        assert y > 3\n        return 4\n"
    )
    left_out = {
        node.value for part in drawn._no_code(tree) for node in ast.walk(part) if isinstance(node, ast.Constant)
    }
    assert left_out == {1, 2, 3}


def test_a_draw_stays_when_other_code_changes() -> None:
    found = [Mutant("a.py", line, "f", f"{line // 2} -> 0", "") for line in range(40)]
    ten = drawn.draw(found, 10, 1)
    assert drawn.draw(found, 20, 1)[:10] == ten
    assert drawn.draw(found, 10, 2) != ten
    without = [each for each in found if each not in ten[3:4]]
    assert {each.name for each in drawn.draw(without, 9, 1)} <= {each.name for each in drawn.draw(found, 11, 1)}


def test_a_place_in_a_text_is_replaced_and_named_by_its_function() -> None:
    text = "class A:\n    def é(self):\n        return f(\n            'ü', 1)  # it\n"
    [(function, call)] = [(name, node) for name, node in nodes(ast.parse(text)) if isinstance(node, ast.Call)]
    assert function == "A.é"
    assert isinstance(call, ast.expr)
    assert replaced(text, call, "2") == "class A:\n    def é(self):\n        return 2  # it\n"


def test_functions_and_numbers_of_an_imported_module_become_those_of_a_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they are held. The child of `Warm` does so before it runs tests; here it is undone again."""
    from phalanx.layout import balance, hardware

    path = ROOT / "phalanx" / "layout" / "balance.py"
    text = path.read_text()
    kept = {key: value for key, value in vars(balance).items() if isinstance(value, types.FunctionType | int)}
    codes = {value: value.__code__ for value in kept.values() if isinstance(value, types.FunctionType)}
    warm = object.__new__(Warm)
    warm._texts, warm._functions = {path: text}, {path: list(codes)}
    held = balance.split_evenly
    try:
        warm._become(_mutant(text, "rank < rest", "rank <= rest", "split_evenly"))
        assert held(7, 3) == [3, 3, 2]
        warm._become(_mutant(text, "UNBOUND = 2**31", "UNBOUND = 2**30", ""))
        assert balance.UNBOUND == hardware.UNBOUND == 2**30
        with pytest.raises(AssertionError, match="nothing that has been imported"):
            warm._become(Mutant("layout/balance.py", 1, "split_evenly", "nothing", text))
    finally:
        for function, code in codes.items():
            function.__code__ = code
        vars(balance).update(kept)
        vars(hardware).update(UNBOUND=balance.UNBOUND)
    assert balance.split_evenly(7, 3) == [3, 2, 2]


def _mutant(text: str, before: str, after: str, function: str) -> Mutant:
    assert text.count(before) == 1
    return Mutant("layout/balance.py", 1, function, after, text.replace(before, after))


def test_every_file_that_is_named_is_there() -> None:
    for file, tests in {**drawn.TESTS, **{name: tests for name, tests in waits.TESTS.items() if "." in name}}.items():
        assert (ROOT / "phalanx" / file).is_file()
        assert all((ROOT / test.partition("::")[0]).is_file() for test in tests), tests
    assert Path(ROOT / "phalanx").is_dir()
