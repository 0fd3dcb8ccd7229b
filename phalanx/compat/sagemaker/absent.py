"""What such scripts import besides, where it is not installed: Transformer Engine's names, and flash attention.

Importing a name is no use of it: scripts import these at their top and use them where their arguments say so. What
cannot be done without the package is refused when it is asked for.
"""

import contextlib
import enum
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from phalanx.api.fsdp.patches import replace
from phalanx.api.fsdp.session import find_placement
from phalanx.compat.sagemaker.names import WITHOUT
from phalanx.core.errors import ConfigError

logger = logging.getLogger("phalanx.sagemaker")
MODELS = "transformers.modeling_utils"


class Format(enum.Enum):
    """Transformer Engine's formats of eight bits: forward and backward the same, or one each."""

    E4M3 = enum.auto()
    E5M2 = enum.auto()
    HYBRID = enum.auto()


class DelayedScaling(SimpleNamespace):
    """Settings for `fp8_autocast`, kept as they are given."""


class NotInstalled(ConfigError, AttributeError):
    """A name of a package that is not installed: there is no such attribute, and one sentence says why."""


def missing_package_error(name: str) -> NotInstalled:
    package = name.partition(".")[0]
    return NotInstalled(f"{name} is used, but {package} is not installed here; {WITHOUT[package]}")


class _Layer:
    """A layer of Transformer Engine, for libraries that look whether a module is one, such as peft: none is."""

    def __init__(self, *args: Any, **options: Any) -> None:
        raise missing_package_error(f"transformer_engine.pytorch.{type(self).__name__}")


class Linear(_Layer):
    pass


class LayerNormLinear(_Layer):
    pass


class LayerNormMLP(_Layer):
    pass


@contextlib.contextmanager
def _as_it_is() -> Iterator[None]:
    yield


def fp8_autocast(enabled: bool = True, **options: Any) -> contextlib.AbstractContextManager[None]:
    """A block without FP8. Raises ConfigError where it is to be `enabled`."""
    if enabled:
        raise missing_package_error("transformer_engine.pytorch.fp8_autocast(enabled=True)")
    return _as_it_is()


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
                "%s is not installed here, or there is no GPU for it: %s attends by %s",
                attn_implementation, type(self).__name__, instead,
            )  # fmt: skip
        return instead

    return choose
