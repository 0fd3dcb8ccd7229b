"""Tagged sentences for tests, of what is on every machine: the lines of Python's own modules, each token tagged as
Python's tokenizer and compiler see it. Keywords and numbers can be told from a word alone; what is defined, built in or
an attribute only from the words around it."""

import builtins
import io
import keyword
import token
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

LIBRARY = Path(tokenize.__file__).parent
BUILT_IN = frozenset(dir(builtins))
PASSED_OVER = (tokenize.NL, token.INDENT, token.DEDENT, tokenize.COMMENT, token.ENDMARKER)


def sentences(module: str) -> Iterator[tuple[list[str], list[str]]]:
    """(words, tags) of each logical line of a module of the standard library, such as "json/decoder.py"."""
    words: list[str] = []
    tags: list[str] = []
    for one in tokenize.generate_tokens(io.StringIO((LIBRARY / module).read_text(encoding="utf-8")).readline):
        if one.type == token.NEWLINE:
            yield words, tags
            words, tags = [], []
        elif one.type not in PASSED_OVER:
            tags.append(_tag(one, words, tags))
            words.append("''" if one.type == token.STRING else one.string)


def _tag(one: tokenize.TokenInfo, words: Sequence[str], tags: Sequence[str]) -> str:
    before = words[-1] if words else ""
    if one.type == token.NUMBER:
        return "B-NUMBER"
    if one.type != token.NAME:
        return "I-ATTRIBUTE" if one.string == "." and tags and tags[-1].endswith("ATTRIBUTE") else "O"
    if keyword.iskeyword(one.string):
        return "B-KEYWORD"
    if before in ("def", "class"):
        return "B-DEFINED"
    if before == ".":  # a.b.c: b.c is one entity
        return "I-ATTRIBUTE" if tags[-1] == "I-ATTRIBUTE" else "B-ATTRIBUTE"
    return "B-BUILTIN" if one.string in BUILT_IN else "O"


def write_conll(path: Path, modules: Sequence[str]) -> None:
    """The lines of modules as a CoNLL file."""
    lines = [zip(words, tags, strict=True) for module in modules for words, tags in sentences(module)]
    path.write_text("".join("".join(f"{word} {tag}\n" for word, tag in line) + "\n" for line in lines))
