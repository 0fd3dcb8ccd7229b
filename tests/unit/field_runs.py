"""The tiny runs in which `test_fields` sees what a key of the configuration does: their data, what is seen of them."""

import dataclasses
import json
import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

from phalanx.config import load, resolve
from phalanx.core.json_lines import read_lines
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths

Seen = dict[str, Any]
BASE: dict[str, dict[str, Any]] = {
    "model": {"hidden": 16, "layers": 1, "heads": 2, "intermediate": 32},
    "data": {"source": "SOURCE", "tokenizer_vocab": 300, "seq_len": 8, "held_out": 0.3, "cache": "CACHE"},
    "train": {"steps": 3, "global_batch": 4, "micro_batch": 2, "dtype": "fp64", "compile": False, "eval_sequences": 4},
    "optim": {"lr": 1e-2, "decay_steps": 6},
    "checkpoint": {"every": 0},
    "report": {"tensorboard": False},
}
LORA = {"model": {"from_hf": "FOLDER/exported", "lora": {"rank": 2}}}
EXPERTS = {"experts": 3, "experts_per_token": 2, "balance": "step_before", "balance_weight": 0.5}
MOE = {"model.architecture": "qwen3_moe", "model.layers": 2, "model.moe": EXPERTS}
GROUPS = {"experts": 8, "experts_per_token": 2, "groups": 2, "groups_per_token": 1, "balance": "none"}
LATENT = {"model.architecture": "deepseek_v3", "model.layers": 2, "model.latent": [0, 12, 4, 6], "model.moe": GROUPS}
PROMPTS = {"data.format": "prompt", "data.prompt_key": "title", "data.completion_key": "text", "data.seq_len": 44}
CHAT = {"data.source": "FOLDER/talks.jsonl", "data.format": "chat", "data.chat_template": "chatml", "data.seq_len": 64}
# Weights shrink to a quarter in a step, and what is small in a tensor becomes zero.
DELAYED = {"train.fp8": "delayed", "train.fp8_margin": 6, "optim.weight_decay": 150.0}
SGD = {"optim.name": "sgd", "optim.lr": 0.5}
OFFLOAD = {"memory.activations": "offload", "model.layers": 3}
WSD = {"optim.schedule": "wsd"}
ROPE = {"model.rope_scaling": {"original_max_seq_len": 64}}  # so short that even a tiny head has waves to stretch
YARN = {"model.rope_scaling": {"original_max_seq_len": 64, "rule": "yarn"}}
MASKED = {"model.architecture": "bert", "data.seq_len": 16, "data.source": "FOLDER/labelled.jsonl"}
MASKED |= {"data.text_key": "title"}  # of long words
TAG = MASKED | {"task.kind": "tag"}
CLASSIFY = TAG | {"task.kind": "classify"}
OWN_TASK = """
import torch
from torch import nn
from phalanx.models.model import Model
from phalanx.tasks.task import CustomTask
from phalanx.tasks.task import Batch


class Net(Model):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = nn.Linear(2, width), nn.Linear(width, 1)

    def forward(self, x):
        return self.two(self.one(x).tanh())


class Task(CustomTask):
    def __init__(self, width=3):
        self.width = width

    def model(self):
        return Net(self.width)

    def train(self):
        return [torch.tensor([i / 9, 1.0]) for i in range(9)]

    def collate(self, samples):
        return Batch({"x": torch.stack(samples)}, len(samples))

    def loss_sum(self, model, batch, draws):
        return (model(batch.inputs["x"]) - TARGET).square().sum()
"""
TASK: dict[str, Any] = {"model": {}, "data": {}, "task.code": "FOLDER/task.py"}
OWN = """
from phalanx.models import llama


class Attention(llama.Attention):
    def forward(self, x, cos, sin, *rest):
        return super().forward(x, cos * 0 + 1, sin * 0, *rest)


class Block(llama.Block):
    def __init__(self, spec, layer):
        super().__init__(spec, layer)
        self.attention = Attention(spec, layer)


class Model(llama.Llama):
    block = Block
"""


# ---------------------------------------------------------------------------------------------- inside a rank's process


def configured(changes: dict[str, Any], folder: Path) -> load.Config:
    tree = load.apply_overrides(BASE, [])
    for section, values in tree.items():
        tree[section] = dict(values)
    for key, value in changes.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    text = json.dumps(tree).replace("SOURCE", str(folder / "text.jsonl")).replace("CACHE", str(folder / "cache"))
    made = load.build_config(json.loads(text.replace("FOLDER", str(folder))), "the test's recipe")
    return resolve.resolve_autos(made, device="cpu", world=1)[0]


def walk(placement: Placement, changes: dict[str, Any], folder: Path, run: Path) -> Seen:
    """One run as `phalanx train` makes it, in this process, and everything that can be seen of it afterwards."""
    from phalanx.checkpoint.disk.load import Checkpoint, list_steps, step_folder
    from phalanx.launch import prepare
    from phalanx.system import accelerator
    from phalanx.trainer import run_folder
    from phalanx.trainer.resolve import make_training_job, resolve_with_files

    run.mkdir()
    paths = RunPaths(run)
    answer = resolve_with_files(load.to_yaml(configured(changes, folder)), ["cpu"], 1, 1, None)
    config = load.from_yaml(answer["config"], "answer")
    run_folder.write_start(paths, config, answer["tokenizer"])
    job = make_training_job(answer, paths)
    # As on a machine so full that a rank gets one thread: threads that spin are slow where cores are busy.
    with mock.patch.object(accelerator, "set_arithmetic") as set_arithmetic:  # it is the whole process's
        code = prepare.worker(job, dataclasses.replace(placement, threads=1))
    steps, events = read_steps(paths.metrics), list(read_lines(paths.events))
    newest = Checkpoint(step_folder(paths.checkpoints, list_steps(paths.checkpoints)[0]))
    return {
        "code": code,
        "arithmetic": set_arithmetic.call_args.kwargs,
        "config": config.model_dump(mode="json"),
        "parameters": answer["parameters"],
        "spec": {"max_seq_len": job.spec.max_seq_len, "vocab_size": job.spec.vocab_size} if job.spec else {},
        "train_tokens": [folder for folder, _ in answer["train"]],
        **{
            name: [step[name] for step in steps] for name in ("loss", "grad_norm", "lr", "tokens", "step", "loss_scale")
        },
        "evaluated": [(e["step"], e["tokens"], e["loss"]) for e in events if e["kind"] == EventKind.EVALUATED],
        "checkpoints": list_steps(paths.checkpoints),
        "saved": [e["step"] for e in events if e["kind"] == EventKind.CHECKPOINT_SAVED],
        "stored": next(iter(newest.parameters.values()))[1],
        "tensorboard": paths.tensorboard.exists(),
        "wandb": sorted(path.name[:11] for path in (paths.root / "wandb").glob("offline-run-*")),
        "inside": sorted(path.name for path in paths.profile.iterdir()) if paths.profile.exists() else [],
        "tokenizer_bytes": (paths.tokenizer / "tokenizer.json").stat().st_size if paths.tokenizer.exists() else 0,
    }


def look(placement: Placement, changes: dict[str, Any], folder: Path) -> Seen:
    """Build the parts of a run and take one step with them by hand."""
    from phalanx.comm.mesh import join
    from phalanx.parallel.init_weights import materialize
    from phalanx.trainer.resolve import resolve_with_files, token_folders
    from phalanx.workload.build import build_components
    from phalanx.workload.step import run_micro_batches
    from phalanx.workload.workload import read_model_shape

    answer = resolve_with_files(load.to_yaml(configured(changes, folder)), ["cpu"], 1, 1, None)
    config = load.from_yaml(answer["config"], "answer")
    with join(placement, config.comm.timeout_s) as mesh:
        parts = build_components(config, read_model_shape(config), mesh, *token_folders(answer))
        materialize(parts.model, parts.engine, parts.starting_weights)
        block = dict(parts.model.units())["layers.0"]
        seen = {"engine": type(parts.engine).__name__, "compiled": "dynamo" in str(vars(block.forward))}
        if seen["compiled"]:
            return seen  # compiling takes far longer than everything else here
        norms: list[int] = []
        block.attention_norm.register_forward_hook(lambda *_: norms.append(1))
        batches = [parts.task.collate(samples) for samples in parts.train.batches(0, parts.work_split.division)]
        parts.engine.begin_step(1, sum(batch.weight for batch in batches), 1e-3, None)
        run_micro_batches(parts.engine, parts.model, parts.task, batches, seed=0, step=1, nominal_weight=1)
        parts.engine.finish_step()
        moved = block.forward.func.__self__.out_bytes if config.memory.activations == "offload" else 0
        reading = sum(thread.name.startswith("read-ahead") for thread in threading.enumerate())
        parts.close()
        return seen | {
            "reading": reading,
            "micro_batches": len(batches),
            "forward_calls": len(norms),
            "moved_bytes": moved,
        }


def observe(placement: Placement, folder: str, cases: list[tuple[str, str, dict[str, Any]]]) -> dict[str, Seen]:
    """Each (name, walk or look, changes), one after the other; a case that fails leaves its error in its place."""
    import torch

    from phalanx.trainer.export import export_run

    torch.set_num_threads(1)
    os.environ["WANDB_MODE"] = "offline"
    root, found = Path(folder), {}
    for number, (name, how, changes) in enumerate(cases):
        try:
            run = root / f"run-{number}"
            found[name] = walk(placement, changes, root, run) if how == "walk" else look(placement, changes, root)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        if name in ("base", "lora"):
            export_run(RunPaths(run), root / ("exported" if name == "base" else "adapter"), None)
    return found


def write_text(folder: Path) -> None:
    for name, word in (("text", "hello"), ("other", "goodbye")):
        lines = [{"text": f"document {i} says {word} {'again ' * (i % 5 + 5)}", "title": f"{i} * {i} = {i * i}, {word}!"
                  * 3} for i in range(60)]  # fmt: skip
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "own.py").write_text(OWN)
    (folder / "task.py").write_text(OWN_TASK.replace("TARGET", "1.0"))
    (folder / "other_task.py").write_text(OWN_TASK.replace("TARGET", "2.0"))
    labelled = []
    for i in range(60):
        words, numbers = [f"hello{i}", "again", str(i)], [str((i + 1) * 104729**2), "good", f"bye{i * 7919**2}"]
        one = {"tokens": words, "others": numbers, "ner_tags": ["B-W", "O", "O"], "tags": ["O", "B-W", "O"]}
        texts = {"text": " ".join(words), "title": " ".join(numbers)}
        labelled.append(one | texts | {"label": i % 2, "other": i % 3 % 2})
    (folder / "labelled.jsonl").write_text("".join(json.dumps(line) + "\n" for line in labelled))
    talks = []
    for i in range(60):
        ask, answer = {"role": "user", "content": f"{i} * {i}?"}, {"role": "assistant", "content": f"{i * i}, said {i}"}
        talks.append({"messages": [ask, answer], "short": [ask, answer | {"content": "no"}]})
    (folder / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    (folder / "own.jinja").write_text(
        "{% for m in messages %}{{ m.role + ': ' }}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
