"""What may import what, twice: as written, and as it happens in a fresh process; names and sizes; and habits that a
reader can check."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import phalanx
from phalanx.core.placement import Placement
from tests.helpers import ROOT, run_ranks

PACKAGE = ROOT / "phalanx"

# Package -> the packages that it may import. `phalanx` is the package's own __init__, `__main__` the command.
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    # No torch from here to `planner`, but for the device in `system`.
    "layout": {"core"},
    "recovery": {"core"},
    "storage": {"core"},
    "system": {"core"},
    "config": {"core", "layout", "models"},
    "elastic": {"core", "recovery", "system"},
    "report": {"core", "layout"},
    "planner": {"config", "core", "elastic", "layout", "models", "recovery", "report"},
    # A model, its data, and what moves and updates its parameters.
    "comm": {"core", "layout", "system"},
    "models": {"core", "layout"},
    "tasks": {"core", "models"},
    "data": {"config", "core", "layout", "storage"},
    "optim": {"comm", "config", "core"},
    "engine": {"comm", "core", "layout", "optim", "system"},
    "parallel": {"comm", "config", "core", "engine", "layout", "models", "optim", "system"},
    "checkpoint": {"comm", "core", "engine", "optim", "recovery", "storage", "system"},
    # A run, and what users call.
    "api": {
        "checkpoint", "comm", "config", "core", "data", "engine", "layout", "models", "optim", "parallel", "system",
        "tasks", "workload",
    },
    "compat": {
        "api", "checkpoint", "comm", "core", "data", "elastic", "layout", "models", "optim", "parallel", "storage",
        "system",
    },
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
        "recovery", "storage", "system", "tasks", "workload",
    },
    "health": {"autotune", "comm", "core", "elastic", "report", "system"},
    "generate": {
        "checkpoint", "comm", "config", "core", "elastic", "layout", "models", "parallel", "storage", "system",
        "trainer", "workload",
    },
    "launch": {
        "autotune", "checkpoint", "compat", "config", "core", "data", "elastic", "health", "layout", "models",
        "planner", "recovery", "report", "storage", "system", "trainer", "workload",
    },
    # Clusters: what is below a run.
    "provision": {"config", "core", "elastic", "health", "launch", "storage", "system"},
    "doctor": {
        "autotune", "comm", "config", "core", "elastic", "health", "launch", "layout", "models", "parallel",
        "recovery", "report", "system",
    },
    "dashboard": {"core", "elastic", "launch", "report"},
    "cli": {
        "compat", "config", "core", "dashboard", "data", "doctor", "elastic", "generate", "health", "launch", "layout",
        "models", "planner", "provision", "report", "storage", "system", "trainer", "workload",
    },
    "__main__": {"cli"},
    # What users import: lazily, so for types alone but for `core`.
    "phalanx": {
        "api", "compat", "config", "core", "data", "generate", "launch", "layout", "models", "parallel", "planner",
        "provision", "tasks", "trainer",
    },
}  # fmt: skip
MOST_PACKAGES, MOST_LEVELS = 29, 14

# Third-party packages that a package may import.
MAY_USE: dict[str, set[str]] = {
    "api": {"torch"},
    "autotune": {"torch"},
    "checkpoint": {"torch", "safetensors"},
    "cli": {"prometheus_client", "torch", "transformers", "rich", "typer"},
    "comm": {"torch"},
    "compat": {"torch", "numpy", "transformers", "flash_attn"},
    "config": {"pydantic", "yaml"},
    "dashboard": {"starlette", "uvicorn"},
    "data": {"datasets", "numpy", "pyarrow", "zstandard", "jinja2", "tokenizers", "transformers", "h5py", "torch"},
    "doctor": {"torch"},
    "elastic": {"pydantic"},
    "engine": {"torch"},
    "generate": {"torch", "transformers"},
    "health": {"torch", "pynvml"},
    "launch": {"prometheus_client", "rich", "yaml"},
    "models": {"torch", "safetensors"},  # never transformers: its models are a reference, not a part
    "optim": {"torch"},
    "parallel": {"torch", "transformers"},
    "planner": {"rich"},
    "provision": {"pydantic", "yaml"},
    "recovery": {"numpy"},
    "report": {"IPython", "bokeh", "prometheus_client", "rich", "yaml"},
    "storage": {"fsspec", "huggingface_hub"},
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
    "dashboard",
    "provision",
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
    "phalanx.system.locks",
    "phalanx.system.torchrun_env",
    "phalanx.models.hf_config",
    "phalanx.models.families.catalog",
    "phalanx.optim.lr_schedule",
    "phalanx.autotune.run_size",
    "phalanx.doctor.run_checks",
    "phalanx.doctor.results",
    "phalanx.doctor.training_checks",
    "phalanx.api.fsdp.rank_layout",
    "phalanx.compat.run",
    "phalanx.generate.text",
    "phalanx.generate.load_model",
    "phalanx.generate.distributed",
)
HEAVY = ("torch", "transformers", "tokenizers", "safetensors")
# What a package may import of another only in part: what decides in a run decides in a simulated one, and its words are
# the same; the interface of the engines, not the engines; and what is known of models without torch.
IN_PART = {
    ("planner", "elastic"): {"phalanx.elastic.supervisor.state", "phalanx.elastic.supervisor.decide"},
    ("planner", "report"): {"phalanx.report.formats"},
    ("planner", "models"): {"phalanx.models.families.catalog"},
    ("config", "models"): {"phalanx.models.families.catalog", "phalanx.models.families.family"},
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


def for_each_module(check: Callable[[str], None]) -> Callable[[], None]:
    """A test that names every module in which a check fails: one for each would take a minute, mostly pytest's."""

    def test() -> None:
        failures = {}
        for module in MODULES:
            try:
                check(module)
            except AssertionError as error:
                failures[module] = str(error)
        assert failures == {}

    test.__doc__ = check.__doc__
    return test


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@cache
def nodes_of(module: str) -> list[ast.AST]:
    return list(ast.walk(tree_of(module)))


@cache
def imports_of(module: str) -> list[str]:
    """Dotted names of everything a module imports anywhere in it, relative to nothing."""
    return list(_imports(module))


def _imports(module: str) -> Iterator[str]:
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relative to itself; write the whole name"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else str(node.module)


@cache
def calls_of(module: str) -> list[tuple[str, int]]:
    """(dotted name of what is called, line) of every call that is written as a name.

    One that unpickles nothing but tensors says so behind its name.
    """
    return [
        (ast.unparse(node.func) + "(weights_only=True)" * any(map(_is_safe, node.keywords)), node.lineno)
        for node in nodes_of(module)
        if isinstance(node, ast.Call)
    ]


def _is_safe(keyword: ast.keyword) -> bool:
    return keyword.arg == "weights_only" and ast.unparse(keyword.value) == "True"


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


@for_each_module
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


def test_a_process_that_forks_starts_no_thread() -> None:
    """Numerical libraries start threads at their import, unless the environment limits them, as that of the tests."""
    script = "import os, phalanx.cli.main, phalanx.launch.run; print(len(os.listdir('/proc/self/task')))"
    own = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=own, capture_output=True, text=True, timeout=60)
    assert done.stdout == "1\n", done.stderr


def test_the_data_package_needs_torch_no_more_than_the_command_that_prepares_data() -> None:
    assert not any(
        "torch" in set(imports_of(module))
        for module in MODULES
        if unit_of(module) == "data" and module != "phalanx.data.images"
    )  # reads tensors, when asked to


# --------------------------------------------------------------------------------------------------------------- names

# Irregular forms; whatever ends in -ed is one, but for these.
PARTICIPLES = {
    "asked", "begun", "bound", "broken", "brought", "built", "chosen", "come", "cut", "done", "drawn", "driven",
    "fallen", "felt", "fetched", "foretold", "forgotten", "found", "given", "gone", "had", "heard", "held", "hidden",
    "kept", "known", "laid", "learnt", "left", "lent", "lost", "made", "meant", "met", "paid", "put", "seen", "sent",
    "shown", "spoken", "spent", "stood", "sunk", "taken", "taught", "thought", "told", "took", "understood", "woken",
    "worn", "written",
}  # fmt: skip
VERBS = {
    "cut",
    "put",
    "embed",
    "feed",
    "need",
    "seed",
    "speed",
    "shed",
    "exceed",
    "proceed",
    "succeed",
    "bound",
    "come",
}
# Adjectives before a noun, and the API of tasks.
STATES = {"hidden_shape", "pinned_bytes", "shared_units", "held_out"}
MOST_LINES, MOST_ATTRIBUTES, MOST_METHODS = 400, 20, 25
# Classes of more attributes or methods than they should have.
LARGE_CLASSES = {
    # A catalogue of paths, and a backend of torch.distributed, are as large as they have to be.
    "phalanx.core.run_paths:RunPaths": (2, 49),
    "phalanx.comm.backend:ProcessGroupPhalanx": (4, 33),
    # The others are to be divided.
    "phalanx.core.records:StepRecord": (22, 0),
}


def definitions() -> Iterator[tuple[str, ast.AST, list[ast.ClassDef]]]:
    """(module:qualified name, node, the classes that it stands in) of every class and function outside functions."""

    def below(
        body: list[ast.stmt], prefix: str, classes: list[ast.ClassDef]
    ) -> Iterator[tuple[str, ast.AST, list[ast.ClassDef]]]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield prefix + node.name, node, classes
            if isinstance(node, ast.ClassDef):
                yield from below(node.body, f"{prefix}{node.name}.", [*classes, node])

    for module in MODULES:
        yield from below(tree_of(module).body, f"{module}:", [])


def _is_property(node: ast.AST) -> bool:
    return any(
        "property" in ast.unparse(each) or "setter" in ast.unparse(each) for each in getattr(node, "decorator_list", [])
    )


def _is_participle(word: str) -> bool:
    return word not in VERBS and (word in PARTICIPLES or (word.endswith("ed") and len(word) > 3))


def test_a_class_has_a_name_of_its_own() -> None:
    """Those that stand for another library's have its names."""
    places = defaultdict(list)
    for name, node, _ in definitions():
        if isinstance(node, ast.ClassDef) and not name.startswith("phalanx.compat"):
            places[node.name].append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_a_public_function_is_named_for_what_it_does_and_not_for_what_was_done() -> None:
    guilty = []
    for name, node, _ in definitions():
        last = name.rpartition(":")[2].rpartition(".")[2]
        if isinstance(node, ast.ClassDef) or last.startswith("_") or _is_property(node) or "compat" in name:
            continue
        if last not in STATES and last.split("_")[0] not in ("is", "read") and _is_participle(last.split("_")[0]):
            guilty.append(name)
    assert guilty == []


def test_files_and_classes_have_a_size_that_can_be_read() -> None:
    """And what is too large does not grow."""
    files = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in MODULES.items()}
    assert {module: lines for module, lines in files.items() if lines > MOST_LINES} == {}
    classes = {name: _size(node) for name, node, _ in definitions() if isinstance(node, ast.ClassDef)}
    usual = MOST_ATTRIBUTES, MOST_METHODS
    larger = {
        name: size
        for name, size in classes.items()
        if any(a > b for a, b in zip(size, LARGE_CLASSES.get(name, usual), strict=True))
    }
    assert larger == {}
    sizes = {name: classes.get(name, (0, 0)) for name in LARGE_CLASSES}
    assert [name for name, size in sizes.items() if size[0] <= usual[0] and size[1] <= usual[1]] == [], (
        "list it no more"
    )


def _size(node: ast.ClassDef) -> tuple[int, int]:
    """The attributes of a class's instances, and its methods."""
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    attributes = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self":
            attributes.add(each.attr)
    return len(attributes), len(methods)


def import_all(placement: Placement) -> list[bool]:
    """Whether names of the package that modules have as well are functions once all modules are imported."""
    for name in MODULES:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    return [callable(getattr(phalanx, name)) for name in ("train", "plan", "shard", "init")]


def test_functions_of_the_package_stay_functions_whatever_is_imported() -> None:
    assert run_ranks(import_all, 1) == [[True] * 4]


# --------------------------------------------------------------------------------------------------------------- habits


def test_package_init_files_are_empty() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        # That of comm registers the backend, and that of sagemaker names: an import is all that a script has to say.
        # That of launch knows a function of version 0.1.
        if path.parent not in (PACKAGE, PACKAGE / "comm", PACKAGE / "compat" / "sagemaker", PACKAGE / "launch"):
            assert path.read_text() == "", path


@for_each_module
def test_a_module_says_what_it_is(module: str) -> None:
    text = MODULES[module].read_text(encoding="utf-8")
    if text:
        assert ast.get_docstring(tree_of(module)), f"{module} has no docstring"


def _family_names() -> tuple[set[str], set[str]]:
    """Names of families, of their config.json's model_type and of Hugging Face's classes; and of our own classes."""
    from phalanx.models.families.catalog import FAMILIES

    texts = {name for each in FAMILIES.values() for name in (each.name, each.hf.model_type, *each.hf.classes)}
    return texts, {each.network.partition(":")[2] for each in FAMILIES.values()}


def _constants(node: ast.AST) -> set[object]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}


@for_each_module
def test_only_the_families_of_models_know_architectures_by_name(module: str) -> None:
    """A comparison, a table or a `match` by the name of an architecture belongs into its ModelFamily."""
    if module.startswith("phalanx.models.families.") or module == "phalanx.compat.hetseq_command_line":
        return  # the latter: a task of HetSeq's has the name of one
    names, classes = _family_names()
    for node in nodes_of(module):
        where = f"{module}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Compare | ast.MatchValue):
            assert not names & _constants(node), f"{where} compares with {names & _constants(node)}"
            compared = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            assert not classes & compared, f"{where} compares with {classes & compared}"
        if isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            assert not names & keys, f"{where} has a table by {names & keys}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            asked = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
            assert not classes & asked, f"{where} asks for {classes & asked}"


@for_each_module
def test_only_the_tables_of_optimizers_know_them_by_name(module: str) -> None:
    """A new one is a record of `OPTIMIZERS`, a class, and its line in `optim/make_rule.py`."""
    from phalanx.config.optimizers import OPTIMIZERS

    for node in nodes_of(module):
        if isinstance(node, ast.Compare) and module != "phalanx.optim.torch_optimizers":  # how torch's classes differ
            named = _constants(node) & OPTIMIZERS.keys()
            assert not named, f"{module}:{node.lineno} compares {named}: ask the record in OPTIMIZERS"


def test_a_recipe_is_changed_by_keys_that_are_checked() -> None:
    """pydantic's model_copy accepts a key that no section has, silently: `update_config` does not."""
    assert [name for name in MODULES for node in nodes_of(name) if getattr(node, "attr", "") == "model_copy"] == []


# A recipe is resolved in one direction, by what launches a run, what tries one, and what its ranks agree on when they
# meet: whoever reads a configuration after that changes nothing in it.
RESOLVERS = {
    "phalanx.autotune.dry_run",
    "phalanx.cli.data",
    "phalanx.config.explain",  # which reads what is resolved anew
    "phalanx.launch.auto_layout",
    "phalanx.launch.dry_run_estimate",
    "phalanx.launch.prepare",
    "phalanx.trainer.resolve",
}
AFTER_RESOLVING = (
    "checkpoint",
    "comm",
    "data",
    "engine",
    "health",
    "models",
    "optim",
    "parallel",
    "tasks",
    "trainer",
    "workload",
)
MAY_CHANGE = {
    "phalanx.trainer.run_folder",  # the run folder's copies of the user's files for these
    "phalanx.trainer.resolve",
    "phalanx.workload.engines",  # what ranks agree on: `agree_on_sharding`
    "phalanx.workload.local_copies",  # the local copy of a folder for its URL, and back
}


def test_a_recipe_is_resolved_in_one_direction() -> None:
    resolving = {name for name in MODULES if "phalanx.config.resolve" in imports_of(name)}
    assert resolving == RESOLVERS
    changing = {
        name
        for name in MODULES
        for called, _ in calls_of(name)
        if called.split(".")[-1] in ("update_config", "setattr")
    }
    assert {name for name in changing if unit_of(name) in AFTER_RESOLVING} <= MAY_CHANGE


def test_a_recipe_and_what_the_loop_works_with_are_frozen() -> None:
    from phalanx.config.fields import Section
    from phalanx.config.schema import Config

    assert Section.model_config["frozen"] and Config.model_config["frozen"]
    setup = next(each for each in tree_of("phalanx.trainer.setup").body if getattr(each, "name", "") == "TrainingSetup")
    assert isinstance(setup, ast.ClassDef)
    assert [ast.unparse(each) for each in setup.decorator_list] == ["dataclass(frozen=True)"]


def test_only_one_file_knows_what_kind_of_device_there_is() -> None:
    guilty = [name for name, path in MODULES.items() if "cuda" in path.read_text(encoding="utf-8").lower()]
    assert guilty in ([], ["phalanx.system.accelerator"])


# Besides the schedulers themselves: the recipe's keys, Slurm's variables of a process that srun has started, and the
# commands that face Slurm's daemons and administrators.
KNOWS_SLURM = (
    "phalanx.launch.schedulers",
    "phalanx.config.operations",
    "phalanx.config.schema",
    "phalanx.system.slurm_env",
    "phalanx.system.torchrun_env",
    "phalanx.cli.health",
    "phalanx.doctor",
    "phalanx.provision",
    "phalanx.cli.cluster",
    "phalanx.compat.run",
    "phalanx.launch.rendezvous_options",
)


@for_each_module
def test_no_scheduler_is_known_by_name(module: str) -> None:
    """Sentences may speak of Slurm, code may not: it asks the scheduler that the run folder names."""
    if module.startswith(KNOWS_SLURM) or "slurm" not in MODULES[module].read_text(encoding="utf-8").lower():
        return
    guilty = []
    for node in nodes_of(module):
        said = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        names = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "asname", "module")]
        words = [name for name in names if isinstance(name, str)] + ([said] if re.fullmatch(r"[\w.-]+", said) else [])
        guilty += [(node, word) for word in words if "slurm" in word.lower() and word != "Slurm"]
    assert [ast.unparse(node) for node, _ in guilty] == []


FORBIDDEN_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_CALLS = {
    "torch.load", "torch.save", "eval", "exec", "hasattr", "os.system", "yaml.unsafe_load", "yaml.full_load",
    "np.load_pickle", "torch.distributed.broadcast_object_list", "dist.broadcast_object_list",
    "dist.all_gather_object", "dist.gather_object", "dist.scatter_object_list",
}  # fmt: skip


# What other programs have pickled is read by unpicklers that call nothing but what they list.
BY_A_LIST = {
    "phalanx.compat.pickles": {"pickle"},
    **{f"phalanx.compat.megatron.{name}": {"torch.save"} for name in ("export", "torch_dist")},  # which they write
}


@for_each_module
def test_nothing_read_from_disk_or_network_can_run(module: str) -> None:
    allowed = BY_A_LIST.get(module, set())
    assert not (FORBIDDEN_MODULES - allowed) & {name.split(".")[0] for name in imports_of(module)}
    assert {"pickle.loads", "pickle.load"}.isdisjoint(name for name, _ in calls_of(module))
    guilty = [f"{module}:{line} {name}" for name, line in calls_of(module) if name in FORBIDDEN_CALLS - allowed]
    assert guilty == []
    if module not in (
        "phalanx.models.hf_weights",
        "phalanx.models.peft",
        "phalanx.compat.pickles",
        "phalanx.data.images",
        "phalanx.compat.sagemaker.loader",
    ):  # old weights lie about in pickled files
        assert "torch.load(weights_only=True)" not in {name for name, _ in calls_of(module)}
    text = MODULES[module].read_text(encoding="utf-8")
    assert "allow_pickle=True" not in text and "weights_only=False" not in text and "trust_remote_code" not in text


@for_each_module
def test_no_hidden_state_and_no_loose_ends(module: str) -> None:
    for node in nodes_of(module):
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


@for_each_module
def test_importing_does_no_work(module: str) -> None:
    """At a module's top there are definitions, constants and imports: no loop, no condition, no bare call."""
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for node in tree_of(module).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        # Commands are put together or called in some, and old import paths made known; the import of others is what a
        # script says to have their names.
        theirs = ("phalanx.compat.sagemaker", "phalanx.compat.sagemaker.__main__")
        wiring = module in ("phalanx", "phalanx.__main__", "phalanx.comm", *theirs)
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        fine = docstring or wiring or for_types or isinstance(node, allowed)
        assert fine, f"{module}:{node.lineno} does work when imported"


def test_the_process_environment_is_read_in_few_places() -> None:
    readers = {
        name
        for name in MODULES
        if any(getattr(node, "attr", "") == "environ" and ast.unparse(node) == "os.environ" for node in nodes_of(name))
    }
    commands = {
        "phalanx.cli.main",
        "phalanx.cli.demo",  # which hides accelerators from what it starts
        "phalanx.cli.health",
        "phalanx.cli.jobs",
        "phalanx.launch.from_python",
        "phalanx.launch.child_run",
        "phalanx.elastic.node.agent",
        "phalanx.elastic.node.worker",
        "phalanx.elastic.membership.shared_secret",  # which takes a variable out of it
        "phalanx.system.accelerator",  # which sets one that a library of kernels reads
    }
    # What a script of a user's own calls, however it was started, and what starts one.
    scripts = {"phalanx.api.model_checks", "phalanx.api.fsdp.session", "phalanx.compat.run"}
    scripts |= {"phalanx.compat.sagemaker.start", "phalanx.compat.sagemaker.command"}
    assert readers <= {*commands, *scripts}


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
