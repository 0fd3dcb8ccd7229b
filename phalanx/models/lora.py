"""LoRA: low-rank adapters with frozen weights (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021).

A chosen matrix W (out, in) computes x W^T + alpha / rank * dropout(x) A^T B^T, where only A (rank, in) and B (out,
rank) are trained. They are parameters `lora_a` and `lora_b` of the matrix's module; other parameters keep their names
and are frozen. Stacks of experts have an A and a B for each expert (moe.py).
"""

import hashlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import ADAPTED_MODULES, EXPERT_TARGETS, LoraSpec
from phalanx.models.counter_rng import CounterRNG, derive_key, uniform
from phalanx.models.layers import Linear

# Dropout sites of adapters, distinct from those of blocks, which count from 0 to twice the layers.
_FIRST_SITE = 1 << 20


class LoraLinear(Linear):
    """A linear layer with a LoRA adapter; `number` distinguishes its dropout from others in the
    block, and is below 16, as blocks have two sites."""

    def __init__(self, like: nn.Linear, lora: LoraSpec, number: int) -> None:
        """Create the layer with the shape, device and dtype of `like`, without its values."""
        device, dtype = like.weight.device, like.weight.dtype
        super().__init__(like.in_features, like.out_features, like.bias is not None, device, dtype)
        self.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.empty(lora.rank, like.in_features, device=device, dtype=dtype))
        self.lora_b = nn.Parameter(torch.empty(like.out_features, lora.rank, device=device, dtype=dtype))
        self.scale, self.dropout, self.number = lora.scale, lora.dropout, number

    def forward(self, x: Tensor, draws: CounterRNG | None = None, site: Tensor | None = None) -> Tensor:
        """x (B, S, in) -> (B, S, out). With `draws`, `site` is the 0-dim number of the block's first dropout."""
        base = self.multiply(x, self.weight, self.bias)
        if draws is not None and site is not None:
            x = draws.dropout(x, site * 8 + (_FIRST_SITE + self.number), self.dropout)
        # Scale the narrow side: rank instead of `out` products per token.
        return base + F.linear(F.linear(x, self.lora_a) * self.scale, self.lora_b)


def apply_lora(model: nn.Module, lora: LoraSpec) -> None:
    """Apply LoRA: add adapters to the chosen matrices of each block of `model` (on meta), and freeze all other
    parameters.

    Raises ConfigError where the blocks of a custom model lack a chosen matrix, or do not pass on `draws` of dropout.
    """
    blocks = model.get_submodule("layers")
    assert isinstance(blocks, nn.ModuleList)
    model.requires_grad_(False)
    for index, block in enumerate(blocks):
        for number, (target, path) in enumerate(ADAPTED_MODULES.items()):
            if target not in lora.targets:
                continue
            found = dict(block.named_modules()).get(path)
            if not isinstance(found, nn.Linear):
                raise ConfigError(
                    f"model.lora.targets names {target}, but layers.{index} of the model has no linear layer {path}; "
                    "choose targets that it has"
                )
            block.set_submodule(path, LoraLinear(found, lora, number))
        for target in sorted(set(EXPERT_TARGETS) & set(lora.targets)):
            module, _, stack = target.partition(".")
            add_adapter = getattr(dict(block.named_modules()).get(f"mlp.{module}"), "add_adapter", None)
            if add_adapter is None:
                raise ConfigError(
                    f"model.lora.targets names {target}, but layers.{index} of the model has no experts; choose "
                    "targets that it has"
                )
            add_adapter(stack, lora)
    if lora.dropout > 0.0:
        _check_draws(model)


class _IdleRNG(CounterRNG):
    """Draws that drop nothing: of these it is only seen where they arrive, and on meta each operation takes long."""

    def dropout(self, x: Tensor, site: int | Tensor, p: float) -> Tensor:
        return x


def _check_draws(model: nn.Module) -> None:
    """Raises ConfigError unless `draws` reach each adapter, so that dropout is never skipped silently."""
    missing = {name for name, module in model.named_modules() if isinstance(module, LoraLinear)}

    def note(module: nn.Module, inputs: tuple[object, ...], named: dict[str, object]) -> None:
        if any(isinstance(value, CounterRNG) for value in (*inputs, *named.values())):
            missing.discard(names[module])

    names = {module: name for name, module in model.named_modules()}
    hooks = [model.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True) for name in missing]
    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    try:
        model(tokens, tokens, _IdleRNG(0, 0, torch.zeros(1, dtype=torch.int64, device="meta")))
    except TypeError as error:
        raise ConfigError(
            "model.lora.dropout needs a block that passes `draws` and `site` on to its attention, its MLP and their "
            f"linear layers, which the custom block does not ({error}); set model.lora.dropout to 0, or fix the block"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    if missing:
        raise ConfigError(
            f"model.lora.dropout does not reach {len(missing)} of the adapters: {min(missing)} does not get "
            "`draws`; set model.lora.dropout to 0, or fix the block"
        )


def is_adapter(name: str) -> bool:
    """Whether the parameter `name` is of an adapter."""
    return name.endswith((".lora_a", ".lora_b"))


def adapter_names(lora: LoraSpec, layers: int) -> Iterator[tuple[str, str, str]]:
    """(matrix, A, B): the names of each adapted matrix and of its adapter, layer by layer."""
    for index in range(layers):
        for target in lora.targets:
            matrix = f"layers.{index}.mlp.{target}"
            module = f"{matrix}_adapter"
            if target in ADAPTED_MODULES:
                module = f"layers.{index}.{ADAPTED_MODULES[target]}"
                matrix = f"{module}.weight"
            yield matrix, f"{module}.lora_a", f"{module}.lora_b"


def adapter_shapes(shape: tuple[int, ...], rank: int, transposed: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of A and B of a matrix (out, in) or a stack (E, out, in), or `transposed` (E, in, out)."""
    *experts, out, into = shape
    if experts and transposed:
        out, into = into, out
    return (*experts, rank, into), (*experts, out, rank)


def init_adapter_slice(
    seed: int, name: str, start: int, stop: int, shape: tuple[int, ...], device: torch.device | str, dtype: torch.dtype
) -> Tensor:
    """Initial values of elements [start, stop) of the flattened adapter parameter `name` of `shape`, 1-D.

    A is uniform in +-1 / sqrt(in), as in PEFT, by coordinates; B is zero, so that a new adapter has no effect.
    """
    if name.endswith(".lora_b"):
        return torch.zeros(stop - start, device=device, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    values = uniform(derive_key(seed, name), start, stop, device=device, dtype=wide)
    return values.mul_(2.0).sub_(1.0).mul_(shape[-1] ** -0.5).to(dtype)


def merge_adapter(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float, transposed: bool = False) -> Tensor:
    """weight + scale * B A, computed in float32 (float64 where any of them is) and returned so; `transposed`: a stack
    is (E, in, out)."""
    wide = torch.promote_types(torch.promote_types(weight.dtype, lora_a.dtype), torch.float32)
    if weight.dim() == 3:
        right, left = (each.to(wide) for each in (lora_a, lora_b))
        if transposed:
            left, right = right.transpose(1, 2), left.transpose(1, 2)
        return torch.baddbmm(weight.to(wide), left, right, alpha=scale)
    return torch.addmm(weight.to(wide), lora_b.to(wide), lora_a.to(wide), alpha=scale)


def fingerprint_weights(read: Callable[[str, int, int], Tensor], shapes: dict[str, tuple[int, ...]]) -> str:
    """A checksum of a model's frozen weights, from a sample of their elements.

    Of every parameter it takes the shape, the stored dtype, and 64 elements at the start, in the middle and at the end.
    `read(name, start, stop)` gives elements of a flattened parameter.
    """
    digest = hashlib.sha256()
    for name, shape in shapes.items():
        count = 1
        for size in shape:
            count *= size
        digest.update(repr((name, tuple(shape))).encode())
        for start in (0, count // 2, max(0, count - 64)):
            part = read(name, start, min(start + 64, count))
            digest.update(repr(part.dtype).encode())
            digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
