"""`phalanx generate --tensor N --pipeline M`: text from a run's model that is split over several ranks."""

import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.node import agent
from phalanx.generate.text import Sampling, read_prompts
from phalanx.layout.mesh_axes import MeshAxes
from phalanx.storage import files as storage
from phalanx.system.fork import DEVICES_TIMEOUT_S, fork_call
from phalanx.system.torchrun_env import device_of

PRELOAD = ("torch", "torch._dynamo", "phalanx.generate.decode")
GRACE_S = 10.0
KEPT = ("model", "data", "task")  # sections of the run's configuration; the others say how it was trained


@dataclass(frozen=True)
class GenerationRequest:
    """The request to all ranks: `as_lines` prints JSON lines of prompt and completion, else text is streamed."""

    paths: RunPaths
    axes: MeshAxes
    prompts: list[str]
    sampling: Sampling
    as_lines: bool


def complete_over_ranks(model: str, axes: MeshAxes, prompt: str, file: Path | None, sampling: Sampling) -> int:
    """Print the completion of `prompt`, or of each prompt of a `file`; returns the exit code. Raises ConfigError
    for anything but a run folder on this machine, and for degrees that do not divide its model.
    """
    paths = RunPaths(Path(model))
    if storage.is_url(model) or not paths.config.is_file():
        raise ConfigError(f"--tensor and --pipeline read the checkpoint of a run folder, and {model} is none; name one")
    asked = GenerationRequest(paths, axes, [prompt] if file is None else read_prompts(file), sampling, file is not None)
    agent.preload(PRELOAD)
    fork_call(_check_config, str(paths.root), axes.tensor, axes.pipeline, timeout_s=DEVICES_TIMEOUT_S)
    devices: list[str] = fork_call(_find_accelerators, timeout_s=DEVICES_TIMEOUT_S)
    job = agent.NodeJob(
        world=axes.model_parallel_size,
        worker=functools.partial(_run_rank, asked),
        devices=[device_of(devices, rank, axes.model_parallel_size) for rank in range(axes.model_parallel_size)],
        on_event=lambda kind, details: None,
        grace_s=GRACE_S,
    )
    return agent.run_local_job(job)


def _find_accelerators() -> list[str]:
    from phalanx.system import accelerator

    return accelerator.list_devices()


def _check_config(folder: str, tensor: int, pipeline: int) -> None:
    """Check the configuration in a child; otherwise each rank would report the error. Raises ConfigError."""
    _config(RunPaths(Path(folder)), MeshAxes(tensor, pipeline))


def _config(paths: RunPaths, axes: MeshAxes) -> Any:
    """The run's model in a layout of these `axes`."""
    from phalanx.config.load import build_config
    from phalanx.config.model_spec import MOE_SHAPE_FIELDS
    from phalanx.trainer.run_folder import read_run_config

    config = read_run_config(paths)
    if config is None:
        raise ConfigError(f"{paths.display_name} has no checkpoint yet, so there is no model; train it first")
    if config.task.kind != "language":
        raise ConfigError(f"{paths.display_name} was trained for task.kind {config.task.kind}, which writes no text")
    tree = {name: getattr(config, name).model_dump(mode="json", exclude_unset=True) for name in KEPT}
    tree["model"]["moe"] = {name: getattr(config.model.moe, name) for name in MOE_SHAPE_FIELDS}  # not their balancing
    tree["train"] = {"dtype": config.train.dtype, "compile": False}
    tree["parallel"] = {"tensor": axes.tensor, "pipeline": axes.pipeline, "sequence_parallel": False}
    tree["comm"] = {"timeout_s": config.comm.timeout_s}
    return build_config(tree, "the model in this layout")


def _run_rank(request: GenerationRequest, placement: Placement) -> int:
    """Generate on one rank. Rank 0 prints."""
    import torch
    from transformers import AutoTokenizer

    from phalanx.comm.mesh import join
    from phalanx.generate import decode
    from phalanx.system import accelerator
    from phalanx.workload.workload import read_model_shape

    accelerator.set_device(
        torch.device(placement.device), accelerator.threads_per_rank(placement.threads, placement.local_world)
    )
    config, sampling = _config(request.paths, request.axes), request.sampling
    tokenizer: Any = AutoTokenizer.from_pretrained(request.paths.tokenizer, local_files_only=True)
    spec = read_model_shape(config, request.paths)
    choice = decode.SamplingOptions(sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty)
    with join(placement, config.comm.timeout_s, axes=request.axes) as mesh:
        together = decode.load_distributed_model(config, spec, request.paths, mesh)
        for prompt in request.prompts:
            tokens = list(tokenizer(prompt)["input_ids"])
            if not tokens:
                raise ConfigError("the prompt has no tokens; give some text with --prompt")
            shown = _StreamedText(tokenizer, mesh.rank == 0 and not request.as_lines, prompt)
            generator, begun = torch.Generator().manual_seed(sampling.seed), len(tokens)
            while len(tokens) < min(begun + sampling.max_tokens, spec.max_seq_len):
                tokens.append(together.next_token(tokens, choice, generator))
                if tokens[-1] == tokenizer.eos_token_id:
                    break
                shown.more(tokens[begun:])
            shown.end(tokens[begun:])
            if request.as_lines and mesh.rank == 0:
                _say(json.dumps({"prompt": prompt, "completion": shown.text}, ensure_ascii=False) + "\n")
        together.close()
    return ExitCode.DONE


class _StreamedText:
    """Streamed text: prints what later tokens cannot change any more."""

    def __init__(self, tokenizer: Any, prints: bool, prompt: str) -> None:
        self._tokenizer, self._prints, self.text = tokenizer, prints, ""
        if prints:
            _say(prompt)

    def more(self, tokens: Sequence[int]) -> None:
        self._print(self._tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\ufffd"))

    def end(self, tokens: Sequence[int]) -> None:
        self._print(self._tokenizer.decode(tokens, skip_special_tokens=True))
        if self._prints:
            _say("\n")

    def _print(self, text: str) -> None:
        if self._prints:
            _say(text[len(self.text) :])
        self.text = text


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
