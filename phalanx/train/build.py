"""From a resolved configuration to the parts of a run: model, engine, task and loaders."""

from dataclasses import dataclass
from pathlib import Path

from phalanx import balance
from phalanx.comm.mesh import Mesh
from phalanx.config import Config, default_intermediate
from phalanx.data.loader import Loader
from phalanx.data.tokens import TokenFile
from phalanx.errors import ConfigError
from phalanx.models.hf import Weights, read_config, spec_from_config
from phalanx.models.llama import Llama
from phalanx.models.spec import PRESETS, ModelSpec, RopeScaling, problems
from phalanx.optim.engine import Engine
from phalanx.optim.fsdp2 import Fsdp2
from phalanx.optim.single import Single
from phalanx.parallel.apply import MakeEngine, apply, on_meta
from phalanx.parallel.materialize import Fill, drawn, imported
from phalanx.records import RunPaths
from phalanx.tasks.language import LanguageModel
from phalanx.tasks.task import Task

ENGINES: dict[str, MakeEngine] = {"single": Single, "fsdp2": Fsdp2}


@dataclass
class Parts:
    """What a run is made of."""

    spec: ModelSpec
    model: Llama
    engine: Engine
    task: Task
    train: Loader
    held_out: Loader | None
    shares: list[int]
    nominal_weight: int
    starting_weights: Fill


def spec_of(config: Config, hf_spec: ModelSpec | None = None) -> ModelSpec:
    """The model's shapes from `config`, or from a Hugging Face folder's `hf_spec`. `model.vocab_size` must be resolved
    unless a preset or a folder gives it. Raises ConfigError with every impossible shape."""
    model = config.model
    if hf_spec is not None:
        spec = hf_spec
    elif model.preset is not None:
        if model.preset not in PRESETS:
            raise ConfigError(f"model.preset {model.preset!r} is not known; choose one of {', '.join(PRESETS)}")
        spec = PRESETS[model.preset]
    else:
        # recipe.check has asked for these three.
        assert model.hidden
        assert model.layers
        assert model.heads
        spec = ModelSpec(
            vocab_size=0,
            hidden=model.hidden,
            layers=model.layers,
            heads=model.heads,
            kv_heads=model.heads,
            head_dim=max(1, model.hidden // model.heads),
            intermediate=default_intermediate(model.hidden),
            max_seq_len=config.data.seq_len,
        )
    given = {
        name: getattr(model, name)
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "max_seq_len", "rope_theta",
                     "norm_eps", "tie_embeddings", "init_std")
        if getattr(model, name) is not None
    }  # fmt: skip
    if model.rope_scaling is not None:
        given["rope_scaling"] = RopeScaling(**model.rope_scaling.model_dump())
    if model.vocab_size != "auto":
        given["vocab_size"] = model.vocab_size
    values = {name: getattr(spec, name) for name in spec.__dataclass_fields__} | given | {"dropout": model.dropout}
    spec = ModelSpec(**values)
    if found := problems(spec):
        raise ConfigError("the model's shapes are impossible: " + "; ".join(sentence.rstrip(".") for sentence in found))
    if config.data.seq_len > spec.max_seq_len:
        raise ConfigError(
            f"data.seq_len {config.data.seq_len} is longer than the model's {spec.max_seq_len} positions; lower it"
        )
    return spec


def spec_from_run(config: Config, paths: RunPaths | None = None) -> ModelSpec:
    """The shapes of a resolved configuration; a run begun from a Hugging Face folder kept that folder's config."""
    if not config.model.from_hf:
        return spec_of(config)
    folder = Path(config.model.from_hf).expanduser()
    kept = paths.hf_config if paths is not None and paths.hf_config.is_file() else folder / "config.json"
    return spec_of(config, spec_from_config(read_config(kept.parent), str(kept)))


def build(config: Config, spec: ModelSpec, mesh: Mesh, train_tokens: Path, held_out_tokens: Path) -> Parts:
    """Build everything that holds no state of the run yet; the model is on meta."""
    train = config.train
    assert train.micro_batch != "auto"
    assert config.parallel.data != "auto"
    task = LanguageModel(config.data.seq_len)
    nominal_weight = task.nominal_weight(train.global_batch)
    model = on_meta(spec)
    engine = apply(model, config, mesh, ENGINES[config.parallel.data], nominal_weight)
    shape = (config.data.seq_len, train.global_batch, train.seed, mesh.rank, train.micro_batch)
    held_out = Loader(TokenFile(held_out_tokens), *shape, held_out=True) if train.eval_sequences else None
    weights = config.model.from_hf
    return Parts(
        spec=spec,
        model=model,
        engine=engine,
        task=task,
        train=Loader(TokenFile(train_tokens), *shape),
        held_out=held_out if held_out is not None and held_out.sequences else None,
        shares=balance.even(train.global_batch, mesh.world),
        nominal_weight=nominal_weight,
        starting_weights=imported(Weights(Path(weights)), spec) if weights else drawn(spec, train.seed),
    )
