"""Parameters and Adam's state that another program has saved, by our names: checked, and written as a Hugging Face
folder or as a checkpoint that a run resumes from."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.disk.load import SingleRankGroup, list_steps
from phalanx.checkpoint.disk.save import CheckpointSaver
from phalanx.core.errors import CheckpointError, ConfigError
from phalanx.core.run_paths import IMPORTED, RunPaths
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.hf_config import read_config, spec_from_config
from phalanx.models.hf_export import export
from phalanx.models.hf_weights import DTYPES
from phalanx.models.model import Architecture
from phalanx.models.user_model import load_family_class, shapes_of
from phalanx.optim.update import MOMENTS, StatePiece

PARAM = "param"


@dataclass(frozen=True)
class ModelFolder:
    """A Hugging Face folder that says what a model is: its config.json, and the tokenizer's files if there are any.
    `folder` and `config` are None where a checkpoint says it itself."""

    folder: Path | None
    config: dict[str, Any] | None
    spec: ModelSpec
    model_class: type[Architecture]

    @classmethod
    def open(cls, folder: Path) -> "ModelFolder":
        """Raises ConfigError where config.json is missing, or is of a model that is not built here."""
        config = read_config(folder)
        spec = spec_from_config(config, str(folder / "config.json"))
        return cls(folder, config, spec, load_family_class(spec.architecture))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all parameters, by our names."""
        return shapes_of(self.model_class, self.spec)


@dataclass(frozen=True)
class TrainedState:
    """What a checkpoint of another program holds, already checked: `read(name, kind)` gives one of our parameters, or
    what Adam keeps of it, whole and as it was stored; `dtype` is that of the parameters, `step` the last that was
    trained (None: not said), `has_moments` whether Adam's state is there; `read_master` gives the parameters in more
    digits than `dtype` has, where they are kept (None: they are not)."""

    model: ModelFolder
    read: Callable[[str, str], Tensor]
    dtype: torch.dtype
    step: int | None
    has_moments: bool
    read_master: Callable[[str], Tensor] | None = None

    def write_hf(self, target: Path, dtype: torch.dtype | None = None) -> None:
        """Write a Hugging Face folder, tensor by tensor. Raises ConfigError if `target` is not empty."""
        export(
            target,
            self.model.spec,
            lambda name: self.read(name, PARAM),
            dtype or self.dtype,
            original_config=self.model.config,
            tokenizer_folder=self.model.folder,
            model_class=self.model.model_class,
        )

    def write_run(self, run: Path) -> int:
        """Write the first checkpoint of an empty run folder, from which a run of AdamW then resumes, and return its
        step. All of it is in memory. Raises ConfigError where that is not possible, CheckpointError if it fails."""
        paths = RunPaths(run)
        if not self.has_moments:
            raise ConfigError(
                "the checkpoint holds no Adam state for every parameter, so a run could not resume from it; "
                "convert it to a Hugging Face folder, and set model.from_hf to that"
            )
        if self.step is None or self.step < 1:
            raise ConfigError("the checkpoint does not say after which step it was saved; give --step")
        if paths.config.exists() or list_steps(paths.checkpoints):
            raise ConfigError(f"{run} holds a run already; name a new folder")
        shapes = self.model.shapes()
        master = torch.float64 if self.dtype == torch.float64 else torch.float32
        reasons: list[str] = []

        def note(kind: str, details: dict[str, Any]) -> None:
            reasons.append(str(details.get("reason") or details.get("message")))

        saver = CheckpointSaver(paths.checkpoints, 0, SingleRankGroup(), 1, note)
        header = {"step": self.step, "skipped": 0, "tokens": 0, "attempt": 0, "world": 1, "nodes": [0]}
        named = {name: (shape, str(master).removeprefix("torch.")) for name, shape in shapes.items()}
        paths.has_checkpoints.mkdir(parents=True, exist_ok=True)
        (paths.root / IMPORTED).write_text(json.dumps({"step": self.step}) + "\n", encoding="utf-8")
        saver.save(header, named, self._pieces(shapes, master), attempt=1)
        saver.close()
        if saver.outcome is None or not saver.outcome.saved:
            raise CheckpointError(f"{paths.checkpoints} could not be written ({'; '.join(reasons)})")
        return self.step

    def _pieces(self, shapes: dict[str, tuple[int, ...]], master: torch.dtype) -> Iterator[StatePiece]:
        for name in shapes:
            for kind in (PARAM, *MOMENTS):
                masters = self.read_master if kind == PARAM else None
                flat = (masters(name) if masters else self.read(name, kind)).reshape(-1).to(master)
                yield StatePiece(name, kind, 0, flat.numel(), flat)


def check_parameter(key: str, stored: tuple[int, ...], dtype: torch.dtype, shape: tuple[int, ...], where: Path) -> None:
    """Raises ConfigError unless what is `stored` as `key` can be a parameter of `shape`."""
    if stored != shape:
        raise ConfigError(
            f"{where} holds {key} of shape {stored}, but config.json makes it {shape}; give the config.json of the "
            "model that was trained"
        )
    if dtype not in DTYPES.values():
        raise ConfigError(
            f"{where} stores {key} as {dtype}, which cannot be trained from; save it with one of: {', '.join(DTYPES)}"
        )


def list_few(names: list[str]) -> str:
    """The first three of many names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
