"""What is taken out in turn, and that the page on accelerators lists it."""

import re

from tests.accelerator.mutants import mutants
from tests.helpers import ROOT


def test_the_documentation_lists_every_file_that_waits() -> None:
    page = (ROOT / "docs" / "accelerators.md").read_text().split("## Every wait")[1]
    rows = [row.split("|")[1:3] for row in page.split("\n") if row.startswith("| ")]
    listed: dict[str, set[str]] = {}
    files: list[str] = []
    for place, functions in rows[1:]:
        files = re.findall(r"`([\w/.]+)`", place) or files
        for file in files:
            listed.setdefault(file, set()).update(re.findall(r"`([\w.]+)`", functions))
    assert {each.file for each in mutants(ROOT / "phalanx")} == set(listed)
    for functions in {frozenset(names) for names in listed.values()}:
        together = "\n".join((ROOT / "phalanx" / file).read_text() for file in listed if listed[file] == functions)
        for name in functions:
            assert re.search(rf"^ *(def|class) {name.split('.')[-1]}\b", together, re.MULTILINE), name
