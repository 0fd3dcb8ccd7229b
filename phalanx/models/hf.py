"""Hugging Face folders in and out: config.json, and safetensors read by byte range and written shard by shard."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.models import llama
from phalanx.models.spec import ModelSpec, RopeScaling, parameter_shapes, problems
from phalanx.records import TOKENIZER_FILES

# What a config.json calls its architecture -> what a ModelSpec does.
ARCHITECTURES = {"LlamaForCausalLM": "llama"}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
MOST = 2**31 - 1  # of anything that a config counts
_INDEX = "model.safetensors.index.json"
# Config keys that would change the mathematics in a way that is not built here, and the values that do not.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, 1.0, None),
}


def hf_name(name: str) -> str:
    """The Hugging Face name of our parameter `name`."""
    found = re.fullmatch(r"(layers\.)(\d+)(\..+)", name)
    if found is None:
        return llama.HF_NAMES[name]
    return llama.HF_NAMES[f"layers.{{i}}{found[3]}"].replace("{i}", found[2])


# ---------------------------------------------------------------------------------------------------- config.json


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder. Raises ConfigError if the folder or the file is missing or no JSON."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}), so the model's shape is unknown; give a Hugging Face folder."
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); fetch the file again.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object, so the model's shape is unknown; fetch the file again.")
    return config


def spec_from_config(config: dict[str, Any], where: str) -> ModelSpec:
    """The ModelSpec of a config.json's content, in the form of transformers 4 or 5; `where` names it in errors.

    Raises ConfigError for an architecture or a feature that is not supported, or for an impossible shape.
    """
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        architectures = ["LlamaForCausalLM" if config.get("model_type") == "llama" else str(config.get("model_type"))]
    if not isinstance(architectures[0], str) or architectures[0] not in ARCHITECTURES:
        raise ConfigError(
            f"{where} has the architecture {architectures[0]}, which cannot be trained here; use a folder of a "
            f"supported one: {', '.join(ARCHITECTURES)}."
        )
    for name, accepted in _UNSUPPORTED.items():
        if config.get(name) not in accepted:
            raise ConfigError(
                f"{where} sets {name}: {json.dumps(config[name])}, which is not supported and would change the model's "
                f"output; use a model with {name}: {json.dumps(accepted[0])}."
            )
    hidden = _count(config, "hidden_size", where)
    heads = _count(config, "num_attention_heads", where)
    theta, scaling = _rope(config, where)
    spec = ModelSpec(
        architecture=ARCHITECTURES[architectures[0]],
        vocab_size=_count(config, "vocab_size", where),
        hidden=hidden,
        layers=_count(config, "num_hidden_layers", where),
        heads=heads,
        kv_heads=_count(config, "num_key_value_heads", where, heads),
        head_dim=_count(config, "head_dim", where, hidden // max(1, heads)),
        intermediate=_count(config, "intermediate_size", where),
        max_seq_len=_count(config, "max_position_embeddings", where, 2048),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_number(config, "rms_norm_eps", where, 1e-6),
        tie_embeddings=_flag(config, "tie_word_embeddings", where),
        init_std=_number(config, "initializer_range", where, 0.02),
    )
    found = problems(spec)
    if found:
        raise ConfigError(f"{where} describes an impossible model: {' '.join(found)}")
    return spec


def _number(config: dict[str, Any], name: str, where: str, default: float | None = None) -> float:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        state = "does not set" if value is None else f"sets {json.dumps(value)} as"
        raise ConfigError(f"{where} {state} {name}, without which the model's shape is unknown; give it a number.")
    return value


def _count(config: dict[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = _number(config, name, where, default)
    if value != int(value) or not 0 <= value <= MOST:
        raise ConfigError(f"{where} sets {json.dumps(value)} as {name}, which no model has; give it a whole number.")
    return int(value)


def _flag(config: dict[str, Any], name: str, where: str) -> bool:
    value = config.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{where} sets {json.dumps(value)} as {name}, which is neither true nor false; choose one.")
    return value


def _rope(config: dict[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    # transformers 4 has rope_theta beside an optional rope_scaling; 5 has both in rope_parameters.
    rule = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rule, dict):
        raise ConfigError(
            f"{where} sets rope_scaling to {json.dumps(rule)}, which is no JSON object; give null or a rule."
        )
    theta = _number(rule, "rope_theta", where, _number(config, "rope_theta", where, 10000.0))
    kind = str(rule.get("rope_type") or rule.get("type") or "default")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ConfigError(
            f"{where} scales rotary positions by the rule {kind!r}, which is not supported and would change the "
            "model's output; use a model with one of the supported rules: default, llama3."
        )
    return theta, RopeScaling(
        factor=_number(rule, "factor", where),
        low_freq_factor=_number(rule, "low_freq_factor", where),
        high_freq_factor=_number(rule, "high_freq_factor", where),
        original_max_seq_len=_count(rule, "original_max_position_embeddings", where),
    )


def config_from_spec(
    spec: ModelSpec,
    dtype: torch.dtype,
    original: dict[str, Any] | None = None,
    bos_id: int | None = None,
    eos_id: int | list[int] | None = None,
) -> dict[str, Any]:
    """The config.json of a model, readable by transformers 4.4x and 5.

    Keys of `original` that do not describe the shape are kept; token ids that are None are taken from `original`.
    """
    original = original or {}
    rule: dict[str, Any] = {"rope_type": "default"}
    if spec.rope_scaling is not None:
        rule = {
            "rope_type": "llama3",
            "factor": spec.rope_scaling.factor,
            "low_freq_factor": spec.rope_scaling.low_freq_factor,
            "high_freq_factor": spec.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": spec.rope_scaling.original_max_seq_len,
        }
    dtype_name = _dtype_name(dtype)
    return {
        **original,
        "architectures": [next(theirs for theirs, ours in ARCHITECTURES.items() if ours == spec.architecture)],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate,
        "max_position_embeddings": spec.max_seq_len,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tie_embeddings,
        "initializer_range": spec.init_std,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        # transformers 4 reads the first two keys, 5 the third; both agree.
        "rope_theta": spec.rope_theta,
        "rope_scaling": None if spec.rope_scaling is None else rule,
        "rope_parameters": {**rule, "rope_theta": spec.rope_theta},
        # Explicit nulls: transformers would otherwise put in the ids of its own default vocabulary.
        "bos_token_id": original.get("bos_token_id") if bos_id is None else bos_id,
        "eos_token_id": original.get("eos_token_id") if eos_id is None else eos_id,
        "torch_dtype": dtype_name,
        "dtype": dtype_name,
    }


def _dtype_name(dtype: torch.dtype) -> str:
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ConfigError(f"The dtype {dtype} cannot be written for Hugging Face; use one of: {', '.join(DTYPES)}.")


# -------------------------------------------------------------------------------------------------------- reading


class Weights:
    """The tensors of a local Hugging Face folder by our names, read by byte range: a rank reads only what it keeps.

    Takes `model.safetensors`, shards with `model.safetensors.index.json`, or shards without an index. Raises
    ConfigError if there are none, or if one is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        paths = _safetensors_files(self.folder)
        self._files = {path: _open(path) for path in paths}
        self._path_of = {name: path for path, file in self._files.items() for name in file.keys()}  # noqa: SIM118 (not a dict)

    def _find(self, name: str) -> str:
        """Their name for our parameter; a tied matrix may be stored under either of its two names."""
        wanted = hf_name(name)
        other = {"embed.weight": "head.weight", "head.weight": "embed.weight"}.get(name)
        if wanted not in self._path_of and other is not None and hf_name(other) in self._path_of:
            return hf_name(other)
        if wanted not in self._path_of:
            raise ConfigError(
                f"{self.folder} has no tensor {wanted}, so the model cannot be read; fetch the folder's files again."
            )
        return wanted

    def _slice(self, name: str) -> Any:
        theirs = self._find(name)
        return self._files[self._path_of[theirs]].get_slice(theirs)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of our parameter `name`. Raises ConfigError if the folder does not have it."""
        return tuple(self._slice(name).get_shape())

    def dtype(self) -> torch.dtype:
        """The dtype that the embedding is stored in. Raises ConfigError if it is none that a model is trained from."""
        stored = self._slice("embed.weight").get_dtype()
        if stored not in _STORED_DTYPES:
            raise ConfigError(
                f"{self.folder} stores its weights as {stored}, which cannot be trained from; use a folder that stores "
                f"one of: {', '.join(DTYPES)}."
            )
        return _STORED_DTYPES[stored]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the row-major flattened parameter, 1-D, in the stored dtype.

        Touches only the rows that hold them. Raises ConfigError if the parameter is missing or its file damaged, and
        ValueError for a range outside it.
        """
        rows = self._slice(name)
        shape = rows.get_shape()
        width = 1
        for size in shape[1:]:
            width *= size
        if not 0 <= start <= stop <= shape[0] * width:
            raise ValueError(f"{name} has {shape[0] * width} elements, but [{start}, {stop}) was asked for")
        if start == stop:
            return torch.empty(0, dtype=_STORED_DTYPES[rows.get_dtype()])
        first, last = start // width, -(-stop // width)
        part = rows[first:last].reshape(-1)
        return part[start - first * width : stop - first * width].clone()  # a view would keep the file mapped

    def check(self, spec: ModelSpec) -> None:
        """Raises ConfigError that names the tensors and files if they are not just what a model of `spec` needs."""
        shapes = parameter_shapes(spec)
        missing = [hf_name(name) for name in shapes if hf_name(name) not in self._path_of]
        if spec.tie_embeddings and hf_name("head.weight") in self._path_of:
            missing = [name for name in missing if name != hf_name("embed.weight")]
        if missing:
            raise ConfigError(
                f"{self.folder} lacks {_few(missing)}, which its config.json promises; fetch the folder's files again."
            )
        for name, shape in shapes.items():
            if self.shape(name) != shape:
                theirs = self._find(name)
                raise ConfigError(
                    f"{self._path_of[theirs]} holds {theirs} of shape {self.shape(name)}, but config.json makes it "
                    f"{shape}; use weights and a config.json of one model."
                )
            stored = self._slice(name).get_dtype()
            if stored not in _STORED_DTYPES:
                raise ConfigError(
                    f"{self._path_of[self._find(name)]} stores {hf_name(name)} as {stored}, which cannot be trained "
                    f"from; use a folder that stores one of: {', '.join(DTYPES)}."
                )
        known = {hf_name(name) for name in shapes} | {hf_name("head.weight")}
        # Rotary frequencies were stored by old versions of transformers; they follow from the config.
        extra = [name for name in self._path_of if name not in known and not name.endswith("rotary_emb.inv_freq")]
        if extra:
            raise ConfigError(
                f"{self._path_of[extra[0]]} holds {_few(extra)}, which a model of this config.json does not have; use "
                "weights and a config.json of one model."
            )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _safetensors_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is no folder, so no weights can be read from it; give a local Hugging Face folder."
        )
    index = folder / _INDEX
    single = folder / "model.safetensors"
    if single.is_file() and not index.is_file():
        return [single]
    if not index.is_file():
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ConfigError(
                f"{folder} holds no .safetensors file, the only format that weights are read from; save the model with "
                "safe_serialization=True."
            )
        return paths
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is no index of weights ({error!r}); fetch the file again.") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"{folder} lacks {_few(missing)}, which {_INDEX} lists; fetch the missing files.")
    return [folder / name for name in names]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors ({error}); fetch the file again.") from error


# -------------------------------------------------------------------------------------------------------- writing


def plan_shards(spec: ModelSpec, dtype: torch.dtype, max_shard_bytes: int) -> list[list[str]]:
    """Our parameter names file by file, in order, so that no file of several tensors exceeds `max_shard_bytes`."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, shape in parameter_shapes(spec).items():
        size = dtype.itemsize
        for count in shape:
            size *= count
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def export(
    folder: Path,
    spec: ModelSpec,
    tensor_of: Callable[[str], Tensor],
    dtype: torch.dtype,
    *,
    max_shard_bytes: int = 5_000_000_000,
    original_config: dict[str, Any] | None = None,
    tokenizer_folder: Path | None = None,
    bos_id: int | None = None,
    eos_id: int | list[int] | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Writes a folder that `AutoModelForCausalLM` and `AutoTokenizer` load, holding one shard in memory at a time.

    `tensor_of(our_name)` gives a parameter, flat or shaped, in any dtype and on any device; it is asked once for each,
    in order. `progress` gets the bytes of each tensor as it is done. Tokenizer files, and a generation_config.json, are
    copied from `tokenizer_folder`. The folder appears complete or not at all. Raises ConfigError if it exists and is
    not empty, or cannot be written.
    """
    folder = Path(folder)
    config = config_from_spec(spec, dtype, original_config, bos_id, eos_id)
    temporary = folder.parent / f".{folder.name}.partial-{os.getpid()}"
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"{folder} exists and is not empty, so an export would mix with what is there; name a new folder."
            )
        temporary.mkdir(parents=True)
        _write_weights(temporary, spec, tensor_of, dtype, max_shard_bytes, progress)
        _write_json(temporary / "config.json", config)
        _write_tokenizer(temporary, config, tokenizer_folder)
        for path in temporary.iterdir():
            _flush(path)
        os.replace(temporary, folder)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{folder} cannot be written ({error}), so nothing was exported; free space or name a folder that you may "
            "write to."
        ) from error
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)


def _write_weights(
    folder: Path,
    spec: ModelSpec,
    tensor_of: Callable[[str], Tensor],
    dtype: torch.dtype,
    max_shard_bytes: int,
    progress: Callable[[int], None] | None,
) -> None:
    shapes = parameter_shapes(spec)
    shards = plan_shards(spec, dtype, max_shard_bytes)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        shard: dict[str, Tensor] = {}
        for name in names:
            tensor = tensor_of(name).detach().to(device="cpu", dtype=dtype).reshape(shapes[name]).contiguous()
            shard[hf_name(name)] = tensor
            total_bytes += tensor.nbytes
            if progress is not None:
                progress(tensor.nbytes)
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        _write_json(folder / _INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def _write_tokenizer(folder: Path, config: dict[str, Any], tokenizer_folder: Path | None) -> None:
    for name in TOKENIZER_FILES:
        if tokenizer_folder is not None and (Path(tokenizer_folder) / name).is_file():
            shutil.copyfile(Path(tokenizer_folder) / name, folder / name)
    if not (folder / "generation_config.json").exists():
        ids = {name: config[name] for name in ("bos_token_id", "eos_token_id") if config[name] is not None}
        _write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
