"""Conversations about a Python module, of its docstrings and signatures: a chat sample that every Python has.

They are plain questions and answers of widely varying length, some with a system turn, many of several turns. The same
module gives the same conversations.
"""

import ast
import hashlib
import inspect
from collections.abc import Iterator

Message = dict[str, str]
VERSION = 1  # raised with every change of the text
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
SYSTEM = (
    "You are a helpful assistant for Python programmers.",
    "Answer briefly and exactly.",
    "You know the Python standard library by heart. Say what a thing does before you say how.",
)
ABOUT = ("What does {} do?", "Can you explain {}?", "What is {} for?", "I came across {} in some code. What is it?")
CALL = ("How is it called?", "Which arguments does it take?", "And its signature?")
CODE = ("Show me how it is written.", "May I see its source?")
METHODS = ("What does its method {} do?", "And {}?", "Tell me about {} as well.")
LONGEST_SOURCE = 6000  # characters of code in one answer
MOST_METHODS = 6


def make_conversations(source: str, module: str) -> list[list[Message]]:
    """One conversation for each documented function and class of a module: lists of {"role", "content"}.

    A source that this Python cannot parse has none.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines = source.splitlines()
    found: list[list[Message]] = []
    for name, node in _definitions(tree, module):
        document = ast.get_docstring(node)
        if document:
            found.append(_about(name, node, document, lines))
    return found


def _definitions(tree: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, Definition]]:
    """Documented or not: the functions and classes of a module, and the methods of its classes."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}.{node.name}"
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node, name)


def _about(name: str, node: Definition, document: str, lines: list[str]) -> list[Message]:
    # Bytes of a digest replace a random generator: the same name gives the same choice on any machine.
    dice = iter(hashlib.sha256(f"{name} {document}".encode(errors="replace")).digest())
    messages: list[Message] = []
    if next(dice) % 3 == 0:
        messages.append({"role": "system", "content": _pick(SYSTEM, next(dice))})
    messages += _turn(_pick(ABOUT, next(dice)).format(f"`{name}`"), inspect.cleandoc(document))
    if isinstance(node, ast.ClassDef):
        methods = [(n, m) for n, m in _definitions(node, name) if ast.get_docstring(m)]
        for method_name, method in methods[: next(dice) % (MOST_METHODS + 1)]:
            question = _pick(METHODS, next(dice)).format(f"`{method_name.rpartition('.')[2]}`")
            messages += _turn(question, ast.get_docstring(method) or "")
        return messages
    if next(dice) % 2 == 0:
        signature = f"{node.name}({ast.unparse(node.args)})"
        messages += _turn(_pick(CALL, next(dice)), f"```python\n{signature}\n```")
    if next(dice) % 4 == 0:
        code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        if len(code) <= LONGEST_SOURCE:
            messages += _turn(_pick(CODE, next(dice)), f"```python\n{inspect.cleandoc(code)}\n```")
    return messages


def _turn(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _pick(options: tuple[str, ...], die: int) -> str:
    return options[die % len(options)]
