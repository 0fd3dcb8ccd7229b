"""A tiny model with random weights in the place of a Hugging Face folder: of the same kind, read by the same code."""

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from phalanx.config.schema import Config
from phalanx.config.shrink import SEQ_LEN, choose_stand_in, shrink_spec
from phalanx.core.errors import ConfigError
from phalanx.core.run_paths import VOCABULARY_FILES
from phalanx.data.tokenizer import load_tokenizer
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.hf_config import read_config, spec_from_config
from phalanx.models.hf_export import export
from phalanx.models.llama import init_slice
from phalanx.models.model import Architecture
from phalanx.models.user_model import shapes_of
from phalanx.workload.workload import resolve_model_class


def write_tiny_model(config: Config) -> tuple[str, bool]:
    """Write the stand-in for `model.from_hf` into the cache, if it is not there yet; (its path, has it a tokenizer).

    Only the original's config.json is read; where even that is not here, it is what `choose_stand_in` says. Raises
    ConfigError for a config.json that the run itself would refuse.
    """
    assert config.model.from_hf
    original = Path(config.model.from_hf).expanduser()
    if (original / "config.json").is_file():
        written, code = read_config(original), resolve_model_class(config)
        spec = shrink_spec(spec_from_config(written, str(original), code.hf_config), SEQ_LEN)
    else:
        written, spec = None, choose_stand_in(config)
        code = resolve_model_class(config, spec=spec)
        if (tokenizer := Path(config.data.tokenizer).expanduser()).is_dir():
            spec = replace(spec, vocab_size=load_tokenizer(tokenizer).vocab_size)
    has_tokenizer = any((original / name).is_file() for name in VOCABULARY_FILES)
    facts = json.dumps([str(original), str(config.model.code), written, str(spec)], sort_keys=True)
    folder = Path(config.data.cache).expanduser() / f"tiny-{zlib.crc32(facts.encode()):08x}"
    if not folder.is_dir():
        _write(folder, spec, code, written, original if has_tokenizer else None)
    return str(folder), has_tokenizer


def _write(
    folder: Path, spec: ModelSpec, code: type[Architecture], written: dict[str, Any] | None, tokenizer: Path | None
) -> None:
    shapes = shapes_of(code, spec)

    def value(name: str) -> torch.Tensor:
        elements = torch.Size(shapes[name]).numel()
        return init_slice(spec, 0, name, 0, elements, "cpu", torch.float32, code).view(shapes[name])

    try:
        export(
            folder, spec, value, torch.bfloat16, original_config=written, tokenizer_folder=tokenizer, model_class=code
        )
    except ConfigError:
        if not (folder / "config.json").is_file():  # else another rank was faster
            raise
