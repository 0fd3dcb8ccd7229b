"""Custom tasks (`task.code`): the user's network, samples that are read on demand, and loss.

Results of the user's file are checked where they enter, so that an error names file and line.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from phalanx.core.errors import ConfigError, DataError, PhalanxError
from phalanx.core.run_paths import HELD_OUT, RunPaths
from phalanx.core.user_code import describe_error, load_class
from phalanx.data.loader import SampleSet
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.batch_norm import batch_norms, convert_batch_norms
from phalanx.models.model import Model
from phalanx.parallel.init_weights import Fill, make_random_fill
from phalanx.tasks.task import Batch, CustomTask, DataSet, Task

if TYPE_CHECKING:
    from phalanx.config.schema import Config
    from phalanx.models.counter_rng import CounterRNG

T = TypeVar("T")


@dataclass(frozen=True)
class PositionedSample:
    """A sample of the user's and its place in the run, which no other has."""

    item: Any
    position: int


class CustomWorkload:
    """The subject that a user's class `Task` makes."""

    spec: ModelSpec | None = None
    unit = "samples"
    positions = 1
    takes_whole_share = False  # known once there is a model

    def __init__(self, config: "Config", paths: RunPaths | None = None) -> None:
        """Raises ConfigError where the file is none of a task, or its class cannot be made."""
        assert config.task.code is not None
        kept = paths.task_code if paths is not None and paths.task_code.is_file() else None
        self.file = Path(kept or config.task.code).expanduser().resolve()
        found = load_class("task.code", self.file, "Task", CustomTask)
        self.user_task: CustomTask = self.call_user_code("Task(**task.options)", lambda: found(**config.task.options))
        self._seed = config.train.seed

    def call_user_code(
        self, name: str, function: Callable[[], T], error: type[ConfigError] | type[DataError] = ConfigError
    ) -> T:
        """What a function of the user's returns; what it raises is a sentence of kind `error`."""
        try:
            return function()
        except PhalanxError:  # the user's file may say for itself what is wrong
            raise
        except (Exception, SystemExit) as caught:
            raise error(f"task.code {self.file}: {name} fails: {describe_error(caught, self.file)}; fix it") from caught

    def model(self, layers: int | None = None) -> Model:
        assert layers is None, "only a model with a spec has layers to choose"

        def make() -> Model:
            with torch.device("meta"):
                return self.user_task.model()

        model = self.call_user_code("model()", make)
        if not isinstance(model, Model):
            raise ConfigError(
                f"task.code {self.file}: model() returns no phalanx.models.model.Model but {_kind(model)}; derive the "
                "network's class from that"
            )
        convert_batch_norms(model)
        self.takes_whole_share = bool(batch_norms(model))
        return model

    def warnings(self) -> list[str]:
        return []

    def task(self) -> Task:
        return CheckedTask(self)

    @functools.cached_property
    def _datasets(self) -> dict[str, DataSet]:
        """The sets by name; the one to train on is called train()."""
        train, held_out = (
            self.call_user_code("train()", self.user_task.train),
            self.call_user_code("held_out()", self.user_task.held_out),
        )
        if held_out is None:
            return {"train()": train}
        named = held_out if isinstance(held_out, Mapping) else {HELD_OUT: held_out}
        for name in named:
            if not isinstance(name, str) or name in ("", "train", "train()"):
                raise ConfigError(
                    f"task.code {self.file}: held_out() gives a set the name {name!r}, but a name is a word, and "
                    "train is the training set; rename it"
                )
        return {"train()": train, **named}

    def train_data(self, folders: Sequence[tuple[Path, float]] = ()) -> list[tuple[SampleSet, float]]:
        return [(self._make_sample_set("train()"), 1.0)]

    def eval_data(self, folders: Mapping[str, Path] | None = None) -> dict[str, SampleSet]:
        return {name: self._make_sample_set(name) for name in self._datasets if name != "train()"}

    def _make_sample_set(self, name: str) -> "CustomSampleSet":
        data = self._datasets[name]
        return CustomSampleSet(self, name, data, self.call_user_code(f"len() of {_shown(name)}", lambda: len(data)))

    def fingerprints(self) -> dict[str, dict[str, Any]]:
        """By set: its length, and what the task knows it by."""
        found = {}
        for name, data in self._datasets.items():
            known_by = self.call_user_code("fingerprint(data)", functools.partial(self.user_task.fingerprint, data))
            found["train" if name == "train()" else name] = {"samples": len(data), "known_by": str(known_by)}
        return found

    def starting_weights(self, model: Model) -> Fill:
        return make_random_fill(model, self._seed)

    def flops(self) -> tuple[int, int] | None:
        """Counted as torch counts a pass of one sample on meta; nothing in it is taken to be causal."""
        model, batch = self.model(), self.task().collate(self.make_probe_samples(1)).to("meta")
        try:
            with FlopCounterMode(display=False) as counter:
                self.user_task.loss_sum(model, batch, None).backward()
        except Exception:  # of the user's code: what looks at values, say, cannot be counted so
            return None
        total = int(counter.get_total_flops())
        return (total, total) if total else None

    def make_probe_samples(self, count: int) -> list[Any]:
        rows = self._make_sample_set("train()")
        return [rows.sample(number % rows.count, number) for number in range(count)]


class CustomSampleSet:
    """A user's data set as rows. A sample that cannot be read is a DataError that says which."""

    def __init__(self, workload: CustomWorkload, name: str, data: DataSet, count: int) -> None:
        self.count, self._workload, self._name, self._data = count, workload, name, data

    def sample(self, number: int, position: int) -> PositionedSample:
        named = f"sample {number} of {_shown(self._name)}"
        return PositionedSample(self._workload.call_user_code(named, lambda: self._data[number], DataError), position)

    def describe(self) -> str:
        return f"{_shown(self._name)} of task.code {self._workload.file} has {self.count} samples"

    def warnings(self) -> list[str]:
        return []


class CheckedTask(Task):
    """The user's task as the trainer calls it: places are kept, and of no samples there is a batch all the same."""

    def __init__(self, workload: CustomWorkload) -> None:
        self._workload, self._user_task = workload, workload.user_task

    def collate(self, samples: Sequence[PositionedSample]) -> Batch:
        # Collectives pair up: a rank without samples walks through the model with one that weighs nothing.
        some = samples or self._workload.make_probe_samples(1)
        made = self._workload.call_user_code(
            "collate(samples)", lambda: self._user_task.collate([each.item for each in some]), DataError
        )
        batch = self._check_batch(made, len(some))
        places = torch.tensor([each.position for each in some], dtype=torch.int64)
        return replace(batch, samples=places, weight=batch.weight if samples else 0, padding=not samples)

    def _check_batch(self, batch: Any, count: int) -> Batch:
        file = self._workload.file
        if not isinstance(batch, Batch):
            raise ConfigError(
                f"task.code {file}: collate returns {_kind(batch)}, not phalanx.tasks.task.Batch with its inputs and "
                "its weight; return Batch(inputs, weight)"
            )
        if type(batch.weight) is not int or batch.weight < 0:
            raise ConfigError(
                f"task.code {file}: collate gives {count} sample{'s' if count > 1 else ''} the weight "
                f"{batch.weight!r}, but a weight is a whole number, 0 or more: how many losses their sum is of; fix it"
            )
        if not isinstance(batch.inputs, dict) or not all(isinstance(each, Tensor) for each in batch.inputs.values()):
            raise ConfigError(f"task.code {file}: the inputs of a Batch are a dictionary of tensors; fix collate")
        return batch

    def loss_sum(self, model: nn.Module, batch: Batch, draws: "CounterRNG | None") -> Tensor:
        for layer in batch_norms(model).values():
            layer.begin_pass(learns=draws is not None, counts=not batch.padding)
        loss = self._user_task.loss_sum(model, batch, draws)
        if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) and loss.dim() else "whole numbers"
            shape = f"a tensor of {what}" if isinstance(loss, Tensor) else _kind(loss)
            raise ConfigError(
                f"task.code {self._workload.file}: loss_sum returns {shape}, not the sum of the losses as a "
                "floating-point tensor without dims; fix it"
            )
        return loss if batch.weight else loss * 0.0

    def nominal_weight(self, global_batch: int) -> int:
        weight = self._workload.call_user_code(
            "nominal_weight(global_batch)", lambda: self._user_task.nominal_weight(global_batch)
        )
        if type(weight) is not int or weight < 1:
            raise ConfigError(
                f"task.code {self._workload.file}: nominal_weight returns {weight!r}, but it is a whole number above "
                "0: what a full global batch weighs; fix it"
            )
        return weight

    def counts(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        for layer in batch_norms(model).values():
            layer.begin_pass(learns=False)
        counts = self._user_task.counts(model, batch)
        return counts if batch.weight else {name: count * 0 for name, count in counts.items()}

    def scores(self, counts: dict[str, float]) -> dict[str, float]:
        scores = self._workload.call_user_code("scores(counts)", lambda: self._user_task.scores(counts))
        if not isinstance(scores, dict) or any(not isinstance(score, int | float) for score in scores.values()):
            raise ConfigError(f"task.code {self._workload.file}: scores returns no dictionary of numbers; fix it")
        return scores


def _shown(name: str) -> str:
    return name if name == "train()" else f"held_out() {name}" if name != HELD_OUT else "held_out()"


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
