"""Old names of version 0.1: keys, events, import paths and commands, and what is said of them."""

import importlib
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from phalanx.config import explain, load
from phalanx.config.schema import Config, iter_knobs
from phalanx.core import renamed
from phalanx.core.errors import ConfigError
from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind, read_events
from phalanx.core.renamed import EVENTS, KEYS, MODULES, NAMES, VALUES, RenamedWarning
from phalanx.core.run_paths import RunPaths
from phalanx.launch import auto_layout, node_session
from tests.helpers import ROOT

RECIPE = {
    "model": {"preset": "llama-1-7b", "vocab_size": 256},
    "data": {"source": "text.jsonl"},
    "parallel": {"data": "sharded", "reduce": "per_step", "sequence": False, "stages": "auto"},
    "balance": {"work": "even", "state": "auto"},
    "optim": {"rule": "adamw", "slots": 2},
    "memory": {"horizon": 3},
    "train": {"loss_scale_steps": 7, "global_batch": 8, "steps": 2},
    "resilience": {
        "memory": False, "replicate": "off", "heartbeat_s": 2.0, "hang_s": 30.0, "same_crash": 4, "grow": False,
    },
}  # fmt: skip


def as_today() -> Config:
    tree = {key: dict(value) for key, value in RECIPE.items()}
    return load.build_config(renamed.rename_keys(tree)[0], "here")


def test_every_new_key_is_a_key_and_no_old_one_is() -> None:
    known = {key for key, _ in iter_knobs()}
    assert set(KEYS.values()) <= known and not set(KEYS) & known
    assert {key for key, _ in VALUES} <= known
    assert set(EVENTS.values()) <= set(EventKind) and not set(EVENTS) & set(EventKind)


def test_a_recipe_of_the_version_before_says_each_new_name_once(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(json.dumps(RECIPE))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        config = load.load_recipe(file)
    assert config == as_today()
    assert (config.optim.double_buffer, config.parallel.engine, config.resilience.rejoin_nodes) == (
        True,
        "sharded",
        False,
    )
    texts = [str(each.message) for each in said if each.category is RenamedWarning]
    assert len(texts) == len(KEYS)
    assert f"{file}: balance.work is called balance.batch now; the next release reads the new name alone" in texts


def test_old_keys_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "new.yaml"
    file.write_text(json.dumps(renamed.rename_keys(RECIPE)[0]))
    with pytest.warns(RenamedWarning, match=r"the command line: optim\.slots is called optim\.double_buffer now"):
        config = load.load_recipe(file, ["optim.slots=1", "parallel.data=fsdp2", "parallel.reduce=auto"])
    assert (config.optim.double_buffer, config.parallel.engine) == (False, "fsdp2")


def test_a_key_under_both_names_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    file.write_text(json.dumps({**RECIPE, "balance": {"work": "even", "batch": "auto"}}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ConfigError, match=r"unknown key balance\.work"):
            load.load_recipe(file)


def test_saved_runs_are_read_without_a_word(tmp_path: Path) -> None:
    config = as_today()
    text = load.render_saved_recipe(config)
    for old, new in KEYS.items():
        assert f"  {new.partition('.')[2]}:" in text, new
        text = text.replace(f"\n  {new.partition('.')[2]}:", f"\n  {old.partition('.')[2]}:")
    text = text.replace("slots: true", "slots: 2")
    (tmp_path / "config.yaml").write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load.load_saved_recipe(tmp_path / "config.yaml") == config


def test_events_of_old_runs_are_read_by_new_names(tmp_path: Path) -> None:
    lines = [
        {"kind": "reshared", "step": 3},
        {"kind": "resolved", "key": "optim.slots", "value": 2},
        {"kind": "resolved", "key": "parallel.stages", "value": [3, 1]},
        {"kind": "resolved", "key": "task.kind", "value": "own"},
        {"kind": "planned", "keys": {"parallel.reduce": "auto", "parallel.tensor": 2, "optim.slots": 1}},
        {"kind": "health"},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": ')
    assert list(read_events(tmp_path / "events.jsonl")) == [
        {"kind": "work_rebalanced", "step": 3},
        {"kind": "auto_resolved", "key": "optim.double_buffer", "value": True},
        {"kind": "auto_resolved", "key": "parallel.layers_per_stage", "value": [3, 1]},
        {"kind": "auto_resolved", "key": "task.kind", "value": "custom"},
        {
            "kind": "layout_chosen",
            "keys": {"parallel.grad_reduce": "auto", "parallel.tensor": 2, "optim.double_buffer": False},
        },
        {"kind": "health"},
    ]


def find(path: str) -> object:
    where, _, name = path.rpartition(".")
    return getattr(importlib.import_module(where), name)


@pytest.mark.parametrize("old", MODULES)
def test_an_old_import_path_is_another_name_of_the_new_one(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    new, names = MODULES[old]
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(RenamedWarning, match=rf"an import: {old} is called {new} now"):
        found = importlib.import_module(old)
    today = importlib.import_module(new)
    for before, now in names.items():
        path = renamed.full_path(new, now)
        with pytest.warns(RenamedWarning, match=rf"an import: {old}\.{before} is called {path} now"):
            assert getattr(found, before) is find(path)
    with pytest.raises(AttributeError, match="has no attribute 'nothing_of_the_kind'"):
        found.nothing_of_the_kind  # noqa: B018
    public = [name for name in vars(today) if not name.startswith("_")]
    assert public and all(getattr(found, name) is getattr(today, name) for name in public)


@pytest.mark.parametrize(("module", "old"), [(module, old) for module, names in NAMES.items() for old in names])
def test_an_old_name_in_a_module_that_stays(module: str, old: str) -> None:
    found = importlib.import_module(module)
    path = renamed.full_path(module, NAMES[module][old])
    with pytest.warns(RenamedWarning, match=rf"an import: {module}.{old} is called {path} now"):
        assert getattr(found, old) is find(path)
    with pytest.raises(AttributeError, match="has no attribute 'nothing_of_the_kind'"):
        found.nothing_of_the_kind  # noqa: B018


def test_the_function_stays_where_a_package_had_its_name() -> None:
    script = (
        "import warnings, phalanx\n"
        "warnings.simplefilter('ignore')\n"
        "import phalanx.train.callback\n"
        "from phalanx.train.callback import Callback\n"
        "assert Callback is phalanx.Callback\n"
        "try:\n"
        "    phalanx.train('gone.yaml', run_dir='run')\n"
        "except phalanx.core.errors.ConfigError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("no recipe gone.yaml"), done.stderr


def test_a_command_says_its_warning_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(json.dumps(RECIPE))
    command = [sys.executable, "-m", "phalanx", "config", "show", "old.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=None)
    assert done.returncode == 0, done.stderr
    assert "warning: old.yaml: memory.horizon is called memory.offload_prefetch_blocks now" in done.stderr
    assert "renamed.py" not in done.stderr and "offload_prefetch_blocks: 3" in done.stdout


def test_an_old_key_is_explained_by_its_new_name() -> None:
    with pytest.warns(RenamedWarning, match=r"the command line: balance\.work is called balance\.batch now"):
        assert explain.explain_key("balance.work", 120) == explain.explain_key("balance.batch", 120)


def test_python_can_be_asked_to_refuse_old_names(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(json.dumps(RECIPE))
    command = [sys.executable, "-W", "error", "-m", "phalanx", "config", "show", "old.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == ExitCode.CONFIG
    [line] = done.stderr.splitlines()
    assert line.startswith("error: old.yaml: parallel.data is called parallel.engine now"), line


def test_a_plan_of_before_is_taken_again_by_new_keys(tmp_path: Path) -> None:
    keys = {"parallel.tensor": 2, "parallel.sequence": True, "parallel.reduce": "auto", "optim.slots": 1}
    (tmp_path / "plan.json").write_text(json.dumps({"version": 1, "for": {}, "keys": keys}))
    found = auto_layout.read_last_record(RunPaths(tmp_path))
    assert found == {
        "version": 1,
        "for": {},
        "keys": {
            "parallel.tensor": 2,
            "parallel.sequence_parallel": True,
            "parallel.grad_reduce": "auto",
            "optim.double_buffer": False,
        },
    }
    (tmp_path / "plan.json").write_text('{"version": 1, "for": {}}')
    assert auto_layout.read_last_record(RunPaths(tmp_path)) is None


def test_an_offer_of_a_node_of_the_release_before_is_read() -> None:
    assert node_session.read_offered_config({"config": json.dumps(RECIPE)}) == as_today()


def test_the_old_command_for_a_node_still_works(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_text('{"kind": "run_started", "time": 1.0, "attempt": 1}\n')
    command = [sys.executable, "-m", "phalanx", "nodes", "return", "node7", "--run", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "return of node node7 requested" in " ".join(done.stdout.split()), done
    assert "warning: the command line: nodes return is called nodes uncordon now" in done.stderr


def test_the_page_lists_the_keys_the_events_and_the_command() -> None:
    page = (ROOT / "docs" / "migrating.md").read_text().split("## From Phalanx 0.1\n")[1]
    rows = [re.findall(r"`([^`]+)`", row) for row in re.findall(r"^\| `.+$", page, re.MULTILINE)]
    listed = {(old, new) for row in rows for old, new in zip(row[::2], row[1::2], strict=True)}
    others = {("task.kind: own", "task.kind: custom"), ("phalanx nodes return", "phalanx nodes uncordon")}
    assert listed == {*KEYS.items(), *EVENTS.items()} | others
