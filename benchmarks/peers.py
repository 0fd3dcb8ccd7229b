"""The ways to train the same Llama that single_device.py compares: Phalanx's own loop, plain loops, and Trainer.

All see the same batches in the same order, from the same weights, with the same optimizer settings. Each keeps the
losses of its steps, so that it can be shown that they do the same work.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.core.placement import Placement
from phalanx.core.run_paths import RunPaths
from phalanx.layout.batch_ramp import make_batch_schedule
from phalanx.layout.mesh_axes import MeshAxes
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.families.catalog import parameter_shapes
from phalanx.models.hf_config import config_from_spec
from phalanx.models.llama import Llama, init_slice
from phalanx.models.user_model import hf_name
from tests.token_sets import TokenWriter

LR, BETAS, EPS, DECAY, CLIP, SEED = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0, 0


@dataclass(frozen=True)
class Case:
    """What is trained. `micro_batch` and `global_batch` in sequences; `dtype` as in a recipe."""

    spec: ModelSpec
    seq_len: int
    micro_batch: int
    global_batch: int
    dtype: str
    compile: bool
    device: torch.device
    activations: str = "none"

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.global_batch * self.seq_len


class Peer(Protocol):
    """One way to train. `run(count)` makes that many further steps; `losses()` are those of all steps so far."""

    name: str

    def run(self, count: int) -> None: ...

    def losses(self) -> list[float]: ...


def write_tokens(folder: Path, vocab_size: int, count: int) -> Path:
    """A token set of `count` tokens whose frequencies fall off as in text, so that there is something to learn."""
    ids = np.random.default_rng(SEED).zipf(1.3, size=count) % (vocab_size - 1) + 1
    writer = TokenWriter(folder, vocab_size, eos_id=0, key="benchmark")
    writer.append(ids.astype(np.int64))
    writer.finish()
    return folder


# ------------------------------------------------------------------------------------------------------------ Phalanx


def settings(case: Case) -> Any:
    """A resolved configuration: what the trainer reads of one, in its shape.

    It stands in for phalanx.config.schema.Config so that a machine without pydantic can run the benchmark.
    """
    return SimpleNamespace(
        model=SimpleNamespace(from_hf=None, code=None, lora=case.spec.lora),
        data=SimpleNamespace(
            seq_len=case.seq_len,
            format="text",
            isolate_documents=False,
            mask_document_end=False,
            too_long="truncate",
            read_ahead=0,
        ),
        train=SimpleNamespace(
            fp8="none",
            global_batch=case.global_batch,
            batches=make_batch_schedule(case.global_batch),
            micro_batch=case.micro_batch,
            seed=SEED,
            dtype=case.dtype,
            compile=case.compile,
            eval_sequences=0,
            patience=0,
            profile=None,
            memory_snapshot=0,
            stop_after=None,
            stop_every=0,
            steps=2**53,
        ),
        optim=SimpleNamespace(
            name="adamw", options={}, lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS,
            weight_decay=DECAY, clip_norm=CLIP, schedule="constant", warmup_steps=0, decay_steps=1, min_lr_ratio=1.0,
        ),
        task=SimpleNamespace(kind="language", code=None, options={}),
        balance=SimpleNamespace(batch="even", context="even", experts="even", hardware=None),
        parallel=SimpleNamespace(
            engine="single", context=1, expert=1, axes=MeshAxes(), lockstep=False, resolve_sharding=(1, "per_step")
        ),
        memory=SimpleNamespace(activations=case.activations),
        resilience=SimpleNamespace(on_nan="skip", on_spike="off", checksum_every=0),
        checkpoint=SimpleNamespace(best=False),
    )  # fmt: skip


@dataclass
class Phalanx:
    """The trainer's own loop, step by step: data, engine, records and all, without checkpoints and evaluations."""

    loop: Any
    device: torch.device
    name: str = "Phalanx"
    done: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)

    def run(self, count: int) -> None:
        self.loop.recorder.restart_clock()
        for _ in range(count):
            self.done += 1
            self.loop.train_step(self.done)
        synchronise(self.device)

    def losses(self) -> list[float]:
        self.loop.setup.records.write_step(self.loop.recorder.flush())
        return [record["loss"] for record in self.records]

    def on_step(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def on_event(self, event: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


@contextlib.contextmanager
def phalanx(case: Case, tokens: Path, folder: Path) -> Iterator[Phalanx]:
    """A run of `case` in `folder`, ready for its first step."""
    from phalanx.checkpoint.disk.save import CheckpointSaver
    from phalanx.comm.mesh import join
    from phalanx.comm.rendezvous import JsonGroup
    from phalanx.parallel.init_weights import make_adapter_fill
    from phalanx.trainer.loop import TrainingLoop
    from phalanx.trainer.setup import TrainingJob, TrainingSetup
    from phalanx.trainer.stop_request import StopRequest
    from phalanx.workload.build import build_components
    from phalanx.workload.sinks import RecordWriter

    config, paths = settings(case), RunPaths(folder)
    folder.mkdir(parents=True)
    placement = Placement(
        rank=0, world=1, local_rank=0, local_world=1, node=0, device=str(case.device), store=None
    )  # fmt: skip
    peer = Phalanx(None, case.device)
    with join(placement, timeout_s=60.0) as mesh:
        records = RecordWriter(paths, 1, [peer], active=True)
        parts = build_components(config, case.spec, mesh, [(tokens, 1.0)], {})
        if case.spec.lora is not None:  # beside weights that were drawn: here only speed and memory count
            parts.starting_weights = make_adapter_fill(parts.starting_weights, SEED, None)
        saver = CheckpointSaver(paths.checkpoints, 0, JsonGroup(mesh.checkpoint), 1, records.write_event)
        run = TrainingJob(config, case.spec, paths, [(tokens, 1.0)], {})
        peer.loop = TrainingLoop(TrainingSetup(run, placement, mesh, parts, records, saver, StopRequest()))
        peer.loop.restore()
        try:
            yield peer
        finally:
            saver.close()
            records.close()


def batches_of(case: Case, tokens: Path) -> Callable[[int], tuple[Tensor, Tensor]]:
    """The trainer's own batches: a function of the step (the first is 0) to tokens and labels, on the host."""
    from phalanx.data.loader import Loader
    from phalanx.data.packing import PackingOptions, make_rows
    from phalanx.data.record_files import TokenFile
    from phalanx.layout.balance import Division
    from phalanx.tasks.language import CausalLMTask

    rows = make_rows(TokenFile(tokens), PackingOptions(case.seq_len), SEED)
    loader = Loader([(rows, 1.0)], case.global_batch, SEED, 0)
    task = CausalLMTask(case.seq_len)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        [samples] = loader.batches(step, Division((case.global_batch,), 1))
        inputs = task.collate(samples).inputs
        return inputs["tokens"], inputs["labels"]

    return batch


# -------------------------------------------------------------------------------------------------------- plain loops


def weights(spec: ModelSpec, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The values that Phalanx starts from, by name, in fp32."""
    for name, shape in parameter_shapes(spec).items():
        elements = torch.Size(shape).numel()
        yield name, init_slice(spec, SEED, name, 0, elements, device, torch.float32).view(shape)


def own_model(spec: ModelSpec, device: torch.device) -> nn.Module:
    """Phalanx's model on its own, in fp32."""
    with device:
        model = Llama(spec)
    model.load_state_dict(dict(weights(spec, device)))
    return model


def transformers_model(spec: ModelSpec, device: torch.device) -> nn.Module:
    """transformers' model of the same shape and weights, in fp32, with its fused attention."""
    import transformers

    config = transformers.LlamaConfig.from_dict(config_from_spec(spec, torch.float32))
    config.use_cache = False
    config._attn_implementation = "sdpa"
    with device:  # on an accelerator its random start, which is then overwritten, takes no time
        model = transformers.LlamaForCausalLM(config)
    values = {hf_name(name): value for name, value in weights(spec, device)}
    missing, unexpected = model.load_state_dict(values, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model


LossOf = Callable[[nn.Module, Tensor, Tensor], Tensor]


def own_loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Mean loss by Phalanx's model."""
    return model(tokens, labels) / labels.numel()


def transformers_loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Mean loss by transformers' model, of labels that are shifted already, as Phalanx's loader makes them."""
    return model(input_ids=tokens, labels=labels, shift_labels=labels).loss


class Plain:
    """The shortest loop that trains the same: batches lie ready in memory, nothing is recorded but the loss."""

    def __init__(self, name: str, model: nn.Module, loss_of: LossOf, case: Case, batches: Sequence[Any]) -> None:
        self.name, self.device, self.batches = name, case.device, batches
        self.model = model.train()
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)
        self.loss_of = torch.compile(loss_of) if case.compile else loss_of
        # bf16 keeps master weights in fp32, as Phalanx does: that is autocast, not a model converted to bf16.
        self.autocast = case.dtype == "bf16"
        self.raw: list[Tensor] = []

    def run(self, count: int) -> None:
        for _ in range(count):
            tokens, labels = (part.to(self.device, non_blocking=True) for part in self.batches[len(self.raw)])
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                loss = self.loss_of(self.model, tokens, labels)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.raw.append(loss.detach())
        synchronise(self.device)

    def losses(self) -> list[float]:
        return [float(loss) for loss in self.raw]


# ------------------------------------------------------------------------------------------------------------ Trainer


def drive_trainer(
    case: Case,
    batches: Sequence[Any],
    folder: Path,
    block: int,
    turn: Callable[[], bool],
    model: nn.Module | None = None,
) -> list[float]:
    """Train by transformers.Trainer over `batches`; after every `block` of its steps call `turn`, which says whether
    to go on. Returns its losses. `model` is trained instead of transformers' own of the case.

    It holds the reins because its loop cannot be entered step by step; between two turns only its own work is done.
    Its settings are the fastest that train the same: fused AdamW, no logging, no saving, batches ready in memory.
    """
    import transformers
    from torch.utils.data import SequentialSampler

    transformers.logging.set_verbosity_error()  # it warns that a process group exists: Phalanx's own, of one rank
    losses: list[Tensor] = []

    class Trainer(transformers.Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.detach())
            return loss

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
            return SequentialSampler(cast(Sized, self.train_dataset))

    class Turns(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % block == 0:
                synchronise(case.device)
                control.should_training_stop = not turn() or control.should_training_stop

    samples = [
        {"input_ids": tokens, "labels": labels, "shift_labels": labels}
        for step in batches
        for tokens, labels in zip(*step, strict=True)
    ]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=len(batches),
        per_device_train_batch_size=case.micro_batch,
        gradient_accumulation_steps=case.global_batch // case.micro_batch,
        learning_rate=LR,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        bf16=case.dtype == "bf16",
        torch_compile=case.compile,
        use_cpu=case.device.type == "cpu",
        dataloader_pin_memory=case.device.type != "cpu",
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    # On a machine of several accelerators Trainer would spread itself over all of them.
    assert arguments.n_gpu >= 0  # reading it makes it final
    arguments._n_gpu = min(1, arguments._n_gpu)
    chosen = transformers_model(case.spec, case.device) if model is None else model
    trainer = Trainer(model=chosen, args=arguments, train_dataset=samples, callbacks=[Turns()])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [float(loss) for loss in losses]


def synchronise(device: torch.device) -> None:
    """Wait for the device to finish what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
