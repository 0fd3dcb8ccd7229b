"""The public API: its names, that importing it is light, its docstrings, whose examples run, and who uses it."""

import ast
import doctest
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import phalanx
from phalanx.launch import child_run
from tests.dist import command
from tests.helpers import ROOT

SOURCE = ast.parse((ROOT / "phalanx" / "__init__.py").read_text(encoding="utf-8"))
NAMES = sorted(set(phalanx.__all__) - {"__version__", "errors"})
EXAMPLES = sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*.ipynb")])
HEAVY = ("torch", "numpy", "pydantic", "yaml", "rich", "typer", "fsspec", "transformers", "asyncio", "socket")
MOST_MODULES = 40  # of Phalanx and of Python's library, beyond what Python itself imports


def code_of(path: Path) -> str:
    """The Python of an example; of a notebook that of its cells."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")


# --------------------------------------------------------------------------------------------------------------- names


def test_names_for_types_and_names_at_run_time_are_the_same() -> None:
    (typed,) = [node for node in SOURCE.body if isinstance(node, ast.If)]
    imported = {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in ast.walk(typed)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    places = {
        name: (place.partition(":")[0], place.partition(":")[2] or name) for name, place in phalanx._PLACES.items()
    }
    assert imported == places
    assert set(phalanx.__all__) == {*places, "errors", "__version__"}
    assert all(inspect.isclass(getattr(phalanx, name)) or callable(getattr(phalanx, name)) for name in NAMES)
    with pytest.raises(AttributeError, match="module 'phalanx' has no attribute 'nothing'"):
        phalanx.nothing  # noqa: B018


def test_errors_are_found_however_they_are_imported() -> None:
    import phalanx.errors
    from phalanx.errors import ConfigError as same

    from phalanx.core.errors import ConfigError

    assert same is ConfigError is phalanx.errors.ConfigError


def test_importing_it_is_light() -> None:
    script = "import json, sys\nbefore = set(sys.modules)\nimport phalanx\n"
    script += "print(json.dumps(sorted(set(sys.modules) - before)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    added = json.loads(done.stdout)
    assert not {name.split(".")[0] for name in added} & set(HEAVY)
    assert len(added) <= MOST_MODULES, added


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_use_nothing_else(path: Path) -> None:
    tree = ast.parse(code_of(path))
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        assert not [name for name in names if name.startswith("phalanx.")]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "phalanx":
            assert node.attr in phalanx.__all__


def test_the_page_of_the_site_lists_just_these() -> None:
    hooks = ast.parse((ROOT / "contrib" / "mkdocs_hooks.py").read_text(encoding="utf-8"))
    (subjects,) = [node.value for node in hooks.body if isinstance(node, ast.Assign) and "SUBJECTS" in ast.dump(node)]
    listed = [name for names in ast.literal_eval(subjects).values() for name in names]
    assert sorted(listed) == sorted([*NAMES, "errors"])


# ---------------------------------------------------------------------------------------------------------- docstrings


def members(name: str) -> Iterator[tuple[str, Any]]:
    """What a public name is, and the methods that its class itself makes public."""
    found = getattr(phalanx, name)
    yield name, found
    if inspect.isclass(found):
        for attribute, value in vars(found).items():
            inner = value.fget if isinstance(value, property) else value
            inner = inner.__func__ if isinstance(inner, staticmethod | classmethod) else inner
            if not attribute.startswith("_") and inspect.isfunction(inner):
                yield f"{name}.{attribute}", inner


PUBLIC = [each for name in NAMES for each in members(name)]


@pytest.mark.parametrize(("name", "found"), PUBLIC, ids=[name for name, _ in PUBLIC])
def test_it_is_documented_and_typed(name: str, found: Any) -> None:
    text = inspect.getdoc(found) or ""
    first = text.partition("\n\n")[0]
    assert first.rstrip().endswith((".", ":")), f"{name}: {first!r}"
    if not inspect.isfunction(found):
        return
    signature = inspect.signature(found)
    arguments = [each for each in signature.parameters.values() if each.name != "self"]
    assert all(each.annotation is not each.empty for each in arguments), signature
    assert signature.return_annotation is not signature.empty
    if "." not in name:  # a function of the package
        for each in arguments:
            assert re.search(rf"^ +{each.name}: ", text, re.M), f"{name} does not explain {each.name}"
        assert "\nRaises:\n" in text and "\nExamples:\n" in text
        assert "\nReturns:\n" in text or signature.return_annotation is None


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the examples of docstrings use: recipe.yaml, images, and a run that was trained."""
    folder = command.write_place(tmp_path_factory.mktemp("api"))
    code, _, err = command.phalanx(folder, "train", "recipe.yaml", "--run-dir", "runs/trained", "--ranks", "1")
    assert code == 0, err
    (folder / "mnist").mkdir()
    for part in ("train", "t10k"):
        images = bytes([0, 0, 8, 3, 0, 0, 0, 4, 0, 0, 0, 8, 0, 0, 0, 8]) + bytes(4 * 64)
        (folder / "mnist" / f"{part}-images-idx3-ubyte").write_bytes(images)
        (folder / "mnist" / f"{part}-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 4, 0, 1, 2, 3]))
    return folder


def run_example(name: str, text: str) -> str:
    names: dict[str, Any] = {"phalanx": phalanx, "torch": torch, "np": np}
    test = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=said.append)
    return "".join(said)


ALONE = [name for name, found in PUBLIC if ">>>" in (inspect.getdoc(found) or "")]
JOINING = {"shard", "ShardedModel", "ShardedStep", "BatchSplitter", "init", "transform", "start_of"}  # process groups


def joined(placement: Any, name: str, folder: str) -> str:
    import os

    os.chdir(folder)
    return run_example(name, inspect.getdoc(getattr(phalanx, name)) or "")


@pytest.mark.parametrize("name", ALONE)
def test_its_example_runs(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in JOINING:
        from tests.helpers import run_ranks

        assert run_ranks(joined, 1, name=name, folder=str(place)) == [""]
        return
    monkeypatch.chdir(place)
    monkeypatch.setattr(child_run, "train_in_child", command.train_in_warm_child)
    assert run_example(name, inspect.getdoc(dict(PUBLIC)[name]) or "") == ""
