"""What may import what, twice: as written, and as it happens in a fresh process; names and sizes; and habits that a
reader can check."""

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

# Package -> the packages that it may import. `phalanx` is the package's own __init__, `__main__` the command.
MAY_IMPORT: dict[str, set[str]] = {
    "phalanx": set(),
    "core": set(),
    # No torch from here to `planner`, but for the device in `system`.
    "layout": {"core"},
    "recovery": {"core"},
    "storage": {"core"},
    "system": {"core"},
    "config": {"core", "layout"},
    "elastic": {"core", "recovery", "system"},
    "report": {"core", "layout"},
    "planner": {"config", "core", "elastic", "layout", "recovery", "report"},
    # A model, its data, and what moves and updates its parameters.
    "comm": {"core", "layout", "system"},
    "models": {"core", "layout"},
    "tasks": {"models"},
    "data": {"config", "core", "layout", "storage"},
    "optim": {"comm", "config", "core"},
    "engine": {"comm", "core", "layout", "optim", "system"},
    "parallel": {"comm", "config", "core", "engine", "layout", "models", "optim", "system"},
    "checkpoint": {"comm", "core", "engine", "optim", "recovery", "storage", "system"},
    # A run, and what users call.
    "api": {"checkpoint", "comm", "config", "core", "engine", "layout", "models", "optim", "parallel", "system"},
    "compat": {"api", "comm", "core", "elastic", "layout", "models", "parallel", "storage", "system"},
    "workload": {
        "checkpoint", "comm", "config", "core", "data", "engine", "layout", "models", "optim", "parallel", "storage",
        "system", "tasks",
    },
    "autotune": {
        "comm", "config", "core", "data", "engine", "layout", "models", "optim", "parallel", "recovery", "storage",
        "system", "tasks", "workload",
    },
    "trainer": {
        "autotune", "checkpoint", "comm", "config", "core", "data", "engine", "layout", "models", "optim", "parallel",
        "phalanx", "recovery", "storage", "system", "tasks", "workload",
    },
    "health": {"autotune", "comm", "core", "elastic", "report", "system"},
    "generate": {
        "checkpoint", "comm", "config", "core", "elastic", "layout", "models", "parallel", "storage", "system",
        "trainer", "workload",
    },
    "launch": {
        "autotune", "checkpoint", "compat", "config", "core", "data", "elastic", "health", "layout", "models",
        "phalanx", "planner", "recovery", "report", "storage", "system", "trainer", "workload",
    },
    "doctor": {
        "autotune", "comm", "config", "core", "elastic", "health", "launch", "layout", "models", "parallel", "phalanx",
        "recovery", "report", "system",
    },
    "cli": {
        "compat", "config", "core", "data", "doctor", "elastic", "generate", "health", "launch", "layout", "models",
        "phalanx", "planner", "report", "storage", "system", "trainer", "workload",
    },
    "__main__": {"cli"},
}  # fmt: skip
MOST_PACKAGES, MOST_LEVELS = 28, 14

# Third-party packages that a package may import.
MAY_USE: dict[str, set[str]] = {
    "api": {"torch"},
    "autotune": {"torch"},
    "checkpoint": {"torch", "safetensors"},
    "cli": {"torch", "transformers", "rich", "typer"},
    "comm": {"torch"},
    "compat": {"torch", "numpy", "transformers", "flash_attn"},
    "config": {"pydantic", "yaml"},
    "data": {"datasets", "numpy", "pyarrow", "zstandard", "jinja2", "tokenizers", "transformers", "h5py"},
    "doctor": {"torch"},
    "elastic": {"pydantic"},
    "engine": {"torch"},
    "generate": {"torch", "transformers"},
    "health": {"torch", "pynvml"},
    "launch": {"rich", "yaml"},
    "models": {"torch", "safetensors"},  # never transformers: its models are a reference, not a part
    "optim": {"torch"},
    "parallel": {"torch"},
    "planner": {"rich"},
    "recovery": {"numpy"},
    "report": {"plotly", "rich", "yaml"},
    "storage": {"fsspec"},
    "system": {"torch"},
    "tasks": {"torch", "numpy"},
    "trainer": {"torch", "yaml"},
    "workload": {"torch", "numpy", "wandb"},
}
TORCH_FREE = (
    "core",
    "layout",
    "recovery",
    "storage",
    "config",
    "elastic",
    "report",
    "planner",
    "health",
    "launch",
    "cli",
)
WITH_TORCH = {"phalanx.health.burn_in"}  # of these packages
# Modules of other packages that a command line has to import without torch.
ALSO_TORCH_FREE = (
    "phalanx.system.async_call",
    "phalanx.system.cgroups",
    "phalanx.system.cpus",
    "phalanx.system.exit_causes",
    "phalanx.system.fork",
    "phalanx.system.locks",
    "phalanx.system.memory",
    "phalanx.system.slurm_env",
    "phalanx.system.symlinks",
    "phalanx.system.torchrun_env",
    "phalanx.models.hf_config",
    "phalanx.models.hf_bert",
    "phalanx.optim.lr_schedule",
    "phalanx.autotune.run_size",
    "phalanx.doctor.run_checks",
    "phalanx.doctor.shareable_report",
    "phalanx.doctor.training_checks",
    "phalanx.api.fsdp.rank_layout",
    "phalanx.compat.run",
    "phalanx.generate.text",
    "phalanx.generate.distributed",
)
HEAVY = ("torch", "transformers", "tokenizers", "safetensors")
# What a package may import of another only in part: what decides in a run decides in a simulated one, and its words are
# the same; and the interface of the engines, not the engines.
IN_PART = {
    ("planner", "elastic"): {"phalanx.elastic.supervisor.state", "phalanx.elastic.supervisor.decide"},
    ("planner", "report"): {"phalanx.report.event_text"},
    ("parallel", "engine"): {"phalanx.engine.interface"},
    ("checkpoint", "engine"): {"phalanx.engine.interface"},
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
    """The package that a module belongs to."""
    return (module.split(".") + ["phalanx"])[1] if "." in module else "phalanx"


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


def test_the_table_has_no_cycle_and_few_levels() -> None:
    assert len(set(MAY_IMPORT) - {"phalanx", "__main__"}) <= MOST_PACKAGES
    done: set[str] = set()
    levels = 0
    while len(done) < len(MAY_IMPORT):
        ready = {unit for unit, others in MAY_IMPORT.items() if unit not in done and others - {unit} <= done}
        assert ready, f"a cycle among {sorted(set(MAY_IMPORT) - done)}"
        done |= ready
        levels += 1
    assert levels <= MOST_LEVELS


def test_no_file_imports_itself_through_others() -> None:
    imports = {
        module: {name for name in imports_of(module) if name in MODULES and name != module} for module in MODULES
    }
    done: set[str] = set()
    while len(done) < len(MODULES):
        ready = {module for module in MODULES if module not in done and imports[module] <= done}
        assert ready, f"a cycle among {sorted(set(MODULES) - done)}"
        done |= ready


def test_the_root_has_no_loose_module() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}


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
    names = [module for module in MODULES if unit_of(module) in TORCH_FREE and module not in WITH_TORCH]
    names += ALSO_TORCH_FREE
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
    assert guilty in ([], ["phalanx.system.accelerator"])


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
        "phalanx.models.hf_weights",
        "phalanx.models.peft",
        "phalanx.compat.megatron.files",
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
        wiring = module in ("phalanx.cli.main", "phalanx.__main__", "phalanx.comm", *theirs)
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        fine = docstring or wiring or for_types or isinstance(node, allowed)
        assert fine, f"{module}:{node.lineno} does work when imported"


def test_the_process_environment_is_read_in_few_places() -> None:
    readers = {name for name in MODULES if any("os.environ" in ast.unparse(node) for node in _attributes(name))}
    commands = {
        "phalanx.cli.main",
        "phalanx.cli.demo",  # which hides accelerators from what it starts
        "phalanx.cli.doctor",
        "phalanx.cli.health",
        "phalanx.cli.jobs",
        "phalanx.launch.local",
        "phalanx.elastic.node.agent",
        "phalanx.elastic.node.worker",
        "phalanx.elastic.membership.shared_secret",  # which takes a variable out of it
        "phalanx.system.accelerator",  # which sets one that a library of kernels reads
    }
    # What a script of a user's own calls, however it was started, and what starts one.
    scripts = {"phalanx.api.shard", "phalanx.api.fsdp.session", "phalanx.compat.run"}
    scripts |= {"phalanx.compat.sagemaker.start", "phalanx.compat.sagemaker.command"}
    assert readers <= {*commands, *scripts}


def _attributes(module: str) -> Iterator[ast.Attribute]:
    return (node for node in ast.walk(tree_of(module)) if isinstance(node, ast.Attribute))


def test_only_what_faces_the_user_prints() -> None:
    for module in MODULES:
        if unit_of(module) in ("report", "cli", "launch", "generate"):
            continue
        printing = {"print", "typer.echo", "sys.stdout.write"}
        guilty = [f"{module}:{line}" for name, line in calls_of(module) if name in printing]
        assert guilty == []


def test_modules_are_named_for_what_they_are() -> None:
    vague = {"utils", "util", "common", "helpers", "misc", "base", "manager"}
    assert not [name for name in MODULES if name.split(".")[-1] in vague]


def test_the_repository_tells_nothing_of_the_machine_it_was_made_on() -> None:
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "recipes").glob("*"), *(ROOT / "docs").glob("*.md")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/(work|root|tmp/\w+)/", text), path
