"""The pages tell the truth: links resolve, commands run, names exist, tables are complete.

`python -m tests.test_docs` writes the table of keys in docs/recipes.md anew.

Every fenced bash block is run as it stands, but smaller, unless a line `<!-- not run: reason -->` precedes it.
"""

import dataclasses
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
import typer

from phalanx.autotune import measure
from phalanx.cli import root
from phalanx.config import explain, load
from phalanx.config.schema import Config, iter_knobs
from phalanx.core import faults, renamed
from phalanx.core.json_lines import read_lines
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.records import EventKind, ExpertStepRecord, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.models.families.catalog import PRESETS
from phalanx.provision.config import build_config as build_cluster_config
from tests.helpers import ALL, run_ranks
from tests.warm_shell import run_script

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
QUICKSTART = ROOT / "docs" / "quickstart.md"
TABLE_PAGE = ROOT / "docs" / "recipes.md"
RENAMED_PAGE = ROOT / "docs" / "migrating.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
NAMES = {page: page.relative_to(ROOT).as_posix() for page in PAGES}
BEGIN, END = "<!-- keys: begin -->", "<!-- keys: end -->"
# Options of other programs that the pages speak of.
FOREIGN_FLAGS = {
    "--debug", "--signal", "--max-restarts", "--ntasks", "--ntasks-per-node", "--gpus", "--apply", "--limit",
    "--output", "--no-kill", "--requeue", "--cpu-bind", "--constraint", "--reservation", "--auto-resume", "--gres",
    "--gpu-bind", "--gpus-per-task", "--logdir", "--quick", "--svg", "--stop-and-go", "--finetune",
    "--use-checkpoint-args", "--gpu-reset", "--cli-input-json", "--switches",
}  # fmt: skip
FORBIDDEN = re.compile(r"https?://|/work/|/root/|/home/|pypi|index-url|github\.com|huggingface\.co|\bTODO\b", re.I)
# What makes a documented command small; a page's own key=value comes later and wins.
SMALL_MODEL = ["model.hidden=32", "model.layers=1", "model.heads=2", "model.kv_heads=1"]
SMALL_RUN = [
    "data.seq_len=32", "data.tokenizer_vocab=300", "train.steps=4", "train.global_batch=4", "train.micro_batch=2",
    "train.eval_sequences=4", "optim.warmup_steps=1", "report.tensorboard=false",
]  # fmt: skip
OWN_RUN = [
    "train.steps=4", "train.global_batch=8", "train.micro_batch=4", "train.eval_sequences=8", "task.options={width: 4}",
]  # fmt: skip
STEPS_FACTOR = 100  # a page's own train.steps is divided by this
# Not with `make test-all`: other data than a recipe's own, and ranks that measure nothing before they begin.
SMALL_DATA = [] if ALL else ["data.source=my/*.jsonl"]
UNMEASURED = [] if ALL else ["balance.batch=even"]
# A Python whose `-m phalanx` is forked as the pages' own commands are.
PYTHON = """#!/bin/sh
case "$*" in "-u -m phalanx "*) shift ;; esac
case "$*" in "-m phalanx "*) shift 2; exec phalanx "$@" ;; esac
exec {python} "$@"
"""

page_by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: NAMES[page])


class Block(NamedTuple):
    """A fenced block: its language, its text, and why it is not run (None: it is)."""

    language: str
    text: str
    not_run: str | None


def blocks(page: Path) -> list[Block]:
    pattern = r"(?:^<!-- not run: (.+?) -->\n)?^```(\w*)\n(.*?)^```$"
    found = re.finditer(pattern, page.read_text(encoding="utf-8"), re.M | re.S)
    return [Block(match[2], match[3], match[1]) for match in found]


def runnable(page: Path) -> list[str]:
    return [block.text for block in blocks(page) if block.language == "bash" and block.not_run is None]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def spans(page: Path) -> list[str]:
    """What stands between single backticks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def section(page: Path, heading: str) -> str:
    """The text below a heading, up to the next one of the same level or a higher one."""
    before, mark, below = page.read_text(encoding="utf-8").partition(f"# {heading}\n")
    level = len(before) - len(before.rstrip("#")) + 1
    assert mark, f"{NAMES[page]} has no heading {heading!r}"
    return re.split(rf"^#{{1,{level}}} ", below, maxsplit=1, flags=re.M)[0]


def first_column(text: str) -> list[str]:
    """The backticked names in the first column of the tables of a text."""
    return [name for row in re.findall(r"^\| (`.+?) \|", text, re.M) for name in re.findall(r"`([^`]+)`", row)]


# ------------------------------------------------------------------------------------------------------ links, names


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@page_by_page
def test_links_resolve(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken, f"{NAMES[page]} links to what is not there"


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {(ROOT / target.partition("#")[0]).resolve() for target in re.findall(r"\]\(([^)\s]+)\)", prose(README))}
    assert [name for page, name in NAMES.items() if page.parent.name == "docs" and page not in linked] == []


@page_by_page
def test_keys_exist(page: Path) -> None:
    sections, keys = set(Config.model_fields), {key for key, _ in iter_knobs()}
    groups = {key.rpartition(".")[0] for key in keys}
    text = spans(page) + re.findall(r"\b[a-z]+\.[a-z_.]+(?==)", "\n".join(block.text for block in blocks(page)))
    named = [match[0] for span in text if (match := re.match(r"[a-z]+(\.[a-z_0-9]+)+", span))]
    meant = [
        key
        for key in named
        if key.split(".")[0] in sections and not key.endswith((".html", ".yaml", ".json", ".py", ".conf"))
    ]
    before = set(renamed.KEYS) if page == RENAMED_PAGE else set()  # the page on what keys were called
    assert [key for key in meant if key not in keys | groups | before] == []


@page_by_page
def test_paths_exist(page: Path) -> None:
    ours = re.compile(r"(?:phalanx|tests|docs|recipes|benchmarks|examples)/[\w./-]*|\.ci/run")
    named = [span for span in spans(page) if ours.fullmatch(span)]
    assert [path for path in named if not (ROOT / path).exists()] == []


def commands() -> dict[str, click.Command]:
    """All commands of the command line by their words, such as "data prepare"."""

    def below(command: Any, words: list[str]) -> Iterator[tuple[str, Any]]:
        children = getattr(command, "commands", {})
        if not children:
            yield " ".join(words), command
        for name, child in children.items():
            yield from below(child, [*words, name])

    return dict(below(typer.main.get_command(root.app), []))


def flags_of(command: Any) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts if option.startswith("--")} | {"--help"}


@page_by_page
def test_flags_exist(page: Path) -> None:
    known = {"--version"}.union(FOREIGN_FLAGS, *map(flags_of, commands().values()))
    named = {flag for span in spans(page) for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", span)}
    assert named - known == set()


@page_by_page
def test_commands_exist(page: Path) -> None:
    lines = [line for block in blocks(page) if block.language == "bash" for line in command_lines(block.text)]
    calls = [line for line in lines if line.startswith("phalanx ")] + [
        s for s in spans(page) if s.startswith("phalanx ")
    ]
    known = commands()
    for call in calls:
        words = [word for word in shlex.split(call, comments=True)[1:] if word != "..."]
        words = words[: words.index("--")] if "--" in words else words  # the rest is another program's
        flags = {word for word in words if word.startswith("--")}
        if not words or words[0].startswith("--"):
            assert flags <= {"--help", "--version"}, call
            continue
        name = next((name for name in known if words[: len(name.split())] == name.split()), None)
        assert name or any(other.startswith(f"{words[0]} ") for other in known), f"there is no command {call!r}"
        assert not name or flags <= flags_of(known[name]) | {"--debug"}, call


def test_every_command_is_explained() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in commands() if f"phalanx {name}" not in text] == []


@pytest.mark.parametrize("path", [*PAGES, *RECIPES, ROOT / ".pre-commit-config.yaml"], ids=lambda path: path.name)
def test_nothing_points_outside(path: Path) -> None:
    assert FORBIDDEN.findall(path.read_text(encoding="utf-8")) == []


def test_hooks_run_the_environments_own_tools() -> None:
    config = load.parse_yaml((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"), "hooks")
    assert [repository["repo"] for repository in config["repos"]] == ["local"]
    tools = [hook["entry"].split()[0] for hook in config["repos"][0]["hooks"]]
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert [tool for tool in tools if f'"{tool.removeprefix(".venv/bin/")}>=' not in declared] == []


# ------------------------------------------------------------------------------------------------------------ tables


def key_table() -> str:
    """The table of all keys, as Markdown."""
    rows = ["| key | default | values | curve | meaning |", "|---|---|---|---|---|"]
    for key, info in iter_knobs():
        extra = info.json_schema_extra
        assert info.description
        assert isinstance(extra, dict)
        default, values, meaning = (
            explain.describe_default(info),
            explain.describe_values(info),
            info.description.replace("|", "\\|"),
        )
        rows.append(f"| `{key}` | `{default}` | {values} | {'**curve**' if extra['trajectory'] else ''} | {meaning} |")
    return "\n".join(rows) + "\n"


def with_table(text: str) -> str:
    """The page's text with the table as it must be."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{key_table()}{END}{rest.partition(END)[2]}"


def test_the_table_of_keys_is_in_step_with_the_code() -> None:
    text = TABLE_PAGE.read_text(encoding="utf-8")
    assert text == with_table(text), "run `python -m tests.test_docs`"


def test_the_tables_of_records_are_complete() -> None:
    page = ROOT / "docs" / "runs.md"
    assert first_column(section(page, "metrics.jsonl")) == [
        field.name for field in dataclasses.fields(ExpertStepRecord)
    ]
    assert set(first_column(section(page, "events.jsonl"))) == set(EventKind)
    paths = RunPaths(Path("run"))
    files = [getattr(paths, name) for name, value in vars(RunPaths).items() if isinstance(value, property)]
    files += [paths.log(1, 0), paths.exit_cause(1, 0)]
    tops = {file.relative_to(paths.root).parts[0] for file in files if isinstance(file, Path)}
    assert {name.rstrip("/") for name in first_column(section(page, "The run folder"))} >= tops


def test_the_table_of_faults_is_complete() -> None:
    page = ROOT / "docs" / "fault-tolerance.md"
    assert first_column(section(page, "Kinds of faults")) == list(faults.KINDS)
    keys = [key for row in first_column(section(page, "Where and when")) for key in row.split("=")[:1]]
    assert keys[:4] == ["rank", "attempt", "every", "phase"]


def test_the_table_of_exit_codes_is_complete() -> None:
    table = section(ROOT / "docs" / "launching.md", "Exit codes")
    rows = re.findall(r"^\| (\d+) \| (\w+) \|.*\| (yes|yes, [^|]+|no) \|$", table, re.M)
    assert [(int(code), name) for code, name, _ in rows] == [(int(code), code.name) for code in ExitCode]


def test_all_presets_are_listed() -> None:
    listed = first_column(section(ROOT / "docs" / "models.md", "Shapes"))
    assert [name for name in listed if name != "model.preset"] == list(PRESETS)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipes_are_valid_and_listed(path: Path) -> None:
    load.load_recipe(path)
    assert f"(../recipes/{path.name})" in TABLE_PAGE.read_text(encoding="utf-8")


def test_the_page_on_tasks_shows_the_example_as_it_is() -> None:
    example = (ROOT / "examples" / "vision_task.py").read_text(encoding="utf-8")
    page = [block.text for block in blocks(ROOT / "docs" / "custom-tasks.md") if block.language == "python"]
    shown = [text for text in page if "phalanx.Callback" not in text]
    assert len(shown) >= 4
    # By lines, as a method that is shown alone is set further to the left, with two empty lines behind it.
    lines = [line.strip() for line in example.splitlines() if line.strip()]
    for text in shown:
        wanted = [line.strip() for line in text.splitlines() if line.strip()]
        assert any(lines[at : at + len(wanted)] == wanted for at in range(len(lines))), text


@page_by_page
def test_yaml_examples_are_valid(page: Path) -> None:
    for block in blocks(page):
        if block.language == "yaml":
            tree = load.parse_yaml(block.text, NAMES[page])
            if page.name == "clusters.md":
                build_cluster_config(tree, [], NAMES[page])
            else:
                load.build_config(tree, NAMES[page])


# ---------------------------------------------------------------------------------------------------------- commands


def command_lines(text: str) -> list[str]:
    """The lines of a bash block, continued ones joined."""
    return text.replace("\\\n", " ").splitlines()


def smaller(line: str) -> str:
    """A documented command with settings that a test has time for."""
    line = re.sub(r"train\.steps=(\d+)", lambda match: f"train.steps={int(match[1]) // STEPS_FACTOR}", line)
    training = re.match(r"(.*phalanx (?:train|hardware|launch) \S+\.yaml)(.*)", line)
    if not training:
        return line
    unmeasured = [] if "balance." in line else UNMEASURED
    if "digits.yaml" in line:  # a network and data of its own
        return shlex.join([*shlex.split(training[1]), *OWN_RUN, *unmeasured]) + training[2]
    shapes = [] if "from_hf" in line else SMALL_MODEL
    return shlex.join([*shlex.split(training[1]), *shapes, *SMALL_RUN, *SMALL_DATA, *unmeasured]) + training[2]


def run_forking(placement: Placement, script: str, folder: str, settings: dict[str, str]) -> list[Any]:
    """`run_script`, where what its commands start as `python -m phalanx` is forked, too, but with `make test-all`."""
    if ALL:
        return run_script(placement, script, folder, settings)
    measure.LONG_BUDGET_S = measure.BUDGET_S
    python = Path(folder, "python")
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    sys.executable = str(python)  # of this forked process alone, as is the budget
    return run_script(placement, script, folder, settings | {"PYTHON_EXEC": str(python)})  # torchrun's name for it


def run_page(page: Path, folder: Path) -> None:
    """Run all commands of a page in order, in one folder."""
    settings = {"HOME": str(folder), "OMP_NUM_THREADS": "1"}  # HOME has the cache of token files
    for text in runnable(page):
        script = "\n".join(smaller(line) for line in command_lines(text))
        where = {"folder": str(folder), "settings": settings}
        ((code, printed),) = run_ranks(run_forking, 1, timeout_s=240, script=script, **where)
        assert code == 0, f"{NAMES[page]}: exit code {code} of\n{script}\n{printed}"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipes and some text, in which the quickstart's commands have been run."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("recipes", "examples"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / "my").mkdir()
    words = ["a", "rank", "reads", "its", "share", "of", "the", "text", "and", "adds", "a", "part", "to", "its", "sum"]
    for name in ("first", "second"):
        documents = [" ".join(words[(i * k) % len(words)] for k in range(120)) + f" {name} {i}\n" for i in range(120)]
        lines = [json.dumps({"text": document}) + "\n" for document in documents]
        (folder / "my" / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    run_page(QUICKSTART, folder)
    return folder


def test_blocks_that_are_not_run_say_why() -> None:
    marks = sum(page.read_text(encoding="utf-8").count("<!-- not run:") for page in PAGES)
    reasons = [block.not_run for page in PAGES for block in blocks(page) if block.language == "bash" and block.not_run]
    assert len(reasons) == marks, "a mark that stands before no bash block"


def test_a_command_is_made_smaller_without_losing_its_own_words() -> None:
    line = smaller("phalanx train my.yaml --run-dir r 'data.source=my/*.jsonl' train.steps=600 # more")
    assert line.startswith("phalanx train my.yaml model.hidden=32")
    assert line.endswith("--run-dir r 'data.source=my/*.jsonl' train.steps=6 # more")
    assert smaller("phalanx report runs/my") == "phalanx report runs/my"


def test_the_quickstart_does_what_it_says(workspace: Path) -> None:
    paths = RunPaths(workspace / "runs" / "my")
    assert [record["step"] for record in read_steps(paths.metrics)] == list(range(1, 7))
    events = list(read_lines(paths.events))
    assert [event["world"] for event in events if event["kind"] == EventKind.RUN_STARTED] == [2, 3]
    assert [event["step"] for event in events if event["kind"] == EventKind.RESUMED] == [4]
    assert "<html" in paths.report.read_text(encoding="utf-8")
    assert (workspace / "out" / "my" / "model.safetensors").is_file()


DOCS = [page for page in PAGES if page.parent.name == "docs" and page != QUICKSTART and runnable(page)]


@pytest.mark.parametrize("page", DOCS, ids=lambda page: NAMES[page])
def test_commands_of_the_pages_run(page: Path, workspace: Path) -> None:
    run_page(page, workspace)
    if page.name == "guarantees.md":
        one, three = (read_steps(RunPaths(workspace / "runs" / name).metrics) for name in ("one", "three"))
        assert len(one) == 4
        assert [step["loss"] for step in one] == pytest.approx([step["loss"] for step in three], rel=1e-9)
    if page.name == "launching.md":
        joined = RunPaths(workspace / "runs" / "joined")  # of torchrun's ranks
        events = list(read_lines(joined.events))
        (started,) = [event for event in events if event["kind"] == EventKind.RUN_STARTED]
        assert (started["world"], started["engine"]) == (2, "sharded")
        assert [event["step"] for event in events if event["kind"] == EventKind.FINISHED] == [4]
        assert [step["attempt"] for step in read_steps(joined.metrics)] == [1] * 4 and joined.report.exists()


if __name__ == "__main__":
    TABLE_PAGE.write_text(with_table(TABLE_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
