"""Read and write config.json of Hugging Face folders, by model family. No torch here."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.families.catalog import FAMILIES, family_of, find_shape_problems
from phalanx.models.families.family import NONE, ConfigJson, ModelFamily, check_accepted

# The key of a config.json with a custom architecture that names the built-in one it is based on.
BASE_KEY = "phalanx_architecture"
# Of rotary scaling: written within its rule, and beside it only by families that look there.
_ORIGINAL_LENGTH = "original_max_position_embeddings"
DTYPE_NAMES = ("float64", "float32", "bfloat16", "float16")  # valid in a config.json


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a Hugging Face folder. Raises ConfigError if the folder or the file is missing or no JSON."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}), so the model's shape is unknown; give a Hugging Face folder, "
            f"such as `phalanx export` makes of a run."
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); fetch the file again.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object, so the model's shape is unknown; fetch the file again.")
    return config


def spec_from_config(config: dict[str, Any], where: str, own: Mapping[str, Any] = NONE) -> ModelSpec:
    """Convert the content of a config.json, of transformers 4 or 5, to a ModelSpec; `where` names it in errors.

    `own`: the keys that a custom class writes (`Architecture.hf_config`), accepted with its architecture. Raises
    ConfigError for an unsupported architecture or feature, or an impossible shape.
    """
    family = find_config_family(config, own)
    if family is None:
        raise ConfigError(_describe_unknown(config, where, own))
    check_accepted(config, {name: values for name, values in family.hf.accepted.items() if name not in own}, where)
    full, fields = {**family.hf.defaults, **config}, dict[str, Any](architecture=family.name)
    fields |= {name: read(full, key, where, default) for name, (key, read, default) in family.hf.keys.items()}
    spec = ModelSpec(**fields | family.hf.read(full, fields, where))
    if found := find_shape_problems(spec):
        raise ConfigError(f"{where} describes an impossible model: {' '.join(found)}")
    return spec


def find_config_family(config: ConfigJson, own: Mapping[str, Any] = NONE) -> ModelFamily | None:
    """Find the family of a config.json, by its architectures or, where it has none, by its model_type; None if
    unsupported. `own`: see `spec_from_config`."""
    named = config.get("architectures")
    if not isinstance(named, list) or not named:
        kind = config.get("model_type")
        return next(
            (each for each in FAMILIES.values() if each.hf.model_type == kind and each.hf.matches(config)), None
        )
    if own.get("architectures") == named:
        base = FAMILIES.get(str(config.get(BASE_KEY, next(iter(FAMILIES)))))
        return base if base in _bases() else None
    called = (each for each in FAMILIES.values() if named[0] in (*each.hf.classes, *each.hf.headless))
    return next((each for each in called if each.hf.matches(config)), None)


def _bases() -> list[ModelFamily]:
    """The families that a custom class may be based on."""
    return [each for each in FAMILIES.values() if each.writes_text]


def _describe_unknown(config: ConfigJson, where: str, own: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    if own.get("architectures") == named and named:
        return (
            f"{where} sets {BASE_KEY}: {json.dumps(config.get(BASE_KEY))}, which is unknown; set it to one of: "
            f"{', '.join(each.name for each in _bases())}."
        )
    called = named[0] if isinstance(named, list) and named else config.get("model_type")
    known = [*own.get("architectures", []), *(name for each in FAMILIES.values() for name in each.hf.classes)]
    return (
        f"{where} has the architecture {called}, which cannot be trained here; use a folder of a "
        f"supported one: {', '.join(known)}"
        f"{'; or set model.code to the file that defines its class' if BASE_KEY in config else ''}."
    )


def config_from_spec(
    spec: ModelSpec,
    dtype: object,
    original: dict[str, Any] | None = None,
    bos_id: int | None = None,
    eos_id: int | list[int] | None = None,
    own: Mapping[str, Any] = NONE,
) -> dict[str, Any]:
    """Convert a ModelSpec to a config.json for transformers 4.4x and 5; `dtype`: a torch dtype.

    Keys of `original` that do not describe the shape are kept; token ids that are None are taken from `original`. A
    custom class adds its keys (`Architecture.hf_config`). Raises ConfigError for an unsupported dtype.
    """
    dtype_name = str(dtype).removeprefix("torch.")
    if dtype_name not in DTYPE_NAMES:
        raise ConfigError(
            f"The dtype {dtype} cannot be written for Hugging Face; use one of: {', '.join(DTYPE_NAMES)}."
        )
    family, original = family_of(spec), original or {}
    objective = spec.encoder.objective if spec.encoder else "language"
    written = {
        **{key: value for key, value in original.items() if key not in (*family.hf.forgotten, _ORIGINAL_LENGTH)},
        "architectures": [theirs for theirs, ours in family.hf.classes.items() if ours == objective],
        "model_type": family.hf.model_type,
        **{key: getattr(spec, name) for name, (key, _, _) in family.hf.keys.items()},
        **family.hf.write(spec, original),
        "torch_dtype": dtype_name,
        "dtype": dtype_name,
    }
    ids = {"bos_token_id": bos_id, "eos_token_id": eos_id}
    written |= {name: value for name, value in ids.items() if name in written and value is not None}
    return {**written, **({BASE_KEY: spec.architecture} if "architectures" in own else {}), **own}
