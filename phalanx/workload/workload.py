"""The workload of a run, as one interface for all kinds of tasks: a model, a task and samples.

A workload is created wherever it is needed, from the configuration and files only, and holds little memory: the
launcher's checks, training ranks and probes use the same interface.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from phalanx.core.run_paths import RunPaths
from phalanx.data.loader import SampleSet
from phalanx.data.packing import PackingOptions, Sample, make_rows
from phalanx.data.record_files import TokenFile
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.families.catalog import DEFAULT_FAMILY, FAMILIES, family_of, flops_per_token
from phalanx.models.families.family import ModelFamily
from phalanx.models.hf_config import find_config_family, read_config, spec_from_config
from phalanx.models.hf_weights import Weights
from phalanx.models.model import Architecture, Model
from phalanx.models.user_model import build_on_meta, load_family_class, load_model_class
from phalanx.parallel.init_weights import Fill, make_adapter_fill, make_hf_fill, make_random_fill
from phalanx.tasks.language import CausalLMTask
from phalanx.tasks.task import Task
from phalanx.workload import adapters
from phalanx.workload.bert import BertWorkload
from phalanx.workload.custom import CustomWorkload

if TYPE_CHECKING:
    from phalanx.config.schema import Config


class Workload(Protocol):
    """What differs between kinds of tasks."""

    spec: ModelSpec | None  # None for a custom network
    unit: str  # what a step's speed counts: "tokens" or "samples"
    positions: int  # how many of them one sample has
    takes_whole_share: bool  # whether a rank's samples of a step must be one micro-batch

    def model(self, layers: int | None = None) -> Model:
        """The model on meta, with its adapters; with `layers` blocks to measure by, where there is a spec."""
        ...

    def task(self) -> Task: ...

    def train_data(self, folders: Sequence[tuple[Path, float]]) -> list[tuple[SampleSet, float]]:
        """What is trained on, with weights in the mixture; `folders` are the prepared sets, where there are such."""
        ...

    def eval_data(self, folders: Mapping[str, Path]) -> dict[str, SampleSet]:
        """What is evaluated on, by name."""
        ...

    def starting_weights(self, model: Model) -> Fill: ...

    def flops(self) -> tuple[int, int] | None:
        """Floating-point operations of forward and backward of one position: (full, causal), if they are known."""
        ...

    def warnings(self) -> list[str]:
        """Warnings about the start."""
        ...

    def make_probe_samples(self, count: int) -> list[Any]:
        """Samples as the task's collate takes them, to measure by; of the length that the run's own have."""
        ...


def make_workload(config: "Config", spec: ModelSpec | None, paths: RunPaths | None = None) -> Workload:
    """The workload of a resolved configuration; `paths` of the run folder, which keeps custom code."""
    if config.task.kind == "custom":
        return CustomWorkload(config, paths)
    assert spec is not None
    return TextWorkload(config, spec, paths) if family_of(spec).writes_text else BertWorkload(config, spec)


def find_model_shape(config: "Config", paths: RunPaths | None = None) -> ModelSpec | None:
    """The shapes of a resolved configuration; None for a custom task, which has its own network."""
    return None if config.task.kind == "custom" else read_model_shape(config, paths)


def read_model_shape(config: "Config", paths: RunPaths | None = None) -> ModelSpec:
    """The shapes of a resolved configuration; a run begun from a Hugging Face folder kept that folder's config."""
    from phalanx.config.model_spec import build_model_spec

    kept = _find_hf_config(config, paths)
    if kept is None:
        return build_model_spec(config)
    own = resolve_model_class(config, paths).hf_config
    return build_model_spec(config, spec_from_config(read_config(kept.parent), str(kept), own))


def _find_hf_config(config: "Config", paths: RunPaths | None) -> Path | None:
    if not config.model.from_hf:
        return None
    if paths is not None and paths.hf_config.is_file():
        return paths.hf_config
    return Path(config.model.from_hf).expanduser() / "config.json"


def _find_family(config: "Config", paths: RunPaths | None) -> ModelFamily:
    """That of the Hugging Face folder, if it is here, else what the recipe says."""
    from phalanx.config.model_spec import recipe_family  # needs pydantic; the loop itself does not

    file, kind = _find_hf_config(config, paths), config.task.kind
    if file is None:
        return recipe_family(config)
    if file.is_file():
        return find_config_family(read_config(file.parent)) or DEFAULT_FAMILY
    return next((each for each in FAMILIES.values() if kind in each.tasks), DEFAULT_FAMILY)


def resolve_model_class(
    config: "Config", paths: RunPaths | None = None, spec: ModelSpec | None = None
) -> type[Architecture]:
    """The model's class: the built-in one, or that of `model.code`, of which the run folder keeps a copy.

    Raises ConfigError for a file that is none of a model.
    """
    if config.model.code is None:
        return load_family_class(_find_family(config, paths).name if spec is None else spec.architecture)
    kept = paths is not None and paths.model_code.is_file()
    return load_model_class(paths.model_code if paths is not None and kept else config.model.code)


def make_form(config: "Config") -> PackingOptions:
    """How documents become sequences."""
    data = config.data
    drop_long = data.too_long == "drop"
    return PackingOptions(
        data.seq_len, data.format != "text", data.isolate_documents, drop_long, data.mask_document_end
    )


class TextWorkload:
    """Next tokens of token sets, by the built-in model or one that derives from it."""

    unit = "tokens"
    takes_whole_share = False

    def __init__(self, config: "Config", spec: ModelSpec, paths: RunPaths | None = None) -> None:
        self.spec: ModelSpec | None = spec
        self.positions = config.data.seq_len
        self._config, self._spec, self._code = config, spec, resolve_model_class(config, paths, spec)
        self._shapes: dict[str, tuple[int, ...]] | None = None  # of the whole model, once it was made

    def model(self, layers: int | None = None) -> Model:
        made = build_on_meta(self._spec if layers is None else replace(self._spec, layers=layers), self._code)
        if layers is None:
            self._shapes = {name: tuple(parameter.shape) for name, parameter in made.named_parameters()}
        return made

    def task(self) -> Task:
        form = make_form(self._config)
        return CausalLMTask(form.seq_len, form.packed or form.isolated)

    def train_data(self, folders: Sequence[tuple[Path, float]]) -> list[tuple[SampleSet, float]]:
        form, seed = make_form(self._config), self._config.train.seed
        return [(make_rows(TokenFile(folder), form, seed), weight) for folder, weight in folders]

    def eval_data(self, folders: Mapping[str, Path]) -> dict[str, SampleSet]:
        # What is evaluated on is the same for every seed, its packing too.
        return {name: make_rows(TokenFile(folder), make_form(self._config), 0) for name, folder in folders.items()}

    def starting_weights(self, model: Model) -> Fill:
        seed, from_hf, lora = self._config.train.seed, self._config.model.from_hf, self._config.model.lora
        if not from_hf:
            return make_random_fill(model, seed)
        weights = make_hf_fill(Weights(Path(from_hf).expanduser(), self._code), self._spec)
        if lora is None:
            return weights
        return make_adapter_fill(weights, seed, adapters.open_adapter(lora, self._spec, self._code))

    def flops(self) -> tuple[int, int] | None:
        if self._shapes is None:  # to make a model takes as long as a few of its layers' passes
            self.model()
        assert self._shapes is not None
        shapes = {name: shape for name, shape in self._shapes.items() if "lora_" not in name}
        return flops_per_token(self._spec, self.positions, shapes)

    def warnings(self) -> list[str]:
        return []

    def make_probe_samples(self, count: int) -> list[Any]:
        shape, generator = (count, self.positions + 1), torch.Generator().manual_seed(0)
        tokens = torch.randint(self._spec.vocab_size, shape, generator=generator).numpy()
        return [Sample(row, position=position) for position, row in enumerate(tokens)]
