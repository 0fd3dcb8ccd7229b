"""The page on the simulated accelerator lists every place of the package that waits for a device, or might seem to."""

import ast
import re
from collections.abc import Iterator

from tests.accelerator.mutants import mutants
from tests.helpers import ROOT

NAMES = {"wait", "synchronize", "query", "is_recorded", "record_stream", "wait_stream", "wait_event"}
USES_DEVICES = re.compile(
    r"^\s*(from|import)\b.*\b(torch|accelerator|event_times|phalanx\.(comm|engine|optim))\b", re.MULTILINE
)


def documented() -> dict[str, set[str]]:
    """The files, and the functions that the table names of each; none stand for all of them."""
    table, _, others = (
        (ROOT / "tests" / "accelerator" / "README.md").read_text().split("## Every wait")[1].rpartition("\n\n")
    )
    listed: dict[str, set[str]] = {file: set() for file in re.findall(r"`([\w/]+\.py)`", others)}
    files: list[str] = []
    for row in [row.split("|") for row in table.split("\n") if row.startswith("| ")][1:]:
        files = re.findall(r"`([\w/.]+)`", row[1]) or files
        for file in files:
            listed.setdefault(file, set()).update(name.split(".")[-1] for name in re.findall(r"`([\w.]+)`", row[2]))
    return listed


def places(node: ast.AST, inside: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The classes and functions around each wait."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        inside = (*inside, node.name)
    copies = isinstance(node, ast.keyword) and node.arg == "non_blocking"
    if copies or (isinstance(node, ast.Attribute) and node.attr in NAMES):
        yield inside
    for child in ast.iter_child_nodes(node):
        yield from places(child, inside)


def test_every_place_that_waits_is_listed() -> None:
    listed, missing = documented(), []
    for path in sorted((ROOT / "phalanx").rglob("*.py")):
        text, file = path.read_text(), str(path.relative_to(ROOT / "phalanx"))
        for inside in set(places(ast.parse(text))) if USES_DEVICES.search(text) else ():
            if file not in listed or (listed[file] and not listed[file] & set(inside)):
                missing.append((file, *inside))
    assert not missing


def test_whatever_is_taken_out_in_turn_is_listed() -> None:
    assert {mutant.file for mutant in mutants(ROOT / "phalanx")} <= set(documented())


def test_nothing_is_listed_that_is_not_there() -> None:
    listed = documented()
    for functions in {frozenset(names) for names in listed.values()}:
        together = "\n".join((ROOT / "phalanx" / file).read_text() for file in listed if listed[file] == functions)
        for name in functions:
            assert re.search(rf"^ *(def|class) {name}\b", together, re.MULTILINE), name
