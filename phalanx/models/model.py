"""What the trainer asks of any model: its units in order of use, its blocks, and how its parameters start.

A model is plain PyTorch and knows nothing of ranks. `Model` is the base of a network of a user's own; `Architecture` of
those that are built from a ModelSpec and have a place in the world of Hugging Face.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from phalanx.core import renamed
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.counter_rng import derive_key, normal

InitRule = tuple[str, float] | tuple[str]  # ("normal", standard deviation), ("ones",) or ("zeros",)


class Model(nn.Module):
    """Base class of a custom task's network: an `nn.Module` that may say how it is sharded and initialized.

    It is built under `torch.device("meta")`, so a constructor must not read values; initial values are drawn as
    `start` says, each rank its own part. Buffers stay empty: compute constants in the forward pass. Dropout draws
    from the `CounterRNG` that the task hands on; without it a model computes as in evaluation, whatever
    `training` says.

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
            `("normal", standard deviation)`, `("ones",)` or `("zeros",)`. Default: ones for a one-dimensional
            `weight`, zeros for other vectors, else normal with 1 / sqrt(fan-in).
        """
        if len(shape) < 2:
            return ("ones",) if name.rpartition(".")[2] == "weight" else ("zeros",)
        return ("normal", 1.0 / math.sqrt(max(1, math.prod(shape[1:]))))


def default_init_rule(name: str, spec: ModelSpec) -> InitRule:
    """Ones for norms, zeros for biases, normal draws of `spec.init_std` for all else."""
    if "norm" in name and not name.endswith(".bias"):
        return ("ones",)
    return ("zeros",) if name.endswith(".bias") else ("normal", spec.init_std)


class Architecture(Model):
    """A model of the shape `spec`, which its constructor takes. `embed...`, `layers.{i}...` and `head...` are the names
    of its parameters, in order of use."""

    # Our name -> the name in a Hugging Face folder; {i} is the layer.
    hf_names: ClassVar[dict[str, str]] = {}
    # Keys of config.json that replace those of the built-in architecture or are added to them, such as "architectures".
    hf_config: ClassVar[dict[str, Any]] = {}
    # (parameter's name, spec) -> how it starts.
    initial: ClassVar[Callable[[str, ModelSpec], InitRule]] = staticmethod(default_init_rule)

    # Beginnings of our names of parameters that a Hugging Face folder may lack: they are drawn then.
    may_draw: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def other_hf_names(theirs: str) -> Sequence[str]:
        """Under which names a Hugging Face folder may hold the tensor `theirs`, too."""
        return ()

    @staticmethod
    def ignores_hf_name(theirs: str) -> bool:
        """Whether a Hugging Face folder may hold a tensor that this model has no use for."""
        return False

    @staticmethod
    def register() -> None:
        """Make transformers know a class of one's own, so that it can load what was exported; nothing to do here."""

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
    """An architecture that can be divided over ranks: into stages of layers, and by its family's `tensor_plan` into
    slices of matrices. Its forward takes `stage` and `hidden` as that of `Llama` does."""

    embed: nn.Embedding
    layers: nn.ModuleList

    def keep_stages(self, stages: Sequence[range]) -> None:
        """Let go of all layers but these, of the embedding unless the first is among them, and of the head unless the
        last is; a tied head keeps the embedding. What is left is named as in the whole model."""
        numbers = [number for number in range(self.spec.layers) if any(number in stage for stage in stages)]
        kept = nn.ModuleList()
        for number in numbers:
            kept.add_module(str(number), self.layers[number])
        self.layers = kept
        has_head = self.spec.layers - 1 in numbers
        if 0 not in numbers and not (has_head and self.spec.tie_embeddings):
            del self.embed
        if not has_head:
            del self.head


def draw_init_slice(
    rule: InitRule, seed: int, name: str, first: int, last: int, device: torch.device | str, dtype: torch.dtype
) -> Tensor:
    """Initial values of elements [first, last) of the flattened parameter `name`, 1-D; the same however it is cut.

    Raises ValueError where a class of one's own names a start that there is not.
    """
    match rule:
        case ("normal", float(std)):
            wide = torch.promote_types(dtype, torch.float32)
            return normal(derive_key(seed, name), first, last, device=device, dtype=wide).mul_(std).to(dtype)
        case ("ones",):
            return torch.ones(last - first, device=device, dtype=dtype)
        case ("zeros",):
            return torch.zeros(last - first, device=device, dtype=dtype)
        case other:
            raise ValueError(f'{name} starts as {other!r}, which is none of ("normal", std), ("ones",), ("zeros",)')


__getattr__ = renamed.old_names(__name__)
