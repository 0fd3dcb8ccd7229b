"""What is built for users: a source distribution that is the whole repository, and a wheel that works in any folder."""

import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import load
from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement
from tests import warm_shell
from tests.helpers import ALL, ROOT, run_ranks

NOT_OURS = [".git", *(line.strip("/") for line in (ROOT / ".gitignore").read_text().split())]
BUILD = "import sys; from setuptools import build_meta as build; print(getattr(build, sys.argv[1])(sys.argv[2]))"
# The whole demo in miniature.
SMALL = [
    "model.hidden=32", "model.layers=1", "model.heads=2", "model.kv_heads=1", "data.source=text.txt",
    "data.seq_len=32", "data.tokenizer_vocab=300", "train.steps=60", "train.global_batch=4", "train.micro_batch=2",
    "train.eval_every=0", "optim.warmup_steps=1", "checkpoint.every=10", "report.tensorboard=false",
]  # fmt: skip


def run(arguments: list[str], folder: Path, **environment: str) -> str:
    command, there = [sys.executable, *arguments], os.environ | environment
    done = subprocess.run(command, cwd=folder, env=there, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built(folder: Path, kind: str, target: Path) -> Path:
    name = run(["-c", BUILD, f"build_{kind}", str(target)], folder).split()[-1]
    return target / name


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution unpacked, and the wheel that was built from it, installed into a folder."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*NOT_OURS))
    with tarfile.open(built(folder / "tree", "sdist", folder)) as archive:
        archive.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    with zipfile.ZipFile(built(source, "wheel", folder)) as archive:  # a pure one needs no more to be installed
        archive.extractall(folder / "site")
    return source, folder / "site"


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_source_distribution_is_the_whole_repository(distributions: tuple[Path, Path]) -> None:
    source, _ = distributions
    tree = source.parent.parent / "tree"
    made = {file for file in files(tree) if ".egg-info" in file}
    assert files(tree) - made - files(source) == set()


def test_the_wheel_has_all_of_the_package_with_recipes_and_examples(distributions: tuple[Path, Path]) -> None:
    source, site = distributions
    ours = {file for file in files(source) if file.startswith("phalanx/")}
    ours |= {f"phalanx/{file}" for file in files(source) if file.startswith(load.FOLDERS)}
    found = {file for file in files(site) if ".dist-info/" not in file}
    assert found == ours
    assert "phalanx/recipes/demo.yaml" in found and "phalanx/examples/sagemaker/small.py" in found


def test_the_wheel_alone_copies_a_recipe_into_an_empty_folder(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    alone = {"PYTHONPATH": str(distributions[1]), "HOME": str(tmp_path)}
    where = run(["-c", "import phalanx; print(phalanx.__file__)"], tmp_path, **alone)
    assert Path(where.strip()).is_relative_to(distributions[1])
    run(["-m", "phalanx", "recipes", "copy", "demo"], tmp_path, **alone)
    assert (tmp_path / "recipes" / "demo.yaml").read_bytes() == (ROOT / "recipes" / "demo.yaml").read_bytes()


@pytest.mark.skipif(not ALL, reason="each of its commands starts Python: `make test-all` waits for that")
def test_the_wheel_alone_runs_the_demo_in_an_empty_folder(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    write_text(tmp_path)
    alone = {"PYTHONPATH": str(distributions[1]), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    check_demo(run(["-m", "phalanx", "demo", *SMALL], tmp_path, **alone), tmp_path)


def test_the_demo_in_miniature(tmp_path: Path) -> None:
    write_text(tmp_path)
    code, shown = run_ranks(demo, 1, timeout_s=300, folder=str(tmp_path))[0]
    assert code == 0, shown
    check_demo(shown, tmp_path)


def demo(placement: Placement, folder: str) -> list[Any]:
    """[exit code, output] of the demo, whose commands are forked."""
    python = Path(folder, "python")
    python.write_text(f'#!/bin/bash\n[ "$1" = -m ] && exec "${{@:2}}"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    sys.executable = str(python)
    return warm_shell.run_script(placement, shlex.join(["phalanx", "demo", *SMALL]), folder, {"OMP_NUM_THREADS": "1"})


def write_text(folder: Path) -> None:
    (folder / "text.txt").write_text("A rank reads its share of the text and adds its part to the sum.\n" * 400)


def check_demo(shown: str, folder: Path) -> None:
    for text in ("about three minutes", "SIGKILL", "resumed from step", "loaded LlamaForCausalLM", "done in"):
        assert text in shown
    assert (folder / "runs" / "demo" / "report.html").is_file()
    assert (folder / "runs" / "demo-export" / "model.safetensors").is_file()


# ------------------------------------------------------------------------------------------------ recipes and examples


def test_everything_says_what_it_is_and_is_found_by_each_of_its_names() -> None:
    for name in load.list_bundled_files():
        assert 10 < len(load.describe_bundled_file(name)) < 300, name
        assert load.find_bundled_file(name) == load.find_bundled_file(load.short_name(name)) == name
    assert load.find_bundled_file("demo.yaml") == "recipes/demo.yaml"


def test_a_recipe_comes_with_its_code_and_a_script_with_those_beside_it(tmp_path: Path) -> None:
    assert [path.name for path in load.copy_bundled_files("digits", tmp_path)] == ["digits.yaml", "vision_task.py"]
    assert files(tmp_path) == {"recipes/digits.yaml", "examples/vision_task.py"}
    load.copy_bundled_files("sagemaker/plain_fsdp", tmp_path)
    assert (tmp_path / "examples" / "sagemaker" / "small.py").is_file()


def test_nothing_is_written_where_something_else_is_in_the_way(tmp_path: Path) -> None:
    mine = tmp_path / "examples" / "vision_task.py"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(ConfigError, match=r"vision_task.py exists with other content.*--to"):
        load.copy_bundled_files("digits", tmp_path)
    assert files(tmp_path) == {"examples/vision_task.py"} and mine.read_text() == "mine"
    load.copy_bundled_files("demo", tmp_path)
    assert load.copy_bundled_files("demo", tmp_path) == [tmp_path / "recipes" / "demo.yaml"]  # the same again is fine
