"""Phrases that must not come back: pages and messages are plain technical English, noun first, active voice."""

import re
from pathlib import Path

import pytest

from tests.helpers import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What is written instead stands beside each.
PHRASES = {
    r"it is waited for": "waits for",
    r"walk(s|ed)? (a step |it |them )?(again|anew)|walked again": "replayed",
    r"a run that is well|who was well|is well\b": "healthy",
    r"way that was given up": "abandoned branch of the run",
    r"is to be impatient": "hang detection is suspended",
    r"nothing was found to be wrong": "health check: ok",
    r"count as alike": "devices treated as identical",
    r"every so man(y|ieth)": "every Nth",
    r"has nothing to happen in": "has no effect",
    r"\b(mend|mended|mending)\b": "fix",
    r"\banew\b": "again",
    r"\bunlike (devices|nodes|GPUs|memory)\b": "heterogeneous devices",
    r"of one's own|of ones own": "custom, or your own",
    r"goes on from|go on from|gone on from": "resumes, continues from",
    r"so many (seconds )?(times )?as long (the others|ours)": "how many times as long",
    r"\bforetell|foretold\b": "predict",
    r"\bthe lane\b": "communication thread",
    r"\bwhat a rank holds\b": "a rank's shard",
}
# The table of keys comes from the schema, the glossary names old words, and errors are quoted as they are.
EXEMPT = {
    "recipes.md": tuple(PHRASES),
    "migrating.md": (
        r"walk(s|ed)? (a step |it |them )?(again|anew)|walked again",
        r"\bunlike (devices|nodes|GPUs|memory)\b",
    ),
    "troubleshooting.md": ("goes on from|go on from|gone on from",),
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_phrase_comes_back(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    phrases = [phrase for phrase in PHRASES if phrase not in EXEMPT.get(page.name, ())]
    found = [
        (number, line.strip(), f"write: {PHRASES[phrase]}")
        for number, line in enumerate(lines, 1)
        for phrase in phrases
        if re.search(phrase, line, re.IGNORECASE)
    ]
    assert found == []


def test_each_phrase_is_found_where_it_stands() -> None:
    sentence = "for 600 seconds it is waited for the node; a step is walked again on unlike devices of one's own, anew"
    assert sum(bool(re.search(phrase, sentence)) for phrase in PHRASES) == 5
