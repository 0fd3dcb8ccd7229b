"""The page on the architecture names every package, and each file and symbol of its tables is there."""

import ast
import pkgutil
import re

import pytest

from tests.helpers import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FEWEST_ROWS = 30


def rows(heading: str) -> list[list[str]]:
    """The cells of the rows of the table under a heading."""
    text = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    table = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in table[1:]]


def has_symbol(body: list[ast.stmt], symbol: str) -> bool:
    """Whether a dotted name is defined there: a class, a function, or a name that is assigned."""
    name, _, rest = symbol.partition(".")
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return has_symbol(node.body, rest) if rest else True
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if not rest and any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return True
    return False


@pytest.mark.parametrize("row", rows("Where is it?"), ids=lambda row: row[0])
def test_the_answer_is_there(row: list[str]) -> None:
    _, file, symbol = (cell.strip("`") for cell in row)
    assert has_symbol(ast.parse((ROOT / file).read_text(encoding="utf-8")).body, symbol)


def test_the_questions_differ_and_are_many() -> None:
    questions = [row[0] for row in rows("Where is it?")]
    assert len(set(questions)) == len(questions) >= FEWEST_ROWS


def test_the_packages_are_those_that_there_are() -> None:
    listed = {package.strip("`").removeprefix("phalanx/").rstrip("/") for package, _, _ in rows("The packages")}
    assert listed == {file.parent.name for file in (ROOT / "phalanx").glob("*/__init__.py")}


def test_what_to_open_first_lies_in_its_package() -> None:
    for package, _, first in rows("The packages"):
        files = re.findall(r"`([^`]+)`", first)
        assert files, package
        assert [file for file in files if not (ROOT / file).is_file() or not file.startswith(package.strip("`"))] == []


def test_the_pages_of_the_api_are_of_modules_and_functions_that_exist() -> None:
    tree = ast.parse((ROOT / "contrib" / "mkdocs_hooks.py").read_text(encoding="utf-8"))
    tables = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    for names in ast.literal_eval(tables["SUBJECTS"]).values():
        for name in names:
            pkgutil.resolve_name(f"phalanx.{name}")  # raises for what is not there


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "README.md", "docs/architecture.md"])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    named = set(re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", (ROOT / page).read_text(encoding="utf-8")))
    present = {
        file.name for folder in ("phalanx", "tests", "examples", "benchmarks") for file in (ROOT / folder).rglob("*.py")
    }
    assert named - present - {"utils.py"} == set()
