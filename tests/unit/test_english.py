"""Phrases that must not come back: pages and messages are plain technical English, noun first, active voice."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PACKAGES = sorted(folder.parent.name for folder in (ROOT / "phalanx").glob("*/__init__.py"))
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
    r"\bfor want of (host )?memory\b": "because memory ran out",
    r"\bdivided (anew|again)\b": "redistributed",
}
# These are checked in messages, help and docstrings besides.
CODE_PHRASES = {
    r"\bnobody\b": "name the user, the process, or what is missing",
    r"\bgo(es)? on\b|\bgoing on\b|\bwent on\b": "continues, resumes, runs",
    r"is given up|was given up": "abandoned, or stops after",
    r"\bleave (it|them|that|one of them|[-\w{}]+) out\b": "remove it, or: use one of them",
    r"looked at|look at": "check, inspect, show",
    r"of (a user's|its|their) own\b": "custom, separate",
    r"\bthere is no (recipe|key|run folder|such)\b": "no recipe X; unknown key X",
    r"what is wrong with": "problems of, errors of",
    r"\bis said\b|\bsays more\b": "prints, see",
    r"walk(s|ed)? again|started again": "replayed; restarted",
    r"stands? (for|in|behind)\b": "means, replaces, after",
    r"\bunlike\b": "heterogeneous",
    r"holds? nothing\b": "is empty",
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


def prose(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, text, is a comment) of each string literal and comment; of an f-string its text between the fields."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, " ".join(node.value.split()), False
    for number, line in enumerate(source.splitlines(), 1):
        _, mark, comment = line.partition("#")
        if mark:  # within a literal too, whose phrases are checked above
            yield number, comment, True


@pytest.mark.parametrize("package", PACKAGES)
def test_no_phrase_comes_back_in_the_code(package: str) -> None:
    files = sorted((ROOT / "phalanx" / package).rglob("*.py"))
    assert files
    phrases = PHRASES | CODE_PHRASES
    in_comments, in_all = (re.compile("|".join(each), re.IGNORECASE) for each in (PHRASES, phrases))
    found = [
        (str(path.relative_to(ROOT)), line, match[0], f"write: {phrases[phrase]}")
        for path in files
        for line, text, is_comment in prose(path)
        if (in_comments if is_comment else in_all).search(text)
        for phrase in (PHRASES if is_comment else phrases)
        if (match := re.search(phrase, text, re.IGNORECASE))
    ]
    assert found == []


def test_phrases_are_found_in_docstrings_messages_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text('"""Nobody goes\non."""\nraise ValueError(f"{1} fails; leave it out")  # it is waited for, anew\n')
    found = [(text, is_comment) for _, text, is_comment in prose(file)]
    hits = [phrase for phrase in CODE_PHRASES for text, _ in found if re.search(phrase, text, re.IGNORECASE)]
    assert len(hits) == 3
    assert [sum(bool(re.search(phrase, text)) for phrase in PHRASES) for text, is_comment in found if is_comment] == [2]
