"""Makes `import torch.sagemaker` and the smddp backend resolve to Phalanx, by a finder of modules."""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import api as shard_api
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.checkpoint import optimizer as dcp_optimizer

from phalanx.api.fsdp.patches import patch_fsdp, replace
from phalanx.comm import backend
from phalanx.compat.sagemaker import absent, local, offloading, optimizer_state
from phalanx.compat.sagemaker.full import with_translation
from phalanx.compat.sagemaker.names import INSTEAD, NAMES, PAGE, ROOTS, WITHOUT

SMDDP = "smddp"


def install() -> None:
    """Have scripts find the library's modules here, and PyTorch's functions take what it adds to them. Repeating it
    changes nothing. Nothing else changes before `tsm.init`."""
    if any(isinstance(each, Finder) for each in sys.meta_path):
        return
    sys.meta_path.insert(0, Finder(ROOTS))
    sys.meta_path.append(Finder(tuple(WITHOUT)))  # the last to be asked: for what is not installed
    absent.without_flash_attention()
    patch_fsdp()
    replace(checkpoint_wrapper.OffloadWrapper, "__init__", offloading.wrap_init)
    replace(checkpoint_wrapper.OffloadWrapper, "forward", offloading.wrap_forward)
    for owner in (dcp_optimizer, dcp):
        replace(owner, "load_sharded_optimizer_state_dict", optimizer_state.with_process_group)
    replace(shard_api, "load_with_process_group", local.with_sharded_tensors)
    for name in ("save_state_dict", "load_state_dict"):
        replace(dcp, name, optimizer_state.with_global_coordinator)
    with_translation()


class Finder:
    """Finds the modules of the table below `roots`, and says what to do about those that are not in it."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = roots

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        root = next((root for root in self._roots if name == root or name.startswith(f"{root}.")), None)
        if root is None or (name != root and not isinstance(sys.modules[root].__loader__, Loader)):
            return None
        packages = {".".join(parts[:count]) for each in NAMES for parts in [each.split(".")] for count in range(1, 9)}
        if name not in packages:
            raise ModuleNotFoundError(_advice(name), name=name)
        return importlib.machinery.ModuleSpec(name, Loader(), is_package=True)


class Loader(importlib.abc.Loader):
    """Makes a module of the table; its names are looked up when they are asked for."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # Python shows the file in what it says of a name that cannot be imported.
        module.__file__ = f"provided by Phalanx; {PAGE}"
        module.__dict__["__getattr__"] = _names_of(module.__name__)
        module.__dict__["__dir__"] = lambda: sorted(NAMES.get(module.__name__, {}))
        if module.__name__.endswith(".torch_smddp") and SMDDP not in _known_backends():
            backend.register(SMDDP)


def _known_backends() -> list[str]:
    return list(torch.distributed.Backend.backend_list)


def _names_of(module: str) -> Callable[[str], Any]:
    names = NAMES.get(module, {})

    def get(name: str) -> Any:
        if name in names:
            where, _, what = names[name].partition(":")
            return getattr(importlib.import_module(where), what)
        child = f"{module}.{name}"
        if any(each == child or each.startswith(f"{child}.") for each in NAMES):
            return importlib.import_module(child)
        if name.startswith("__"):
            raise AttributeError(name)
        raise (
            absent.missing_package_error(child) if child.startswith(tuple(WITHOUT)) else AttributeError(_advice(child))
        )

    return get


def _advice(name: str) -> str:
    for prefix, instead in {**INSTEAD, **WITHOUT}.items():
        if name == prefix or name.startswith(f"{prefix}."):
            return f"{name} is not provided by Phalanx: {instead}"
    return f"{name} is not provided by Phalanx; {PAGE}"
