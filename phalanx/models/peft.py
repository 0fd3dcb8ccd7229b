"""Read and write adapters in the format of Hugging Face's PEFT: adapter_config.json and adapter_model.safetensors.

The library itself is not needed. Unsupported features of an adapter are refused by name.

Where a folder holds several of our matrices in one tensor (queries, keys and values of Phi-3), PEFT has one adapter for
all of them: our n adapters of rank r are one of rank n r there, whose B is zero outside of each part's rows and
columns. An adapter of rank r that PEFT has trained is read as n adapters with the same A.
"""

import contextlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import ADAPTED_MODULES, EXPERT_TARGETS, LoraSpec
from phalanx.models.hf_layout import Place
from phalanx.models.lora import adapter_names
from phalanx.models.peft_experts import (
    KEY,
    join_experts,
    name_wrapper,
    read_expert_targets,
    split_experts,
    write_expert_targets,
)

CONFIG, WEIGHTS, WEIGHTS_BIN = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
BASE = "base_sha256"  # a key of the safetensors metadata
_MAX_RANK = 2**20
# The prefix of an adapter's tensor names before the model's names.
_PREFIX = "base_model.model."
_STORED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Keys that do not affect the output of a trained adapter, or that are read below.
_HARMLESS = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha",
    "lora_dropout", "megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r",
    "rank_pattern", "revision", "runtime_config", "target_modules", KEY, "task_type", "use_rslora",
}  # fmt: skip
# Values of `init_lora_weights` that leave the base weights unchanged; others modify them.
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal")

HfName = Callable[[str], str]  # our parameter's name -> the name in a Hugging Face folder


class Adapter:
    """A PEFT adapter in a folder, by our names: `lora` is its shape, `read` reads elements of its tensors.

    `layers` is the number of blocks of its model, `hf_name` maps that model's names, and `places` has its matrices that
    share a tensor of the folder with others, or are transposed there. Raises ConfigError where the folder is no
    adapter, or one with unsupported features.
    """

    def __init__(self, folder: Path, layers: int, hf_name: HfName, places: Mapping[str, Place] | None = None) -> None:
        self.folder = Path(folder)
        config = _read_config(self.folder, _is_transposed(places or {}))
        self._tensors, about = _open(self.folder)
        self.base: str | None = about.get(BASE)  # the fingerprint of its base weights, if known
        self._names: dict[str, str] = {}  # ours -> theirs
        self._parts: dict[str, Tensor] = {}  # ours, of matrices that share a tensor with others
        self.lora = self._shape(config, layers, hf_name, places or {})

    def _shape(self, config: dict[str, Any], layers: int, hf_name: HfName, places: Mapping[str, Place]) -> LoraSpec:
        where = self.folder / CONFIG
        rank, alpha, dropout = (_number(config, name, where) for name in ("r", "lora_alpha", "lora_dropout"))
        if rank != int(rank) or not 1 <= rank <= _MAX_RANK:
            raise ConfigError(f"{where} sets r to {rank}, which is no valid rank; fetch the adapter again")
        if alpha <= 0 or not 0 <= dropout < 1:
            raise ConfigError(
                f"{where} sets lora_alpha to {alpha} and lora_dropout to {dropout}; the first must be above 0, the "
                "second a probability below 1"
            )
        if config.get("use_rslora"):
            alpha *= math.sqrt(rank)  # scaled by alpha / sqrt(rank)
        found = {
            target
            for index in range(layers)
            for target in _known_targets(hf_name)
            if f"{_PREFIX}{_matrix(hf_name, index, target)}.lora_A.weight" in self._tensors
        }
        self._check_patterns(config, int(rank), layers, hf_name, places)
        experts = read_expert_targets(config)
        if experts is None or (experts and (config.get("rank_pattern") or config.get("alpha_pattern"))):
            raise _refusal(where, KEY, config.get(KEY), write_expert_targets(EXPERT_TARGETS) if experts is None else [])
        lora = LoraSpec(rank=int(rank), alpha=alpha, dropout=dropout, targets=_ordered(found))
        for matrix, a, b in adapter_names(lora, layers):
            module = _PREFIX + hf_name(matrix).removesuffix(".weight")
            self._names |= {a: f"{module}.lora_A.weight", b: f"{module}.lora_B.weight"}
        used = self._split(lora, layers, places)
        stacks = replace(lora, targets=_ordered(experts))
        for a, b, module in _expert_wrappers(stacks, layers, hf_name):
            self._names |= {a: f"{module}.lora_A.weight", b: f"{module}.lora_B.weight"}
        lora = replace(lora, targets=_ordered(used | experts))
        weights = f"the weights in {self.folder}"
        missing = [name for name in self._names.values() if name not in self._tensors]
        if missing:
            raise ConfigError(
                f"{weights} lack {missing[0]}, but adapters must be the same in all {layers} layers; use one that "
                "was trained so, for a model of that depth"
            )
        extra = sorted(set(self._tensors) - set(self._names.values()))
        if extra:
            raise ConfigError(
                f"{weights} hold {extra[0]}, but only adapters of the matrices {', '.join(ADAPTED_MODULES)} of this "
                f"model's {layers} layers can be trained here; use an adapter of these alone"
            )
        if not self._names:
            raise ConfigError(f"{weights} contain no adapter; fetch the folder's files again")
        for a, b, module in _expert_wrappers(stacks, layers, hf_name):
            split = split_experts(self._tensors[self._names[a]], self._tensors[self._names[b]], lora.rank)
            if split is None:
                raise ConfigError(
                    f"{weights} hold {module}.lora_A and lora_B of shapes that are of no whole number of experts of "
                    f"rank {lora.rank}; fetch the folder's files again"
                )
            self._parts |= dict(zip((a, b), split, strict=True))
        return lora

    def _check_patterns(
        self, config: dict[str, Any], rank: int, layers: int, hf_name: HfName, places: Mapping[str, Place]
    ) -> None:
        """Raises ConfigError where modules have separate ranks or scales, but for those that hold several matrices,
        whose rank and alpha may both be as many times those of one."""
        plain = {"rank_pattern": float(rank), "alpha_pattern": float(config["lora_alpha"])}
        given = {key: config.get(key) or {} for key in plain}
        for key, patterns in given.items():
            # PEFT takes any regular expression; it is names that it writes.
            named = isinstance(patterns, dict) and all(re.fullmatch(r"[\w.]+", end) for end in patterns)
            if not named or (patterns and config.get("use_rslora")):
                raise _refusal(self.folder / CONFIG, key, patterns, {})
        for index, target in itertools.product(range(layers if any(given.values()) else 0), _known_targets(hf_name)):
            module = f".{_matrix(hf_name, index, target)}"
            count = _count_parts(f"layers.{index}.{ADAPTED_MODULES[target]}.weight", places)
            own = [
                next((number for end, number in given[key].items() if module.endswith(f".{end}")), value)
                for key, value in plain.items()
            ]
            if own not in (list(plain.values()), [count * value for value in plain.values()]):
                key = next((key for key, value in plain.items() if given[key]))
                raise _refusal(self.folder / CONFIG, key, given[key], {})

    def _split(self, lora: LoraSpec, layers: int, places: Mapping[str, Place]) -> set[str]:
        """Cut the adapters of tensors that hold several matrices into ours; returns the targets that have one."""
        used = set()
        for matrix, a, b in adapter_names(lora, layers):
            target = matrix.split(".")[-2]
            theirs_a, theirs_b = (self._tensors.get(self._names[name]) for name in (a, b))
            if matrix not in places or theirs_a is None or theirs_b is None:
                used.add(target)
                continue
            place, count, rank = places[matrix], _count_parts(matrix, places), len(theirs_a)
            rows = place.whole[0]
            if theirs_b.shape != (rows, rank) or rank not in (lora.rank, lora.rank * count):
                raise ConfigError(
                    f"{self._names[b]} in {self.folder} has the shape {tuple(theirs_b.shape)}, but r and the model of "
                    f"model.from_hf make it ({rows}, {lora.rank}) or ({rows}, {lora.rank * count}); use an adapter "
                    "that was trained for this model"
                )
            own_b = _find_rows(place, theirs_b)
            if rank == lora.rank:
                self._parts |= {a: theirs_a, b: own_b}
                used.add(target)
                continue
            start = lora.rank * _number_in(matrix, places)
            ours = slice(start, start + lora.rank)
            if bool(own_b[:, :start].any()) or bool(own_b[:, start + lora.rank :].any()):
                raise ConfigError(
                    f"{self._names[b]} in {self.folder} is of one adapter of rank {rank} for matrices that are trained "
                    f"apart here with rank {lora.rank}; use an adapter of the same rank for all modules"
                )
            self._parts |= {a: theirs_a[ours], b: own_b[:, ours]}
            if bool(theirs_a[ours].any()) or bool(own_b[:, ours].any()):
                used.add(target)
        for name in [name for name in self._parts if name.split(".")[-2] not in used]:
            del self._parts[name], self._names[name]
        return used

    def check_shapes(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Check that its tensors have the `shapes` (by our names) of the model. Raises ConfigError."""
        for name, theirs in self._names.items():
            held = self._parts.get(name, self._tensors[theirs])
            if tuple(held.shape) != shapes[name]:
                raise ConfigError(
                    f"{theirs} in {self.folder} has the shape {tuple(held.shape)}, but r and the "
                    f"model of model.from_hf make it {shapes[name]}; use an adapter that was trained for this model"
                )

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Read elements [start, stop) of our flattened parameter `name`, 1-D, in the stored dtype."""
        return self._parts.get(name, self._tensors[self._names[name]]).reshape(-1)[start:stop]


def _sharing(matrix: str, places: Mapping[str, Place]) -> list[str]:
    """The matrices in the tensor of `matrix`, in the order of their adapters there."""
    name = places[matrix].name
    return [each for each, place in places.items() if place.name == name]


def _count_parts(matrix: str, places: Mapping[str, Place]) -> int:
    return len(_sharing(matrix, places)) if matrix in places else 1


def _number_in(matrix: str, places: Mapping[str, Place]) -> int:
    return _sharing(matrix, places).index(matrix)


def _find_rows(place: Place, lora_b: Tensor) -> Tensor:
    """The rows of a matrix in the B (rows of the tensor, rank) of all that is in its tensor: a copy."""
    return replace(place, transposed=False).find_in(lora_b).reshape(place.shape[0], -1)


def _is_transposed(places: Mapping[str, Place]) -> bool:
    return any(place.transposed for place in places.values())


def _ordered(targets: set[str]) -> tuple[str, ...]:
    return tuple(target for target in (*ADAPTED_MODULES, *EXPERT_TARGETS) if target in targets)


def _expert_wrappers(lora: LoraSpec, layers: int, hf_name: HfName) -> Iterator[tuple[str, str, str]]:
    """(A, B, the module that PEFT wraps their stack by), layer by layer; of no other adapters."""
    targets = [target for target in lora.targets if target in EXPERT_TARGETS]
    names = adapter_names(replace(lora, targets=tuple(targets)), layers)
    for (_, a, b), (index, target) in zip(names, itertools.product(range(layers), targets), strict=True):
        yield a, b, _PREFIX + name_wrapper(hf_name, index, target, targets)


def _known_targets(hf_name: HfName) -> list[str]:
    """The targets that the model has, by its names: one without a gated MLP lacks the gate."""
    found = []
    for target in ADAPTED_MODULES:
        with contextlib.suppress(ConfigError):
            _matrix(hf_name, 0, target)
            found.append(target)
    return found


def _matrix(hf_name: HfName, index: int, target: str) -> str:
    """The module name in a Hugging Face model of the matrix `target` of layer `index`."""
    return hf_name(f"layers.{index}.{ADAPTED_MODULES[target]}.weight").removesuffix(".weight")


def _read_config(folder: Path, transposed: bool) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); name a folder that PEFT saved") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); fetch the file again") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no JSON object; fetch the file again")
    expected = {
        "peft_type": ("LORA",),
        "task_type": (None, "CAUSAL_LM"),
        "bias": (None, "none"),
        "init_lora_weights": _PLAIN_STARTS,
        "fan_in_fan_out": (None, False, True) if transposed else (None, False),
    }
    for key, values in expected.items():
        if not any(config.get(key) is value or config.get(key) == value for value in values):
            raise _refusal(path, key, config.get(key), values[-1])
    for key, value in config.items():
        # An unknown key may change the output, unless it is off.
        if key not in _HARMLESS and key not in expected and value not in (None, False, {}, []):
            raise _refusal(path, key, value, None)
    return config


def _refusal(path: Path, key: str, value: Any, instead: Any) -> ConfigError:
    return ConfigError(
        f"{path} sets {key}: {json.dumps(value)}, which is not supported and would change the model's output; use an "
        f"adapter with {key}: {json.dumps(instead)}"
    )


def _number(config: dict[str, Any], name: str, where: Path) -> float:
    value = config.get(name, 0.0 if name == "lora_dropout" else None)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{where} has {name}: {json.dumps(value)}, which is not a number; fetch the file again")
    return value


def _open(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors of an adapter, and the file's metadata."""
    path, about = folder / WEIGHTS, dict[str, str]()
    try:
        if path.is_file():
            with safe_open(path, framework="pt", device="cpu") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
                about = file.metadata() or about
        else:
            path = folder / WEIGHTS_BIN
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} has neither {WEIGHTS} nor {WEIGHTS_BIN}; name a folder that PEFT saved") from error
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); fetch the file again") from error
    except Exception as error:  # torch may raise anything for a damaged or malicious .bin
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"{path} cannot be read as plain weights ({reason}); fetch the file again") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ConfigError(f"{path} contains other objects than tensors; fetch the file again")
    for name, tensor in tensors.items():
        if tensor.dtype not in _STORED:
            raise ConfigError(
                f"{path} stores {name} as {tensor.dtype}, which cannot be trained; use an unquantised one"
            )
    return tensors, about


def save_adapter(
    folder: Path, lora: LoraSpec, layers: int, tensor_of: Callable[[str], Tensor], dtype: torch.dtype, hf_name: HfName,
    base: tuple[str, str | None], base_sha256: str | None, places: Mapping[str, Place] | None = None,
) -> None:  # fmt: skip
    """Write a PEFT adapter into an existing folder, for the model `base` (a folder or a name, and its revision) with
    the weights' fingerprint `base_sha256` (None: unknown). `places` has its matrices that share a tensor of the folder
    with others, or are transposed there.

    `tensor_of(our_name)` returns a parameter in its shape, in any dtype and on any device; it is stored in `dtype`.
    """
    tensors: dict[str, Tensor] = {}
    places, ranks = places or {}, dict[str, int]()
    for a, b, module in _expert_wrappers(lora, layers, hf_name):
        joined = join_experts(*(tensor_of(name).detach().to("cpu", dtype, copy=True) for name in (a, b)))
        tensors |= {f"{module}.lora_{kind}.weight": each for kind, each in zip("AB", joined, strict=True)}
    experts = write_expert_targets(lora.targets)
    lora = replace(lora, targets=tuple(target for target in lora.targets if target in ADAPTED_MODULES))
    for matrix, a, b in adapter_names(lora, layers):
        module = _PREFIX + hf_name(matrix).removesuffix(".weight")
        theirs_a, theirs_b = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
        # `tensor_of` may reuse memory.
        own_a, own_b = (tensor_of(name).detach().to("cpu", dtype, copy=True).contiguous() for name in (a, b))
        count = _count_parts(matrix, places)
        if count == 1:
            tensors |= {theirs_a: own_a, theirs_b: own_b}
            continue
        place = places[matrix]
        ranks[_last(hf_name, matrix)] = count * lora.rank
        if theirs_a not in tensors:
            tensors[theirs_a] = own_a.new_zeros(count * lora.rank, own_a.shape[1])
            tensors[theirs_b] = own_b.new_zeros(place.whole[0], count * lora.rank)
        start = lora.rank * _number_in(matrix, places)
        tensors[theirs_a][start : start + lora.rank] = own_a
        view = replace(place, transposed=False).find_in(tensors[theirs_b])[..., start : start + lora.rank]
        view.copy_(own_b.view_as(view))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"} | ({BASE: base_sha256} if base_sha256 else {}))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base[0],
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": list(dict.fromkeys(_names_of_targets(lora, hf_name))),
        KEY: experts or None,
        "bias": "none",
        "fan_in_fan_out": _is_transposed(places),
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": ranks,
        "alpha_pattern": {name: rank / lora.rank * lora.alpha for name, rank in ranks.items()},
        "use_rslora": False,
        "use_dora": False,
        "revision": base[1],
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _last(hf_name: HfName, matrix: str) -> str:
    return hf_name(matrix).removesuffix(".weight").rpartition(".")[2]


def _names_of_targets(lora: LoraSpec, hf_name: HfName) -> list[str]:
    """The ends of the names of the modules with an adapter, long enough that no module without one has it."""
    modules = {target: _matrix(hf_name, 0, target) for target in _known_targets(hf_name)}
    mine = {modules[target] for target in lora.targets}
    found = []
    for target in lora.targets:
        words = modules[target].split(".")
        others = [name.split(".") for name in modules.values() if name not in mine]
        count = next(n for n in range(1, len(words) + 1) if all(words[-n:] != name[-n:] for name in others))
        found.append(".".join(words[-count:]))
    return found
