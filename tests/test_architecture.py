"""What may import what, twice: as written, and as it happens in a fresh process; and habits that a reader can check.

A module belongs to a unit: its package, or itself where it lies beside the packages. `models.spec` (shapes as plain
numbers) is a unit of its own below everything that needs torch, and so are `models.hf_config` (config.json,
read), `optim.overlap` (orders as plain numbers) and `parallel.slices` (parts of parameters).
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.helpers import ROOT

PACKAGE = ROOT / "phalanx"
PLAIN = {
    "phalanx", "errors", "axes", "records", "balance", "resharing", "hardware", "rules", "values", "model_config",
    "config", "combinations", "recipe", "explain", "models.spec", "optim.overlap", "optim.timeline",
    "optim.prefetch", "optim.rates", "parallel.slices", "parallel.stages", "patience", "storage", "mirror",
    "shared_memory", "state_file", "kept_files", "integrity", "kept", "pairing", "pulse", "faults", "slurm_config",
    "resilience_config", "report_config", "fencing", "replicas", "host_memory", "links", "locks", "incidents",
    "kept_bytes", "processors", "control_groups", "shared_secret", "privacy", "bundled", "formats", "sizes",
    "models.hf_config",
}  # level 0: no torch  # fmt: skip

# Unit -> the units that it may import. Units at the same level do not import each other, but for the few named here.
MAY_IMPORT: dict[str, set[str]] = {
    # level 0: plain data and pure functions
    "phalanx": set(),
    "records": {"kept"},
    "errors": {"records"},
    "formats": {"errors", "records"},
    "patience": {"errors", "records"},
    "storage": {"errors", "patience", "records"},
    "mirror": {"errors", "records", "storage"},
    "shared_memory": {"errors", "records"},
    "pulse": {"errors"},
    "faults": {"errors"},
    "kept": set(),
    "integrity": set(),
    "state_file": {"errors", "formats", "integrity"},
    "kept_files": {"errors", "kept", "state_file"},
    "replicas": {"errors", "kept", "state_file"},
    "control_groups": set(),
    "host_memory": {"control_groups"},
    "processors": {"control_groups"},
    "kept_bytes": {"shared_memory"},
    "fencing": {"errors", "records"},
    "links": {"errors", "records"},
    "locks": set(),
    "shared_secret": {"errors"},
    "incidents": {"records"},
    "balance": {"errors"},
    "pairing": set(),
    "privacy": {"errors"},
    "axes": {"config", "errors"},
    "resharing": {"balance"},
    "hardware": {"balance", "errors", "formats", "records"},
    "rules": set(),
    "models.spec": set(),
    "models.hf_config": {"errors", "models.spec"},
    "optim.timeline": set(),
    "optim.rates": set(),
    "optim.overlap": {"optim.timeline"},
    "optim.prefetch": {"optim.overlap", "optim.timeline"},
    "parallel.slices": {"models.spec"},
    "parallel.stages": {"balance", "errors", "models.spec"},
    "values": set(),
    "model_config": {"values", "models.spec"},
    "slurm_config": {"values"},
    "resilience_config": {"values"},
    "report_config": {"values"},
    "config": {
        "errors", "model_config", "slurm_config", "resilience_config", "report_config", "values", "models.spec",
        "parallel.slices", "parallel.stages",
    },
    "combinations": {"axes", "config", "balance", "errors", "rules", "models.spec"},
    "bundled": {"errors"},
    "recipe": {"axes", "bundled", "combinations", "config", "errors", "model_config", "rules"},
    "explain": {"config", "errors", "recipe"},
    "sizes": {"axes", "config", "kept_bytes", "models.spec"},
    "shrink": {"config", "errors", "model_config", "models.spec", "recipe"},
    # level 1 without torch
    "cluster": PLAIN,
    "plan": PLAIN | {"cluster", "report"},  # what decides in a run decides in a simulated one, and words are the same
    "report": PLAIN,
    # level 1 with torch
    "accelerator": {"host_memory", "processors"},
    "phases": set(),
    "models": {"models.spec", "models.hf_config", "errors", "records"},
    "comm": PLAIN | {"accelerator", "phases"},
    # level 2
    "tasks": {"models", "errors", "records", "balance"},
    "data": {"config", "models", "errors", "formats", "records", "balance", "storage"},
    "optim": PLAIN | {"comm", "accelerator"},
    "parallel": PLAIN | {"phases", "comm", "accelerator", "models", "optim"},
    "checkpoint": PLAIN | {"comm", "accelerator", "optim"},
    # level 3
    "train": PLAIN
    | {"shrink", "accelerator", "phases", "models", "comm", "tasks", "data", "optim", "parallel", "checkpoint"},
    # level 4
    "devices": PLAIN | {"accelerator", "cluster", "report"},
    "remote_run": PLAIN | {"cluster", "report"},
    "fitness": PLAIN | {"cluster", "devices"},
    "deep_health": PLAIN | {"cluster", "devices", "report", "train"},
    "health_nodes": PLAIN | {"cluster", "deep_health", "meetings", "nodes", "report"},
    "node_commands": PLAIN | {"cluster", "report"},
    "doctor": PLAIN
    | {"accelerator", "cluster", "comm", "deep_health", "devices", "launch", "models", "parallel", "report", "train"},
    "demo": PLAIN | {"accelerator", "data_commands"},
    "recipe_commands": PLAIN | {"report"},
    "doctor_commands": PLAIN | {"cluster", "doctor", "report"},
    "health_commands": PLAIN | {"cluster", "deep_health", "health_nodes", "meetings", "report"},
    "ending": PLAIN | {"checkpoint", "report"},
    "layouts": PLAIN | {"cluster", "devices", "plan", "train"},
    "foretelling": PLAIN | {"layouts", "plan"},
    "dry_run": PLAIN | {"data", "plan", "train"},
    "before_start": PLAIN | {"cluster", "data", "report", "shrink", "train"},
    "launch": PLAIN
    | {"before_start", "devices", "fitness", "foretelling", "layouts", "remote_run", "ending"}
    | {"cluster", "report", "data", "train"},
    "generation": PLAIN | {"models", "data", "train"},
    "generation_over_ranks": PLAIN | {"accelerator", "cluster", "comm", "generation", "train"},
    "sharded_model": PLAIN | {"comm", "optim", "checkpoint", "parallel"},
    "sharding": PLAIN | {"accelerator", "models", "comm", "optim", "cluster", "sharded_model", "parallel"},
    "scripts": PLAIN | {"accelerator", "cluster", "comm", "parallel"},
    "compat": PLAIN | {"accelerator", "cluster", "comm", "models", "parallel", "scripts"},
    "survey": PLAIN | {"cluster", "devices", "launch", "meetings", "member", "nodes", "offers", "report", "train"},
    "offers": PLAIN | {"cluster", "plan"},
    "recorder": PLAIN | {"cluster", "ending", "report"},
    "meetings": PLAIN | {"cluster", "report"},
    "participant": PLAIN | {"cluster", "devices", "fitness", "recorder", "report", "train"},
    "member": PLAIN
    | {"cluster", "devices", "fitness", "launch", "offers", "participant", "recorder", "remote_run", "ending", "report"}
    | {"train"},
    "nodes": PLAIN
    | {"cluster", "devices", "fitness", "launch", "meetings", "member", "participant", "remote_run", "ending", "report"}
    | {"checkpoint", "train"},
    "script_nodes": PLAIN
    | {"cluster", "compat", "devices", "fitness", "meetings", "nodes", "participant", "recorder", "report", "train"},
    "help_texts": {"config", "errors"},
    "config_commands": PLAIN | {"data_commands", "models", "report"},
    "data_commands": PLAIN | {"data", "help_texts", "report", "train"},
    "keeper": PLAIN | {"cluster", "ending"},
    "jobs": PLAIN | {"cluster", "keeper", "report"},
    "job_commands": PLAIN | {"cluster", "help_texts", "jobs", "keeper", "report"},
    "plan_commands": PLAIN | {"data_commands", "models", "plan", "report"},
    "cli": PLAIN
    | {"compat", "data_commands", "plan_commands", "health_commands", "node_commands", "job_commands"}
    | {"doctor_commands", "before_start", "config_commands", "help_texts", "meetings", "nodes", "script_nodes"}
    | {"survey", "demo", "dry_run", "launch", "generation", "generation_over_ranks", "recipe_commands", "report"}
    | {"train"},
    "__main__": {"cli"},
}  # fmt: skip

# Third-party packages that a unit may import, beside torch where it may have that.
MAY_USE: dict[str, set[str]] = {
    "values": {"pydantic"},
    "model_config": {"pydantic"},
    "slurm_config": {"pydantic"},
    "resilience_config": {"pydantic"},
    "report_config": {"pydantic"},
    "config": {"pydantic"},
    "recipe": {"pydantic", "yaml"},
    "explain": {"pydantic"},
    "storage": {"fsspec"},
    "integrity": {"numpy"},
    "cluster": {"pydantic", "pynvml"},
    "report": {"plotly", "rich", "yaml"},
    "accelerator": {"torch"},
    "phases": {"torch"},
    "models": {"torch", "safetensors"},  # never transformers: its models are a reference, not a part
    "comm": {"torch"},
    "tasks": {"torch", "numpy"},
    "data": {"datasets", "numpy", "pyarrow", "zstandard", "jinja2", "tokenizers", "transformers", "h5py"},
    "optim": {"torch"},
    "parallel": {"torch"},
    "checkpoint": {"torch", "safetensors"},
    "train": {"torch", "numpy", "yaml", "wandb"},
    "before_start": {"rich", "yaml"},
    "launch": {"rich", "yaml"},
    "member": {"yaml"},
    "meetings": {"rich"},
    "generation": {"torch", "transformers"},
    "generation_over_ranks": {"torch", "transformers"},
    "sharded_model": {"torch"},
    "sharding": {"torch"},
    "scripts": {"torch"},
    "compat": {"torch", "numpy", "transformers", "flash_attn"},
    "config_commands": {"typer"},
    "data_commands": {"typer"},
    "demo": {"torch", "transformers", "typer"},
    "recipe_commands": {"rich", "typer"},
    "doctor": {"torch"},
    "doctor_commands": {"typer"},
    "health_commands": {"typer"},
    "node_commands": {"typer"},
    "plan": {"rich"},
    "plan_commands": {"typer"},
    "jobs": {"rich"},
    "job_commands": {"typer"},
    "cli": {"typer"},
}
TORCH_FREE = (*PLAIN, "cluster", "plan", "report")
# Modules above that level which a command line still has to import without torch.
ALSO_TORCH_FREE = (
    "phalanx.cli",
    "phalanx.config_commands",
    "phalanx.help_texts",
    "phalanx.data_commands",
    "phalanx.demo",
    "phalanx.dry_run",
    "phalanx.recipe_commands",
    "phalanx.doctor_commands",
    "phalanx.doctor.examination",
    "phalanx.doctor.reporting",
    "phalanx.doctor.training",
    "phalanx.health_commands",
    "phalanx.node_commands",
    "phalanx.deep_health",
    "phalanx.health_nodes",
    "phalanx.fitness",
    "phalanx.job_commands",
    "phalanx.plan_commands",
    "phalanx.jobs",
    "phalanx.keeper",
    "phalanx.foretelling",
    "phalanx.before_start",
    "phalanx.launch",
    "phalanx.layouts",
    "phalanx.meetings",
    "phalanx.nodes",
    "phalanx.script_nodes",
    "phalanx.survey",
    "phalanx.scripts.ranks",
    "phalanx.compat.run",
    "phalanx.generation",
    "phalanx.generation_over_ranks",
    "phalanx.optim.schedule",
)
HEAVY = ("torch", "transformers", "tokenizers", "safetensors")
# What a unit may import of another only in part: the interface of the engines, not the engines.
IN_PART = {
    ("plan", "cluster"): {"phalanx.cluster.affairs", "phalanx.cluster.supervisor"},
    ("plan", "report"): {"phalanx.report.words"},
    ("parallel", "optim"): {"phalanx.optim.choose", "phalanx.optim.engine", "phalanx.optim.gradients"},
    ("checkpoint", "optim"): {
        "phalanx.optim.engine",
        "phalanx.optim.coded",
        "phalanx.optim.lane",
        "phalanx.optim.stamps",
        "phalanx.optim.update",
    },
}


def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def unit_of(module: str) -> str:
    parts = module.split(".")
    if parts[1:3] in (["models", "spec"], ["models", "spec_problems"]):
        return "models.spec"
    if parts[1:3] in (["models", "hf_config"], ["models", "hf_bert"]):
        return "models.hf_config"
    if parts[1:2] in (["optim"], ["parallel"]) and ".".join(parts[1:]) in PLAIN:
        return ".".join(parts[1:])
    return parts[1] if len(parts) > 1 else "phalanx"


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imports_of(module: str) -> Iterator[str]:
    """Dotted names of everything a module imports anywhere in it, relative to nothing."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relative to itself; write the whole name"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else str(node.module)


def calls_of(module: str) -> Iterator[tuple[str, int]]:
    """(dotted name of what is called, line) of every call that is written as a name.

    One that unpickles nothing but tensors says so behind its name.
    """
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Call):
            safe = any(ast.unparse(keyword) == "weights_only=True" for keyword in node.keywords)
            yield ast.unparse(node.func) + "(weights_only=True)" * safe, node.lineno


# --------------------------------------------------------------------------------------------------------- import table


def test_the_table_speaks_of_every_unit_and_of_no_other() -> None:
    units = {unit_of(module) for module in MODULES}
    assert units == set(MAY_IMPORT)
    assert set(MAY_USE) <= units


def test_the_table_has_no_circle() -> None:
    done: set[str] = set()
    while len(done) < len(MAY_IMPORT):
        ready = {unit for unit, others in MAY_IMPORT.items() if unit not in done and others - {unit} <= done}
        assert ready, f"a circle among {sorted(set(MAY_IMPORT) - done)}"
        done |= ready


@pytest.mark.parametrize("module", MODULES)
def test_imports_as_they_are_written(module: str) -> None:
    unit = unit_of(module)
    for name in imports_of(module):
        if name.split(".")[0] == "phalanx":
            other = unit_of(name)
            assert other == unit or other in MAY_IMPORT[unit], f"{module} must not import {name}"
            part = IN_PART.get((unit, other))
            assert part is None or name in part, f"{module} must not import {name}, only {part}"
        elif name.split(".")[0] not in sys.stdlib_module_names:
            assert name.split(".")[0] in MAY_USE.get(unit, set()), f"{module} must not import {name}"


def test_imports_as_they_happen() -> None:
    """Import each torch-free module in one fresh process, and name the first that brings in something heavy."""
    names = [module for module in MODULES if unit_of(module) in TORCH_FREE or module in ALSO_TORCH_FREE]
    assert len(names) > 20
    script = (
        "import importlib, json, sys\n"
        "found = {}\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    importlib.import_module(name)\n"
        "    heavy = sorted(set(json.loads(sys.argv[2])) & set(sys.modules))\n"
        "    if heavy:\n"
        "        found[name] = heavy\n"
        "        break\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(names), json.dumps(HEAVY)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert json.loads(done.stdout) == {}


def test_the_data_package_needs_torch_no_more_than_the_command_that_prepares_data() -> None:
    assert not any("torch" in set(imports_of(module)) for module in MODULES if unit_of(module) == "data")


# --------------------------------------------------------------------------------------------------------------- habits


def test_package_init_files_are_empty() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        # That of comm registers the backend, and the other one names: an import is all that a script has to say.
        if path.parent not in (PACKAGE, PACKAGE / "comm", PACKAGE / "compat" / "sagemaker"):
            assert path.read_text() == "", path


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_what_it_is_and_is_short(module: str) -> None:
    text = MODULES[module].read_text(encoding="utf-8")
    if text:
        assert ast.get_docstring(tree_of(module)), f"{module} has no docstring"
    assert len(text.splitlines()) <= 500, f"{module} is too long to read"


def test_only_one_file_knows_what_kind_of_device_there_is() -> None:
    guilty = [name for name, path in MODULES.items() if "cuda" in path.read_text(encoding="utf-8").lower()]
    assert guilty in ([], ["phalanx.accelerator"])


FORBIDDEN_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_CALLS = {
    "torch.load", "torch.save", "eval", "exec", "hasattr", "os.system", "yaml.unsafe_load", "yaml.full_load",
    "np.load_pickle", "torch.distributed.broadcast_object_list", "dist.broadcast_object_list",
    "dist.all_gather_object", "dist.gather_object", "dist.scatter_object_list",
}  # fmt: skip


# What other programs have pickled is read by unpicklers that call nothing but what they list.
BY_A_LIST = {"phalanx.compat.sagemaker.files": {"pickle"}}


@pytest.mark.parametrize("module", MODULES)
def test_nothing_read_from_disk_or_network_can_run(module: str) -> None:
    allowed = BY_A_LIST.get(module, set())
    assert not (FORBIDDEN_MODULES - allowed) & {name.split(".")[0] for name in imports_of(module)}
    assert {"pickle.loads", "pickle.load"}.isdisjoint(name for name, _ in calls_of(module))
    guilty = [f"{module}:{line} {name}" for name, line in calls_of(module) if name in FORBIDDEN_CALLS - allowed]
    assert guilty == []
    if module not in (
        "phalanx.models.weights",
        "phalanx.models.peft",
        "phalanx.models.megatron_files",
        "phalanx.compat.sagemaker.loader",
    ):  # old weights lie about in pickled files
        assert "torch.load(weights_only=True)" not in {name for name, _ in calls_of(module)}
    text = MODULES[module].read_text(encoding="utf-8")
    assert "allow_pickle=True" not in text and "weights_only=False" not in text and "trust_remote_code" not in text


@pytest.mark.parametrize("module", MODULES)
def test_no_hidden_state_and_no_loose_ends(module: str) -> None:
    for node in ast.walk(tree_of(module)):
        assert not isinstance(node, ast.Global), f"{module}:{node.lineno} has a global statement"
        if isinstance(node, ast.ExceptHandler):
            # Nothing is swallowed: a handler that does nothing at all hides what happened.
            empty = len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
            assert not empty, f"{module}:{node.lineno} swallows an exception"
            assert node.type is not None, f"{module}:{node.lineno} catches everything without saying what"
        if isinstance(node, ast.Name):
            assert node.id != "NotImplementedError", f"{module}:{node.lineno}"
    text = MODULES[module].read_text(encoding="utf-8")
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text), module


@pytest.mark.parametrize("module", MODULES)
def test_importing_does_no_work(module: str) -> None:
    """At a module's top there are definitions, constants and imports: no loop, no condition, no bare call."""
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for node in tree_of(module).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        # Commands are put together or called in some; the import of others is what a script says to have their names.
        theirs = ("phalanx.compat.sagemaker", "phalanx.compat.sagemaker.__main__")
        wiring = module in ("phalanx.cli", "phalanx.__main__", "phalanx.comm", *theirs)
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        fine = docstring or wiring or for_types or isinstance(node, allowed)
        assert fine, f"{module}:{node.lineno} does work when imported"


def test_the_process_environment_is_read_in_few_places() -> None:
    readers = {name for name in MODULES if any("os.environ" in ast.unparse(node) for node in _attributes(name))}
    commands = {
        "phalanx.cli",
        "phalanx.demo",  # which hides accelerators from what it starts
        "phalanx.doctor_commands",
        "phalanx.health_commands",
        "phalanx.job_commands",
        "phalanx.launch",
        "phalanx.cluster.agent",
        "phalanx.cluster.worker",
        "phalanx.shared_secret",  # which takes a variable out of it
        "phalanx.accelerator",  # which sets one that a library of kernels reads
    }
    # What a script of a user's own calls, however it was started, and what starts one.
    scripts = {"phalanx.sharding", "phalanx.scripts.session", "phalanx.compat.run"}
    scripts |= {"phalanx.compat.sagemaker.start", "phalanx.compat.sagemaker.command"}
    assert readers <= {*commands, *scripts}


def _attributes(module: str) -> Iterator[ast.Attribute]:
    return (node for node in ast.walk(tree_of(module)) if isinstance(node, ast.Attribute))


def test_only_what_faces_the_user_prints() -> None:
    for module in MODULES:
        reading = (
            "report",
            "cli",
            "config_commands",
            "data_commands",
            "demo",
            "job_commands",
            "plan_commands",
            "recipe_commands",
            "launch",
            "generation",
            "generation_over_ranks",
        )
        if unit_of(module) in reading:
            continue
        printing = {"print", "typer.echo", "sys.stdout.write"}
        guilty = [f"{module}:{line}" for name, line in calls_of(module) if name in printing]
        assert guilty == []


def test_modules_are_named_for_what_they_are() -> None:
    vague = {"utils", "util", "common", "helpers", "misc", "core", "base", "manager"}
    assert not [name for name in MODULES if name.split(".")[-1] in vague]


def test_the_repository_tells_nothing_of_the_machine_it_was_made_on() -> None:
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "recipes").glob("*"), *(ROOT / "docs").glob("*.md")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/(work|root|tmp/\w+)/", text), path
