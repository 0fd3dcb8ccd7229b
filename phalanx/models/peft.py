"""Adapters in the format of Hugging Face's PEFT library: adapter_config.json and adapter_model.safetensors, in and out.

The library itself is not needed. What an adapter of its may be that ours is not is refused by name.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import LORA_TARGETS, LoraSpec
from phalanx.models.lora import MODULES, adapter_names

CONFIG, WEIGHTS, WEIGHTS_BIN = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
BASE = "base_sha256"  # in what safetensors keeps beside the tensors
_MAX_RANK = 2**20
# What goes before the model's own names in the names of an adapter's tensors.
_PREFIX = "base_model.model."
_STORED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Keys that say nothing about the mathematics of a finished adapter, or that are read below.
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha",
    "lora_dropout", "megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r",
    "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
# Values of `init_lora_weights` that leave the base weights as they are; others take something out of them first.
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal")

HfName = Callable[[str], str]  # our parameter's name -> the name in a Hugging Face folder


class Adapter:
    """An adapter in a folder that PEFT wrote, by our names: `lora` is its shape, `read` gives elements of its tensors.

    `layers` is the number of blocks of the model that it is for, `hf_name` that model's names. Raises ConfigError where
    the folder is no adapter, or one that computes something else than ours do.
    """

    def __init__(self, folder: Path, layers: int, hf_name: HfName) -> None:
        self.folder = Path(folder)
        config = _read_config(self.folder)
        self._tensors, about = _open(self.folder)
        self.base: str | None = about.get(BASE)  # the fingerprint of the weights it was trained beside, where we know
        self._names: dict[str, str] = {}  # ours -> theirs
        self.lora = self._shape(config, layers, hf_name)

    def _shape(self, config: dict[str, Any], layers: int, hf_name: HfName) -> LoraSpec:
        where = self.folder / CONFIG
        rank, alpha, dropout = (_number(config, name, where) for name in ("r", "lora_alpha", "lora_dropout"))
        if rank != int(rank) or not 1 <= rank <= _MAX_RANK:
            raise ConfigError(f"{where} sets r to {rank}, which is no rank of a matrix; fetch the adapter again")
        if alpha <= 0 or not 0 <= dropout < 1:
            raise ConfigError(
                f"{where} sets lora_alpha to {alpha} and lora_dropout to {dropout}; the first must be above 0, the "
                "second a probability below 1"
            )
        if config.get("use_rslora"):
            alpha *= math.sqrt(rank)  # its product is scaled by alpha / sqrt(rank)
        every = {_PREFIX + _matrix(hf_name, index, target): target for index in range(layers) for target in MODULES}
        found = {target for module, target in every.items() if f"{module}.lora_A.weight" in self._tensors}
        lora = LoraSpec(rank=int(rank), alpha=alpha, dropout=dropout, targets=_ordered(found))
        for matrix, a, b in adapter_names(lora, layers):
            module = _PREFIX + hf_name(matrix).removesuffix(".weight")
            self._names |= {a: f"{module}.lora_A.weight", b: f"{module}.lora_B.weight"}
        weights = f"the weights in {self.folder}"
        missing = [name for name in self._names.values() if name not in self._tensors]
        if missing:
            raise ConfigError(
                f"{weights} lack {missing[0]}, and an adapter here is the same in all {layers} layers; use one that "
                "was trained so, for a model of that depth"
            )
        extra = sorted(set(self._tensors) - set(self._names.values()))
        if extra:
            raise ConfigError(
                f"{weights} hold {extra[0]}, but only adapters of the matrices {', '.join(MODULES)} of this model's "
                f"{layers} layers can be trained here; use an adapter of these alone"
            )
        if not self._names:
            raise ConfigError(f"{weights} hold no adapter at all; fetch the folder's files again")
        return lora

    def check_shapes(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raises ConfigError unless its tensors have the `shapes` (by our names) that the model needs."""
        for name, theirs in self._names.items():
            if tuple(self._tensors[theirs].shape) != shapes[name]:
                raise ConfigError(
                    f"{theirs} in {self.folder} has the shape {tuple(self._tensors[theirs].shape)}, but r and the "
                    f"model of model.from_hf make it {shapes[name]}; use an adapter that was trained for this model"
                )

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of our flattened parameter `name`, 1-D, in the stored dtype."""
        return self._tensors[self._names[name]].reshape(-1)[start:stop]


def _ordered(targets: set[str]) -> tuple[str, ...]:
    return tuple(target for target in LORA_TARGETS if target in targets)


def _matrix(hf_name: HfName, index: int, target: str) -> str:
    """The module in a Hugging Face model of the matrix `target` of layer `index`."""
    return hf_name(f"layers.{index}.{MODULES[target]}.weight").removesuffix(".weight")


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); name a folder that PEFT saved") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); fetch the file again") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object; fetch the file again")
    expected = {
        "peft_type": ("LORA",),
        "task_type": (None, "CAUSAL_LM"),
        "bias": (None, "none"),
        "init_lora_weights": _PLAIN_STARTS,
    }
    for key, values in expected.items():
        if not any(config.get(key) is value or config.get(key) == value for value in values):
            raise _refusal(path, key, config.get(key), values[-1])
    for key, value in config.items():
        # A key that is not known here may mean anything, unless it is off.
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
        raise ConfigError(f"{where} has {name}: {json.dumps(value)}, which is no number; fetch the file again")
    return value


def _open(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of an adapter, and what the file says beside them."""
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
    except Exception as error:  # a damaged or malicious .bin makes torch raise almost anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"{path} cannot be read as plain weights ({reason}); fetch the file again") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ConfigError(f"{path} holds something else than tensors; fetch the file again")
    for name, tensor in tensors.items():
        if tensor.dtype not in _STORED:
            raise ConfigError(
                f"{path} stores {name} as {tensor.dtype}, which cannot be trained; use an unquantised one"
            )
    return tensors, about


def save_adapter(
    folder: Path, lora: LoraSpec, layers: int, tensor_of: Callable[[str], Tensor], dtype: torch.dtype, hf_name: HfName,
    base: str, base_sha256: str | None,
) -> None:  # fmt: skip
    """Write an adapter into an existing folder, as PEFT does, for the model `base` (a folder or an id), whose weights
    are known by `base_sha256` (None: nobody knows).

    `tensor_of(our_name)` gives a parameter in its shape, in any dtype and on any device; it is stored in `dtype`.
    """
    tensors = {}
    for matrix, a, b in adapter_names(lora, layers):
        module = _PREFIX + hf_name(matrix).removesuffix(".weight")
        for name, theirs in ((a, f"{module}.lora_A.weight"), (b, f"{module}.lora_B.weight")):
            tensors[theirs] = tensor_of(name).detach().to(device="cpu", dtype=dtype).contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"} | ({BASE: base_sha256} if base_sha256 else {}))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": [_matrix(hf_name, 0, target).rpartition(".")[2] for target in lora.targets],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
        "revision": None,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
