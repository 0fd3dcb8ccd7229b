"""From a resolved configuration to the parts of a run: model, engine, task and loaders."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx import balance
from phalanx.comm.mesh import Mesh
from phalanx.data.loader import Loader
from phalanx.data.tokens import TokenFile
from phalanx.models.hf import Weights, read_config, spec_from_config
from phalanx.models.llama import Llama
from phalanx.models.spec import ModelSpec
from phalanx.optim.engine import Engine
from phalanx.optim.fsdp2 import Fsdp2
from phalanx.optim.single import Single
from phalanx.parallel.apply import MakeEngine, apply, on_meta
from phalanx.parallel.materialize import Fill, drawn, imported
from phalanx.records import RunPaths
from phalanx.tasks.language import LanguageModel
from phalanx.tasks.task import Task

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
    held_out: Loader | None
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
    return spec_of(config, spec_from_config(read_config(kept.parent), str(kept)))


def build(config: "Config", spec: ModelSpec, mesh: Mesh, train_tokens: Path, held_out_tokens: Path) -> Parts:
    """Build everything that holds no state of the run yet; the model is on meta."""
    train = config.train
    assert train.micro_batch != "auto"
    # Ranks that were not started by one launcher have each measured what fits; the least of it is for all.
    micro_batch = int(mesh.min([train.micro_batch])[0])
    assert config.parallel.data != "auto"
    task = LanguageModel(config.data.seq_len)
    nominal_weight = task.nominal_weight(train.global_batch)
    model = on_meta(spec)
    engine = apply(model, config, mesh, ENGINES[config.parallel.data], nominal_weight)
    shape = (config.data.seq_len, train.global_batch, train.seed, mesh.rank, micro_batch)
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
