"""A small copy of a run's model that one rank trains alone for a moment, to see what a pass of it takes."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.comm.mesh import Mesh
from phalanx.engine.interface import Engine
from phalanx.engine.single import SingleEngine
from phalanx.models.model import Model
from phalanx.optim.update import Shard
from phalanx.parallel.fp8_delayed import rehearse
from phalanx.parallel.init_weights import materialize
from phalanx.parallel.parallelize import parallelize
from phalanx.system import accelerator
from phalanx.tasks.task import Batch, Task
from phalanx.workload.step import run_micro_batches
from phalanx.workload.workload import TextWorkload, Workload

if TYPE_CHECKING:
    from phalanx.config.schema import Config

UNSHARDED = {  # what a recipe becomes for a rank that is alone
    "train.compile": False,
    "parallel.engine": "single",
    "parallel.tensor": 1,
    "parallel.sequence_parallel": "auto",
    "parallel.pipeline": 1,
    "parallel.context": 1,
    "parallel.context_by": "auto",
    "balance.context": "auto",
    "parallel.expert": 1,
    "balance.experts": "auto",
    "parallel.schedule": "1f1b",
    "parallel.layers_per_stage": "auto",
    "parallel.zero": "auto",
    "parallel.grad_reduce": "auto",
    "balance.optimizer_state": "auto",
    "optim.double_buffer": False,
    "comm.compress": "none",
}


def shorten_rows(config: "Config", workload: Workload) -> tuple["Config", Workload]:
    """What a rank is measured with: rows of as many positions as an even part of a row has, since a device alone need
    not have room for a whole one. The same where rows are not shared."""
    parts = config.parallel.context
    if parts == 1:
        return config, workload
    from phalanx.config.load import update_config  # needs pydantic; the loop itself does not

    short = update_config(
        config,
        {
            "data.seq_len": -(-config.data.seq_len // parts),
            "parallel.context": 1,
            "parallel.context_by": "auto",
            "balance.context": "auto",
            "balance.batch": "even",  # a list of it has a number for each group
        },
    )
    assert workload.spec is not None
    return short, TextWorkload(short, workload.spec)


@dataclass
class ProbeModel:
    """A model that is trained uncompiled; its weights are noise and what it learns is nothing."""

    mesh: Mesh  # of this rank alone
    workload: Workload
    task: Task
    engine: Engine
    model: Model
    base_bytes: int  # that were held before any step
    step: int = 0

    def make_batch(self, samples: int) -> Batch:
        return self.task.collate(self.workload.make_probe_samples(samples)).to(self.mesh.device)

    def measure_peak_bytes(self, samples: int) -> int:
        """Bytes that a whole step with one micro-batch of so many samples adds at its height to what was held before
        the first: a host gives memory back late."""
        if self.mesh.traffic.progress_page is not None:
            self.mesh.traffic.progress_page.set_largest_micro_batch(samples)
        batch, device = self.make_batch(samples), self.mesh.device
        accelerator.reset_peak_memory(device)
        self._begin(batch.weight)
        self._pass(batch)
        self._end()
        return accelerator.peak_memory(device) - self.base_bytes

    def measure_seconds(self, samples: int, passes: int = 1) -> float:
        """Seconds of one forward and backward pass of so many samples, a mean over `passes`."""
        batch, device = self.make_batch(samples), self.mesh.device
        self._begin(batch.weight)
        accelerator.synchronize(device)
        begun = time.perf_counter()
        for _ in range(passes):
            self._pass(batch)
        accelerator.synchronize(device)
        seconds = time.perf_counter() - begun
        self._end()
        return seconds / passes

    def discard_step(self) -> None:
        """Forget the step that memory ran out in, so that another can be tried."""
        self.model.zero_grad()
        self.engine.commit(self.step)

    def _begin(self, weight: int) -> None:
        self.step += 1
        self.engine.begin_step(self.step, weight, lr=0.0, clip=None)

    def _pass(self, batch: Batch) -> None:
        run_micro_batches(self.engine, self.model, self.task, [batch], seed=0, step=self.step, nominal_weight=1)

    def _end(self) -> None:
        self.engine.finish_step()
        self.engine.commit(self.step)


@contextlib.contextmanager
def open_probe_model(config: "Config", workload: Workload, mesh: Mesh, layers: int | None) -> Iterator[ProbeModel]:
    """The subject's model with so many `layers` (None: as it is) on the device of `mesh`, which is of one rank."""
    from phalanx.config.load import update_config  # needs pydantic; the loop itself does not

    assert mesh.world == 1
    eager = update_config(config, UNSHARDED)
    model = workload.model(layers)
    engine, _ = parallelize(model, eager, mesh, SingleEngine, nominal_weight=1)
    materialize(model, engine, _noise)
    rehearse(model)
    accelerator.reset_peak_memory(mesh.device)
    yield ProbeModel(mesh, workload, workload.task(), engine, model, accelerator.peak_memory(mesh.device))


def _noise(shard: Shard) -> None:
    """Neither zeros, which some devices multiply faster, nor drawn with care, which takes long."""
    shard.tensor.uniform_(-0.02, 0.02)
