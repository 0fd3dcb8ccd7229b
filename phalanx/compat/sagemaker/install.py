"""Makes `import torch.sagemaker` and the smddp backend resolve to Phalanx, by a finder of modules."""

import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import api as shard_api
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.checkpoint import optimizer as dcp_optimizer

from phalanx.api.fsdp.patches import patch_fsdp, replace
from phalanx.api.fsdp.session import find_placement
from phalanx.comm import backend
from phalanx.compat.sagemaker import loader, small
from phalanx.compat.sagemaker.small import with_translation
from phalanx.core.errors import ConfigError

SMDDP = "smddp"


def install() -> None:
    """Have scripts find the library's modules here, and PyTorch's functions take what it adds to them. Repeating it
    changes nothing. Nothing else changes before `tsm.init`."""
    if any(isinstance(each, Finder) for each in sys.meta_path):
        return
    sys.meta_path.insert(0, Finder(ROOTS))
    sys.meta_path.append(Finder(tuple(WITHOUT)))  # the last to be asked: for what is not installed
    without_flash_attention()
    patch_fsdp()
    replace(checkpoint_wrapper.OffloadWrapper, "__init__", small.wrap_init)
    replace(checkpoint_wrapper.OffloadWrapper, "forward", small.wrap_forward)
    for owner in (dcp_optimizer, dcp):
        replace(owner, "load_sharded_optimizer_state_dict", loader.with_process_group)
    replace(shard_api, "load_with_process_group", loader.with_sharded_tensors)
    for name in ("save_state_dict", "load_state_dict"):
        replace(dcp, name, loader.with_global_coordinator)
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
        raise (missing_package_error(child) if child.startswith(tuple(WITHOUT)) else AttributeError(_advice(child)))

    return get


def _advice(name: str) -> str:
    for prefix, instead in {**INSTEAD, **WITHOUT}.items():
        if name == prefix or name.startswith(f"{prefix}."):
            return f"{name} is not provided by Phalanx: {instead}"
    return f"{name} is not provided by Phalanx; {PAGE}"


# ------------------------------------------------------------- which name of which module of that library is what here
# A name that is not in the table is not provided.


_HERE = "phalanx.compat.sagemaker"
_DCP = "torch.sagemaker.distributed.checkpoint"

# Module -> name -> "module:name" of what it is, or the value itself where it is no text with a colon.
NAMES: dict[str, dict[str, str]] = {
    "torch.sagemaker": {
        "init": f"{_HERE}.start:init",
        "is_initialized": f"{_HERE}.start:is_initialized",
        "transform": f"{_HERE}.transforming:transform",
        "state": f"{_HERE}.start:STATE",
    },
    "torch.sagemaker.state_handler": {"state": f"{_HERE}.start:STATE"},
    "torch.sagemaker.logger": {"get_logger": f"{_HERE}.small:get_logger"},
    "torch.sagemaker.grad_norm": {"clip_grad_norm_": "phalanx.api.fsdp.clip_norm:clip_grad_norm_"},
    "torch.sagemaker.delayed_param": {"DelayedParamIniter": f"{_HERE}.transforming:DelayedParamIniter"},
    "torch.sagemaker.utils.module_utils": {
        "empty_module_params": f"{_HERE}.small:empty_module_params",
        "move_buffers_to_device": f"{_HERE}.small:move_buffers_to_device",
    },
    "torch.sagemaker.utils.process_group_utils": {"get_global_ranks": f"{_HERE}.small:get_global_ranks"},
    "torch.sagemaker.utils.utils": {"timeit": f"{_HERE}.small:timeit"},
    "torch.sagemaker.checkpoint.utils": {
        "limit_num_subdirs": f"{_HERE}.files:limit_num_subdirs",
        "SORT_BY_LAST_INT": f"{_HERE}.files:last_number",
    },
    "torch.sagemaker.checkpoint.constants": {
        "SMP_IS_LOAD_INFO_KEY": f"{_HERE}.files:SMP_IS_LOAD_INFO_KEY",
        "SMP_IS_PARTIAL_KEY": f"{_HERE}.files:SMP_IS_PARTIAL_KEY",
    },
    "torch.sagemaker.distributed.fsdp.checkpoint": {
        name: f"{_HERE}.fsdp_checkpoint:{name}"
        for name in (
            "save_model_checkpoint",
            "load_model_checkpoint",
            "EXPORT_KEY_MODEL",
            "EXPORT_KEY_OPTIMIZER",
            "EXPORT_KEY_SCHEDULER",
            "EXPORT_KEY_IDENTITY",
        )
    },
    f"{_DCP}.state_dict_saver": {
        "save": f"{_HERE}.saver:save",
        "async_save": f"{_HERE}.saver:async_save",
        "maybe_finalize_async_calls": f"{_HERE}.saver:maybe_finalize_async_calls",
        "PyTorchDistSaveShardedStrategy": f"{_HERE}.saver:PyTorchDistSaveShardedStrategy",
        "SaveShardedStrategy": f"{_HERE}.saver:SaveShardedStrategy",
        "AsyncCallsQueue": f"{_HERE}.saver:AsyncCallsQueue",
        "DEFAULT_ASYNC_REQUEST_QUEUE": f"{_HERE}.saver:DEFAULT_ASYNC_REQUEST_QUEUE",
    },
    f"{_DCP}.state_dict_loader": {"load": f"{_HERE}.loader:load"},
    f"{_DCP}.state_dict_utils": {
        "sm_state_dict_type": f"{_HERE}.loader:sm_state_dict_type",
        "SMStateDictType": f"{_HERE}.loader:SMStateDictType",
        "init_optim_state": f"{_HERE}.loader:init_optim_state",
        "compute_auto_checkpoint_interval": f"{_HERE}.saver:compute_auto_checkpoint_interval",
        "_Interval": f"{_HERE}.saver:Interval",
    },
    f"{_DCP}.filesystem": {
        "DistributedFileSystemReader": f"{_HERE}.files:DistributedFileSystemReader",
        "DistributedFileSystemWriter": f"{_HERE}.files:DistributedFileSystemWriter",
        "path_to_file_system": f"{_HERE}.files:path_to_file_system",
    },
    f"{_DCP}.async_utils": {
        "AsyncCallsQueue": f"{_HERE}.saver:AsyncCallsQueue",
        "DEFAULT_ASYNC_REQUEST_QUEUE": f"{_HERE}.saver:DEFAULT_ASYNC_REQUEST_QUEUE",
    },
    f"{_DCP}.s3_filesystem": {
        "S3FileSystem": f"{_HERE}.files:S3FileSystem",
        "is_s3_uri": f"{_HERE}.files:is_s3_uri",
        "format_s3_path": f"{_HERE}.files:format_s3_path",
        "retry_with_jitter": f"{_HERE}.files:retry_with_jitter",
    },
    "torch.sagemaker.moe.moe_config": {"MoEConfig": f"{_HERE}.moe:MoEConfig"},
    "torch.sagemaker.moe.moe_layer": {"MoELayer": f"{_HERE}.transforming:MoELayer"},
    "torch.sagemaker.context_parallel.utils": {
        "setup_transformer_engine_cp_groups": f"{_HERE}.transforming:setup_transformer_engine_cp_groups",
    },
    "torch.sagemaker.tensor_parallel.transformer": {
        "TransformerLMHead": f"{_HERE}.transforming:TransformerLMHead",
        "TransformerLayer": f"{_HERE}.transforming:TransformerLayer",
        "TETransformerLayer": f"{_HERE}.transforming:TransformerLayer",
    },
    "torch.sagemaker.nn.attn": {
        "FlashSelfAttention": f"{_HERE}.attention:FlashSelfAttention",
        "FlashGroupedQueryAttention": f"{_HERE}.attention:FlashGroupedQueryAttention",
    },
    "torch.sagemaker.nn.huggingface.llama_flashattn": {"LlamaFlashAttention": f"{_HERE}.llama:LlamaFlashAttention"},
    "smdistributed.dataparallel.torch.torch_smddp": {},  # importing it makes the backend known
    # Only where Transformer Engine itself is not installed.
    "transformer_engine": {},
    "transformer_engine.common.recipe": {
        name: f"{_HERE}.transformer_engine:{name}" for name in ("Format", "DelayedScaling")
    },
    "transformer_engine.pytorch": {
        name: f"{_HERE}.transformer_engine:{name}"
        for name in ("fp8_autocast", "checkpoint", "Linear", "LayerNorm", "RMSNorm", "LayerNormLinear", "LayerNormMLP")
    }
    | {name: f"{_HERE}.transformer_engine_attention:{name}" for name in ("MultiheadAttention", "TransformerLayer")},
}

# Modules of older versions: what to do instead.
INSTEAD = {
    "smdistributed.modelparallel": "version 1 of that library is different; start from a plain FSDP script",
    "smdistributed.dataparallel.torch.distributed": 'use torch.distributed with backend="smddp"',
    "smdistributed.dataparallel.torch.parallel": "use torch.nn.parallel.DistributedDataParallel",
}
# Packages that such scripts import besides, and that are not installed everywhere: what to do without.
WITHOUT = {
    "transformer_engine": "docs/migrating.md lists what is provided in its place; install it where more is needed",
}
ROOTS = ("torch.sagemaker", "smdistributed")
PAGE = "docs/migrating.md lists what is provided"


# -------------------------------------------------------------------------------------------------------------- absent
# What such scripts import besides, where it is not installed: Transformer Engine's names, and flash attention.
# Importing a name is no use of it: scripts import these at their top and use them where their arguments say so. What
# cannot be done without the package is refused when it is asked for.


logger = logging.getLogger("phalanx.sagemaker")
MODELS = "transformers.modeling_utils"


class NotInstalled(ConfigError, AttributeError):
    """A name of a package that is not installed: access raises an error that says so."""


def missing_package_error(name: str) -> NotInstalled:
    package = name.partition(".")[0]
    return NotInstalled(f"{name} is used, but {package} is not installed here; {WITHOUT[package]}")


# ------------------------------------------------------------------------------------------------------ flash attention


class AfterImport:
    """Finds the module of transformers that chooses how models attend, and changes that once it is imported: importing
    transformers takes seconds, which a script without it should not pay."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == MODELS else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def then_change(module: ModuleType) -> None:
            execute(module)
            _change(module)

        vars(spec.loader)["exec_module"] = then_change
        return spec


def without_flash_attention() -> None:
    """Have models of transformers that are asked for flash attention, where it is not installed, take PyTorch's."""
    if MODELS in sys.modules:
        _change(sys.modules[MODELS])
    else:
        sys.meta_path.insert(0, AfterImport())


def _change(models: ModuleType) -> None:
    replace(models.PreTrainedModel, "_check_and_adjust_attn_implementation", _or_pytorchs)


def _or_pytorchs(original: Callable[..., str]) -> Callable[..., str]:
    """transformers' own choice, but for what it would refuse since a package, or a GPU, is missing."""
    missing = (ImportError,) if torch.accelerator.is_available() else (ImportError, ValueError)

    def choose(self: Any, attn_implementation: str | None, *args: Any, **options: Any) -> str:
        try:
            return original(self, attn_implementation, *args, **options)
        except missing:
            if attn_implementation is None or not attn_implementation.startswith("flash_attention_"):
                raise
        instead = original(self, None, *args, **options)
        if (dist.get_rank() if dist.is_initialized() else find_placement().rank) == 0:
            logger.warning(
                "%s is not installed, or there is no GPU for it: %s computes attention with %s",
                attn_implementation, type(self).__name__, instead,
            )  # fmt: skip
        return instead

    return choose
