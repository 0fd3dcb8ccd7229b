"""From a resolved configuration to the parts of a run: model, engine, task and loaders."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx import balance
from phalanx.comm.mesh import Mesh
from phalanx.data.loader import Loader
from phalanx.data.packing import Form
from phalanx.data.tokens import TokenFile
from phalanx.errors import ConfigError
from phalanx.models.custom import model_class, on_meta
from phalanx.models.hf import read_config, spec_from_config
from phalanx.models.llama import Llama
from phalanx.models.spec import ModelSpec
from phalanx.models.weights import Weights
from phalanx.optim.engine import Engine
from phalanx.optim.fsdp2 import Fsdp2
from phalanx.optim.single import Single
from phalanx.parallel.apply import MakeEngine, apply
from phalanx.parallel.materialize import Fill, drawn, imported, with_adapters
from phalanx.records import RunPaths
from phalanx.tasks.language import LanguageModel
from phalanx.tasks.task import Task
from phalanx.train import adapters

if TYPE_CHECKING:
    from phalanx.config import Config

ENGINES: dict[str, MakeEngine] = {"single": Single, "fsdp2": Fsdp2}


@dataclass
class Parts:
    """What a run is made of."""

    spec: ModelSpec
    model: Llama
    engine: Engine
    task: Task
    train: Loader
    held_out: dict[str, Loader]  # by name, those that make a sequence
    shares: list[int]
    nominal_weight: int
    starting_weights: Fill


def spec_from_run(config: "Config", paths: RunPaths | None = None) -> ModelSpec:
    """The shapes of a resolved configuration; a run begun from a Hugging Face folder kept that folder's config."""
    from phalanx.config import spec_of  # needs pydantic; the loop itself does not

    if not config.model.from_hf:
        return spec_of(config)
    folder = Path(config.model.from_hf).expanduser()
    kept = paths.hf_config if paths is not None and paths.hf_config.is_file() else folder / "config.json"
    return spec_of(config, spec_from_config(read_config(kept.parent), str(kept), class_of_run(config, paths)))


def class_of_run(config: "Config", paths: RunPaths | None = None) -> type[Llama]:
    """The model's class: the built-in one, or that of `model.code`, of which the run folder keeps a copy.

    Raises ConfigError for a file that is none of a model.
    """
    if config.model.code is None:
        return Llama
    kept = paths is not None and paths.model_code.is_file()
    return model_class(paths.model_code if paths is not None and kept else config.model.code)


def form_of(config: "Config") -> Form:
    """How documents become sequences."""
    data = config.data
    return Form(data.seq_len, data.format != "text", data.isolate_documents, data.too_long == "drop")


def build(
    config: "Config",
    spec: ModelSpec,
    mesh: Mesh,
    train_tokens: Sequence[tuple[Path, float]],
    held_out_tokens: Mapping[str, Path],
    paths: RunPaths | None = None,
) -> Parts:
    """Build everything that holds no state of the run yet; the model is on meta.

    `train_tokens` are token sets with their weights in the mixture, `held_out_tokens` those to evaluate on by name;
    `paths` is where the run folder keeps the model's own code.
    """
    train = config.train
    assert train.micro_batch != "auto"
    # Ranks that were not started by one launcher have each measured what fits; the least of it is for all.
    micro_batch = int(mesh.min([train.micro_batch])[0])
    assert config.parallel.data != "auto"
    _check_dtype(train.dtype, mesh)
    form = form_of(config)
    task = LanguageModel(form.seq_len, form.packed or form.isolated)
    nominal_weight = task.nominal_weight(train.global_batch)
    code = class_of_run(config, paths)
    assert (spec.lora is None) == (config.model.lora is None), "an `auto` of model.lora was not resolved"
    model = on_meta(spec, code)
    engine = apply(model, config, mesh, ENGINES[config.parallel.data], nominal_weight)
    sources = [(TokenFile(folder), weight) for folder, weight in train_tokens]
    # What is evaluated on is the same for every seed, its packing too.
    held_out = {
        name: Loader([(TokenFile(folder), 1.0)], form, train.global_batch, 0, mesh.rank, micro_batch, held_out=True)
        for name, folder in (held_out_tokens.items() if train.eval_sequences else ())
    }
    return Parts(
        spec=spec,
        model=model,
        engine=engine,
        task=task,
        train=Loader(sources, form, train.global_batch, train.seed, mesh.rank, micro_batch),
        held_out={name: loader for name, loader in held_out.items() if loader.sequences},
        shares=balance.even(train.global_batch, mesh.world),
        nominal_weight=nominal_weight,
        starting_weights=_starting_weights(config, spec, code),
    )


def _check_dtype(dtype: str, mesh: Mesh) -> None:
    """Ranks that were not started by one launcher have each resolved `train.dtype: auto` for their own device."""
    mine = float(["fp64", "fp32", "fp16", "bf16", "mixed"].index(dtype))
    if mesh.min([mine]) != mesh.max([mine]):
        raise ConfigError(
            f"the ranks do not agree on train.dtype (rank {mesh.rank} has {dtype}), since their devices differ; "
            "set train.dtype=mixed"
        )


def _starting_weights(config: "Config", spec: ModelSpec, code: type[Llama]) -> Fill:
    seed = config.train.seed
    if not config.model.from_hf:
        return drawn(spec, seed, code)
    weights = imported(Weights(Path(config.model.from_hf).expanduser(), code), spec)
    lora = config.model.lora
    return weights if lora is None else with_adapters(weights, seed, adapters.opened(lora, spec.layers, code))
