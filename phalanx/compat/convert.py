"""`phalanx convert`: detect the format of another program's checkpoint, and convert it."""

from pathlib import Path

import torch

from phalanx.compat.hetseq import open_hetseq
from phalanx.compat.megatron.import_folder import is_megatron, open_megatron
from phalanx.compat.torch_checkpoints import is_torch_checkpoint, open_torch_checkpoint
from phalanx.compat.trained_state import ModelFolder, TrainedState
from phalanx.core.errors import ConfigError
from phalanx.models.hf_weights import DTYPES


def convert_checkpoint(
    source: Path, target: Path, *, config: Path | None, to_run: bool = False, dtype: str | None = None,
    step: int | None = None,
) -> str:  # fmt: skip
    """Write a checkpoint of Megatron, torch.distributed.checkpoint or HetSeq as a Hugging Face folder, or `to_run`:
    with Adam's state as the first checkpoint of a run folder. Returns what was made, for the user.

    `config` is a folder with the config.json of the model, and tokenizer files. Raises ConfigError.
    """
    if dtype is not None and (dtype not in DTYPES or to_run):
        raise ConfigError(
            f"--dtype {dtype} is not for this; of a Hugging Face folder, choose one of {', '.join(DTYPES)}"
        )
    state = _open(source, config, step, to_run)
    if to_run:
        return f"step {state.write_run(target)} of {source} is now the newest checkpoint of the run folder {target}"
    chosen: torch.dtype | None = DTYPES[dtype] if dtype is not None else None
    state.write_hf(target, chosen)
    return f"{source} is now the Hugging Face folder {target}"


def _open(source: Path, config: Path | None, step: int | None, moments: bool) -> TrainedState:
    if not source.exists():
        raise ConfigError(f"{source} does not exist; name a checkpoint")
    if is_megatron(source):
        return open_megatron(source, None if config is None else ModelFolder.open(config), step, moments)
    if not is_torch_checkpoint(source) and not source.is_file():
        raise ConfigError(
            f"{source} is not a folder of torch.distributed.checkpoint (it has no .metadata), Megatron or "
            "HetSeq; name the folder of one step"
        )
    if config is None:
        raise ConfigError(
            f"{source} does not name its model; give --config with a folder that has its config.json, and its tokenizer"
        )
    model = ModelFolder.open(config)
    return open_torch_checkpoint(source, model, step) if source.is_dir() else open_hetseq(source, model)
