"""The command line as a user meets it: real processes, what they print and how they end."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from phalanx import __version__
from phalanx.cli import help, root
from phalanx.config import load
from phalanx.config.schema import Config, iter_knobs
from phalanx.core.errors import RunError
from phalanx.core.json_lines import read_lines
from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.launch import jobs
from phalanx.models.families.catalog import PRESETS
from tests.dist.command import phalanx as forked
from tests.helpers import ALL, ROOT, zygote_python

COMMANDS = [
    [],
    ["train"],
    ["doctor"],
    ["export"],
    ["generate"],
    ["report"],
    ["config"],
    ["config", "schema"],
    ["config", "explain"],
    ["config", "show"],
    ["config", "presets"],
    ["data"],
    ["data", "prepare"],
    ["data", "inspect"],
    ["data", "megatron"],
]
RECIPE = """
model: {hidden: 16, layers: 1, heads: 2, intermediate: 32}
data: {source: text.jsonl, tokenizer_vocab: 280, seq_len: 8, held_out: 0.3, cache: cache}
train: {steps: 3, global_batch: 3, micro_batch: 2, eval_sequences: 4, dtype: fp64}
"""
# Runs each command line and says how it ended, what it printed, and which heavy packages it brought in.
SCRIPT = """
import contextlib, io, json, sys
from phalanx.cli.root import main
found = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["phalanx", *arguments]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main()
            code = "it returned"
        except SystemExit as leaving:
            code = leaving.code
    heavy = sorted({"torch", "transformers", "tokenizers", "bokeh", "numpy", "safetensors"} & set(sys.modules))
    found.append([code, out.getvalue(), heavy])
print(json.dumps(found))
"""


def phalanx(
    *arguments: str, folder: Path = ROOT, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    python = zygote_python[-1] if environment is None else sys.executable  # with `make test` a warm one
    return subprocess.run(
        [python, "-m", "phalanx", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"} | (environment or {}),
        capture_output=True,
        text=True,
        timeout=240,
    )


def in_one_process(commands: list[list[str]], folder: Path = ROOT) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(commands)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    lines = [json.dumps({"text": f"document {i} says hello " * (i % 5 + 3)}) for i in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


# ----------------------------------------------------------------------------------------------------------------- help


@pytest.fixture(scope="module")
def helps() -> dict[str, Any]:
    found = in_one_process([[*command, "--help"] for command in COMMANDS])
    return {" ".join(command): result for command, result in zip(COMMANDS, found, strict=True)}


@pytest.mark.parametrize("command", [" ".join(command) for command in COMMANDS])
def test_help_explains_and_imports_nothing_heavy(command: str, helps: dict[str, Any]) -> None:
    code, out, heavy = helps[command]
    assert code == 0
    assert f"phalanx {command}".strip() in out
    assert heavy == []
    assert "Traceback" not in out
    assert len(out.splitlines()) > 5


def test_every_command_is_listed_with_a_sentence(helps: dict[str, Any]) -> None:
    for command in COMMANDS[1:]:
        *group, name = command
        lines = [line for line in helps[" ".join(group)][1].splitlines() if re.search(rf"\b{name}\b", line)]
        assert any(len(line.split()) > 4 for line in lines), command
    for words in ("--ranks", "--run-dir", "KEY=VALUE", "torchrun"):
        assert words in helps["train"][1]
    assert "--debug" in helps[""][1]


def test_the_installed_script_is_the_same_command() -> None:
    script = Path(sys.executable).with_name("phalanx")
    if not script.exists():
        pytest.skip("the package is not installed, only on the path")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == phalanx("--version").stdout == f"phalanx {__version__}\n"


def test_the_help_imports_no_command_and_says_what_their_docstrings_say() -> None:
    script = (
        "import contextlib, io, json, sys\nfrom phalanx.cli import root\nsys.argv = ['phalanx', '--help']\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n    root.main()\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    imported = json.loads(done.stdout)
    ours = [name for name in imported if name.startswith("phalanx.")]
    assert not set(imported) & {"torch", "numpy", "pydantic", "yaml", "fsspec"} and len(ours) < 20, ours
    for name in root.COMMANDS:
        command = root.load_command(name)
        assert root.read_help(name) == (command.help or "").partition("\n\n")[0].partition("\f")[0], name
        assert command.hidden == root.COMMANDS[name].hidden
        assert command.hidden or command.rich_help_panel == root.COMMANDS[name].panel


def test_no_arguments_show_the_help() -> None:
    done = phalanx()
    assert "Usage: phalanx" in done.stdout
    assert done.returncode in (0, 2)


# --------------------------------------------------------------------------------------------------------------- config


def test_the_schema_describes_every_key() -> None:
    done = phalanx("config", "schema")
    assert done.returncode == 0
    schema = json.loads(done.stdout)
    found = dict(described(schema, schema))
    assert set(found) == {key for key, _ in iter_knobs()}
    assert all(len(text) > 5 for text in found.values())
    assert schema["additionalProperties"] is False
    assert schema["title"] == "Config"
    batch = schema["$defs"]["TrainSection"]["properties"]["micro_batch"]
    assert {"type": "integer", "minimum": 1, "maximum": 2**53} in batch["anyOf"]  # an editor can refuse a 0
    assert {"type": "string", "const": "auto"} in batch["anyOf"]


def described(schema: dict[str, Any], node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key, description) of every leaf of a JSON schema, its references followed."""
    for name, entry in node["properties"].items():
        options = [entry, *entry.get("anyOf", [])]
        sections = [schema["$defs"][option["$ref"].rpartition("/")[2]] for option in options if "$ref" in option]
        if sections:
            assert sections[0]["additionalProperties"] is False
            yield from described(schema, sections[0], f"{prefix}{name}.")
        else:
            assert "default" in entry, name
            yield f"{prefix}{name}", entry.get("description", "")


def test_show_prints_a_recipe_that_means_the_same(here: Path) -> None:
    done = phalanx("config", "show", "recipe.yaml", "optim.lr=1e-3", "data.source=[a, 'b c', naïve]", folder=here)
    assert (done.returncode, done.stderr) == (0, "")
    config = Config.model_validate(yaml.safe_load(done.stdout))
    assert config == load.load_recipe(here / "recipe.yaml", ["optim.lr=1e-3", "data.source=[a, 'b c', naïve]"])
    assert set(yaml.safe_load(done.stdout)) == set(Config.model_fields)


def test_help_is_by_task_and_fits_into_80_columns() -> None:
    """Options take one of a few placeholders, and flags none; nothing is folded within a word or cut."""
    command = typer.main.get_command(root.app)
    help.unify_placeholders(command)

    def all_of(one: Any) -> Iterator[Any]:
        yield one
        for child in getattr(one, "commands", {}).values():
            yield from all_of(child)

    for one in all_of(command):
        for parameter in one.params:
            flag = parameter.param_type_name == "option" and parameter.is_flag
            assert parameter.param_type_name == "argument" or flag == (parameter.metavar == ""), (one.name, parameter)
    narrow = {"COLUMNS": "80", "TERM": "dumb"}
    done = phalanx("--help", environment=narrow)
    panels = re.findall(r"─ ([A-Z][a-z ]+) ─", done.stdout)
    assert panels[0] == "Options" and panels[1] == help.TRAIN and len(panels) == 6 and "Commands" not in panels
    done = phalanx("train", "-h", environment=narrow)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "<" not in done.stdout and "…" not in done.stdout
    assert re.search(r"--ranks +N \[x>=1\] +Local ranks", done.stdout) and "Several nodes" in done.stdout
    assert re.search(r"--help +-h +Show this", done.stdout)


def test_shells_complete_commands_and_keys_of_recipes() -> None:
    asked = {"_PHALANX_COMPLETE": "complete_bash", "COMP_WORDS": "phalanx train r.yaml optim.l", "COMP_CWORD": "3"}
    assert phalanx(environment=asked).stdout.splitlines() == ["optim.lr="]
    assert phalanx(environment=asked | {"COMP_WORDS": "phalanx sta", "COMP_CWORD": "1"}).stdout.splitlines() == [
        "status"
    ]
    assert "complete" in phalanx("--show-completion", "bash").stdout


def test_presets_are_listed() -> None:
    done = phalanx("config", "presets")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(PRESETS)
    assert re.search(r"^llama-3-8b +8\.03B parameters, 32 layers, width 4096, 32 heads \(8 kv\)", done.stdout, re.M)
    assert re.search(r"^bert-tiny +4\.4\d?M parameters", done.stdout, re.M)
    assert len({line.index(" parameters") for line in lines}) == 1


# --------------------------------------------------------------------------------------------------------------- errors

WRONG = [
    (["train", "gone.yaml"], "no recipe gone.yaml; `phalanx recipes list` shows the bundled ones"),
    (["train", "."], "cannot read the recipe ."),
    (["train", "text.jsonl"], "text.jsonl, line 2: not valid YAML"),
    (["train", "recipe.yaml", "train.stps=3"], "unknown key train.stps; did you mean train.steps?"),
    (["train", "recipe.yaml", "steps"], "`steps` does not have the form section.key=value"),
    (
        ["train", "recipe.yaml", "--steps", "9"],
        "--steps is not an option of `phalanx train` but a key of the recipe; w",
    ),
    (["train", "recipe.yaml", "--optim.lr=3"], "--optim.lr is not an option of `phalanx train`"),
    (["config", "show", "gone.yaml"], "no recipe gone.yaml"),
    (["config", "show", "recipe.yaml", "train.steps=!!python/object/apply:os.abort []"], "not valid YAML"),
    (["config", "show", "recipe.yaml", "train.steps=" + "9" * 5000], "cannot be read as a YAML int"),
    (["config", "show", "recipe.yaml", "optim.lr=nan"], "optim.lr must be a finite number, not 'nan'"),
    (["config", "show", "recipe.yaml", "model.heads=4", "model.kv_heads=3"], "model.kv_heads is 3"),
    (["config", "show", "recipe.yaml", "model.preset=llama"], "model.preset 'llama' is not known"),
    (["config", "explain", "optim.lrr"], "unknown key optim.lrr; did you mean optim.lr?"),
    (["config", "explain", "seed"], "unknown key seed; did you mean train.seed?"),
    (["config", "explain", "optin"], "unknown key optin; did you mean optim?"),
]


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "text.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    return in_one_process([arguments for arguments, _ in WRONG], folder)


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[" ".join(arguments)[:50] for arguments, _ in WRONG])
def test_a_mistake_is_a_sentence_and_costs_no_torch(number: int, wrong: list[Any]) -> None:
    (code, out, heavy), (_, words) = wrong[number], WRONG[number]
    assert code == 2
    assert out.startswith("error: ")
    assert words in out
    assert out.count("\n") == 1
    assert "Traceback" not in out
    assert heavy == []


WRONG_LINES = [
    ["trian", "recipe.yaml"],
    ["train"],
    ["train", "recipe.yaml", "--ranks", "0"],
    ["train", "recipe.yaml", "--ranks", "two"],
    ["train", "recipe.yaml", "--batch-size", "3"],
    ["generate", "x", "--seed", "-1"],
    ["generate", "x", "--seed", str(2**32)],
    ["generate", "x", "--temperature", "-1"],
    ["data", "prepare"],
    ["data", "inspect"],
    ["data", "inspect", "x", "--samples", "-1"],
    ["data", "megatron", "x"],
    ["data", "prepare", "x", "--workers", "0"],
    ["data", "prepare", "x", "--vocab", "5"],
    ["data", "prepare", "x", "--vocab", str(10**12)],
]


@pytest.fixture(scope="module")
def explained() -> list[Any]:
    return in_one_process(WRONG_LINES)


@pytest.mark.parametrize("number", range(len(WRONG_LINES)), ids=[" ".join(words) for words in WRONG_LINES])
def test_a_wrong_command_line_is_explained(number: int, explained: list[Any]) -> None:
    code, out, heavy = explained[number]
    assert code == 2
    assert "Usage: phalanx" in out
    assert "Traceback" not in out
    assert heavy == []


def test_a_shrunk_run_starts_whatever_libraries_do(here: Path) -> None:
    """By themselves numerical libraries start threads when they are imported, beside which nothing may be forked."""
    free = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "2")
    done = phalanx("train", "recipe.yaml", "--shrink", "train.steps=1", folder=here, environment=free)
    assert done.returncode == 0, done.stderr
    assert "finished after step 1" in done.stdout


INTERRUPTED = """
import signal, sys
from phalanx.cli.root import main
from phalanx.data import workers
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background has not
# As the terminal does in the midst of the work:
workers.encode_in_processes = lambda *arguments: signal.raise_signal(signal.SIGINT)
sys.argv[1:] = ["data", "prepare", "text.jsonl", "--cache", "cache", "--vocab", "280"]
main()
"""


def test_an_interrupted_preparation_says_that_it_can_go_on(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{number} words " * 2000}) for number in range(200)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    done = subprocess.run(
        [zygote_python[-1], "-c", INTERRUPTED], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1].startswith("interrupted; the same command continues")


def test_what_may_not_be_read_is_a_sentence_and_no_fault_of_phalanx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root may read everything, so it is said here that it may not."""
    events = tmp_path / "events.jsonl"

    def refused(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(events))

    monkeypatch.setattr("phalanx.cli.jobs._render_status", refused)
    monkeypatch.setattr(sys, "argv", ["phalanx", "status", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        root.main()
    assert left.value.code == ExitCode.FAILED
    said = capsys.readouterr().err
    assert said.startswith(f"error: {events} cannot be read or written (Permission denied); ")
    assert "bug of Phalanx" not in said


def test_another_users_run_is_not_said_to_be_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = RunPaths(tmp_path)
    paths.lock.touch()
    with pytest.raises(RunError, match="is not running"):
        jobs.cancel_run(paths, now=False)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != paths.lock)
    with pytest.raises(RunError, match="belongs to another user"):
        jobs.cancel_run(paths, now=False)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_debug_anywhere_shows_where_an_error_comes_from(place: int, here: Path) -> None:
    arguments = ["config", "show", "gone.yaml"]
    arguments.insert(place, "--debug")
    done = phalanx(*arguments, folder=here)
    assert done.returncode == 2
    assert "Traceback (most recent call last)" in done.stderr
    assert "load.py" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: no recipe gone.yaml")


@pytest.mark.parametrize(
    ("before", "behind", "shows"),
    [
        (["run", "--nproc", "1"], ["--debug", "--nproc", "7"], False),
        (["run", "--nproc=1", "--"], ["--debug"], False),
        (["run", "--debug", "--nproc", "1"], ["--smp-config"], True),
        (["run", "--nodes", "2", "--no-health", "--spares", "1"], ["--nodes", "--debug"], False),
        (["--debug", "run"], ["--", "--debug"], True),
    ],
)
def test_what_is_behind_a_script_is_its_own(before: list[str], behind: list[str], shows: bool) -> None:
    ours, of_script = root._split_script_arguments([*before, "script.py", *behind])
    assert (ours, of_script) == ([*before, "script.py"], behind)
    assert ("--debug" in ours) is shows


def test_every_option_of_run_that_has_a_value_is_known() -> None:
    command = typer.main.get_command(root.app).commands["run"]  # type: ignore[attr-defined]
    options = [name for each in command.params if not getattr(each, "is_flag", True) for name in each.opts]
    assert sorted(options) == sorted(root.RUN_OPTIONS)


def test_a_script_gets_a_flag_that_is_called_as_one_of_ours(here: Path) -> None:
    (here / "script.py").write_text("import sys\nprint('given', sys.argv[1:])\n")
    done = phalanx("run", "--nproc", "1", "script.py", "--debug", "-v", folder=here)
    assert done.returncode == 0, done.stderr
    assert "given ['--debug', '-v']" in done.stdout
    done = phalanx("run", "--debug", "gone.py", "--debug", folder=here)
    assert "Traceback (most recent call last)" in done.stderr
    assert "Traceback" not in phalanx("run", "gone.py", "--debug", folder=here).stderr


def test_output_survives_a_terminal_without_unicode(here: Path) -> None:
    """A machine that was never given a language."""
    bare = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    done = phalanx("config", "show", "recipe.yaml", "data.text_key=naïve", folder=here, environment=bare)
    assert done.returncode in (0, 2)
    assert "Traceback" not in done.stderr
    (here / "other.yaml").write_text(RECIPE + "модель: 1\n", encoding="utf-8")
    done = phalanx("config", "show", "other.yaml", folder=here, environment=bare)
    assert done.returncode == 2
    assert "unknown key" in done.stderr
    assert "Traceback" not in done.stderr


# ----------------------------------------------------------------------------------------------------- under a launcher


@pytest.mark.skipif(not ALL, reason="tests/test_docs.py runs torchrun's command of the page on launching")
def test_two_ranks_of_torchrun_and_on_with_one(here: Path) -> None:
    """torchrun starts the ranks of the first three steps; then `phalanx train` alone goes on in the same folder."""
    launched = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "phalanx", "train", "recipe.yaml", "--run-dir", "run"],
        cwd=here,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
    )  # fmt: skip
    assert launched.returncode == 0, launched.stderr
    paths = RunPaths(here / "run")
    events = list(read_lines(paths.events))
    (started,) = [event for event in events if event["kind"] == EventKind.RUN_STARTED]
    assert (started["world"], started["engine"]) == (2, "sharded")
    assert [event["step"] for event in events if event["kind"] == EventKind.FINISHED] == [3]
    assert paths.report.exists()

    code, _, err = forked(here, "train", "recipe.yaml", "--run-dir", "run", "--ranks", "1", "train.steps=5")
    assert code == 0, err
    steps = read_steps(paths.metrics)
    assert [(step["step"], step["attempt"]) for step in steps] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]
    assert [event["step"] for event in read_lines(paths.events) if event["kind"] == EventKind.RESUMED] == [3]

    whole = ["train", "recipe.yaml", "--run-dir", "whole", "train.steps=5", "optim.decay_steps=3"]
    code, _, err = forked(here, *whole)
    assert code == 0, err
    undisturbed = [step["loss"] for step in read_steps(RunPaths(here / "whole").metrics)]
    assert [step["loss"] for step in steps] == pytest.approx(undisturbed, rel=1e-9)
