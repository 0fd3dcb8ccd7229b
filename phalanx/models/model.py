"""Base classes of models: units in order of use, blocks, and initialization of parameters.

A model is plain PyTorch and independent of ranks. `Model` is the base class of custom networks; `Architecture` that of
models built from a ModelSpec, which Hugging Face folders can hold.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from phalanx.core import renamed
from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.counter_rng import derive_key, normal

# ("normal", standard deviation), ("ones",), ("zeros",), or ("read", read) of a function: see Model.start
InitRule = tuple[str, float | Callable[[int, int], Tensor]] | tuple[str]


class Model(nn.Module):
    """Base class of a custom task's network: an `nn.Module` that may say how it is sharded and initialized.

    It is built under `torch.device("meta")`, so a constructor must not read values; initial values are drawn as
    `start` says, each rank its own part. Buffers hold what `constant` returns. Dropout draws from the `CounterRNG` that
    the task hands on; without it a model computes as in evaluation, batch norm too, whatever `training` says.

    Examples:
        >>> class Net(phalanx.Model):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(2))
        ...         self.head = torch.nn.Linear(3, 1)
        ...     def forward(self, x):
        ...         for layer in self.layers:
        ...             x = layer(x).tanh()
        ...         return self.head(x)
        >>> [name for name, _ in Net().units()]
        ['layers.0', 'layers.1', 'head']
    """

    def units(self) -> list[tuple[str, nn.Module]]:
        """List the modules that are sharded and gathered as one, by name, in order of use.

        Each is called once in a pass. Other parameters stay whole from their first use to the end of the step.

        Returns:
            Names and modules. Default: the direct submodules with parameters; of a `ModuleList` or `Sequential` its
            members.
        """
        found: list[tuple[str, nn.Module]] = []
        for name, child in self.named_children():
            listed = isinstance(child, nn.ModuleList | nn.Sequential)
            members = [(f"{name}.{index}", member) for index, member in child.named_children()] if listed else []
            found += members or [(name, child)]
        return [(name, unit) for name, unit in found if next(unit.parameters(), None) is not None]

    def blocks(self) -> list[nn.Module]:
        """List the units that are repeated: they are compiled, and recomputed by activation checkpointing.

        Returns:
            Modules. Default: the members of `ModuleList`.
        """
        inside = {id(m) for child in self.children() if isinstance(child, nn.ModuleList) for m in child}
        return [unit for _, unit in self.units() if id(unit) in inside]

    def shared_units(self) -> tuple[str, ...]:
        """List the units with parameters that another unit uses, too, such as a tied embedding, by name."""
        return ()

    def losses(self) -> list[Any]:
        """List the modules whose attribute `cross_entropy_sum` may be replaced by a faster implementation."""
        return []

    def start(self, name: str, shape: tuple[int, ...]) -> InitRule:
        """Return how a parameter is initialized.

        Args:
            name: The parameter's name in the model.
            shape: Its whole shape.

        Returns:
            `("normal", standard deviation)`, `("ones",)`, `("zeros",)`, or `("read", read)`, where
            `read(first, last)` gives these elements of the flattened parameter, such as pre-trained ones. Default:
            ones for a one-dimensional `weight`, zeros for other vectors, else normal with 1 / sqrt(fan-in).
        """
        if len(shape) < 2:
            return ("ones",) if name.rpartition(".")[2] == "weight" else ("zeros",)
        return ("normal", 1.0 / math.sqrt(max(1, math.prod(shape[1:]))))

    def constant(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the values of a buffer, such as a table of positions, which nothing may change afterwards.

        Args:
            name: The buffer's name in the model.
            shape: Its shape.

        Raises:
            errors.ConfigError: the network has a buffer and does not override this method.
        """
        raise ConfigError(f"the network has the buffer {name}; override the method constant, which returns its values")


def default_init_rule(name: str, spec: ModelSpec) -> InitRule:
    """Ones for norms, zeros for biases, normal draws of `spec.init_std` for all else."""
    if "norm" in name and not name.endswith(".bias"):
        return ("ones",)
    return ("zeros",) if name.endswith(".bias") else ("normal", spec.init_std)


class Architecture(Model):
    """An architecture: a model built from a ModelSpec `spec`. Its parameters are named `embed...`, `layers.{i}...` and
    `head...`, in order of use."""

    # Our name -> the name in a Hugging Face folder; {i} is the layer.
    hf_names: ClassVar[dict[str, str]] = {}
    # Our name of a parameter that stacks matrices of experts -> names there, in order; {e} is the expert.
    hf_stacks: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    # Fused queries, keys and values are ordered by key head, else one after another.
    hf_grouped: ClassVar[bool] = False
    # Suffixes of our names of matrices that are stored (in, out) there.
    hf_transposed: ClassVar[tuple[str, ...]] = ()
    # Suffixes of names there that are stored in float32 at least.
    hf_wide: ClassVar[tuple[str, ...]] = ()
    # Suffix of a tensor there in each layer behind the last that predicts further tokens, which is not read.
    hf_ahead: ClassVar[str] = ""
    # Keys of config.json that replace or extend those of the built-in architecture, such as "architectures".
    hf_config: ClassVar[dict[str, Any]] = {}
    # (parameter's name, spec) -> its initialization rule.
    initial: ClassVar[Callable[[str, ModelSpec], InitRule]] = staticmethod(default_init_rule)

    # Prefixes of our names of parameters that a Hugging Face folder may lack; they are drawn then.
    may_draw: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def other_hf_names(theirs: str) -> Sequence[str]:
        """Alternative names of the tensor `theirs` in a Hugging Face folder."""
        return ()

    @staticmethod
    def ignores_hf_name(theirs: str) -> bool:
        """Whether a tensor of a Hugging Face folder is ignored by this model."""
        return False

    @staticmethod
    def register() -> None:
        """Register a custom class with transformers, so that it can load an export; does nothing by default."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec

    def units(self) -> list[tuple[str, nn.Module]]:
        layers = self.get_submodule("layers")
        blocks = [(f"layers.{index}", block) for index, block in layers.named_children()]
        return [("embed", self.get_submodule("embed")), *blocks, ("head", self.get_submodule("head"))]

    def shared_units(self) -> tuple[str, ...]:
        return ("embed",) if self.spec.tie_embeddings else ()

    def start(self, name: str, shape: tuple[int, ...]) -> InitRule:
        return type(self).initial(name, self.spec)


class StagedArchitecture(Architecture):
    """An architecture that supports pipeline parallelism (stages of layers) and tensor parallelism (by its family's
    `tensor_plan`). Its forward takes `stage` and `hidden` as that of `Llama` does."""

    embed: nn.Embedding
    layers: nn.ModuleList

    def keep_stages(self, stages: Sequence[range]) -> None:
        """Keep these pipeline stages: remove other layers, the embedding unless the first layer stays, and the head
        unless the last does; a tied head keeps the embedding. Parameters keep their names."""
        numbers = [number for number in range(self.spec.layers) if any(number in stage for stage in stages)]
        kept = nn.ModuleList()
        for number in numbers:
            kept.add_module(str(number), self.layers[number])
        self.layers = kept
        has_head = self.spec.layers - 1 in numbers
        if 0 not in numbers:
            if has_head and self.spec.tie_embeddings:
                for name in ("positions", "project"):  # the head uses only the table of tokens
                    self.embed._modules.pop(name, None)
            else:
                del self.embed
        if not has_head:
            del self.head


def draw_init_slice(
    rule: InitRule, seed: int, name: str, first: int, last: int, device: torch.device | str, dtype: torch.dtype
) -> Tensor:
    """Initial values of elements [first, last) of the flattened parameter `name`, 1-D; the same however it is cut.

    Raises ValueError where a custom class returns an unknown rule.
    """
    match rule:
        case ("normal", float(std)):
            wide = torch.promote_types(dtype, torch.float32)
            return normal(derive_key(seed, name), first, last, device=device, dtype=wide).mul_(std).to(dtype)
        case ("read", read) if callable(read):
            return read(first, last).to(device, dtype)
        case ("ones",):
            return torch.ones(last - first, device=device, dtype=dtype)
        case ("zeros",):
            return torch.zeros(last - first, device=device, dtype=dtype)
        case other:
            raise ValueError(
                f'{name} is initialized as {other!r}, which is none of ("normal", std), ("ones",), ("zeros",), '
                '("read", read)'
            )


__getattr__ = renamed.old_names(__name__)
