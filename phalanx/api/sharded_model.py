"""What a training loop of one's own calls once `phalanx.shard` has its model: steps, evaluation, checkpoints.

    with phalanx.shard(model, lr=1e-3) as sharded:
        for batches in data:
            with sharded.step(batches, weight=samples_of(batches)) as step:
                for batch in step:
                    step.backward(loss_sum(model, batch))

Losses are sums and weights are counts, so that neither ranks nor micro-batches change the mean.
"""

import contextlib
import json
import math
import operator
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from phalanx.checkpoint.disk.load import Checkpoint, agree_on_newest
from phalanx.checkpoint.disk.save import CheckpointSaver
from phalanx.comm.collectives import PendingCollective, all_reduce
from phalanx.comm.compression import describe_node_change
from phalanx.comm.mesh import Mesh
from phalanx.comm.rendezvous import JsonGroup
from phalanx.core.errors import CheckpointError, CollectiveError, ConfigError, RunError
from phalanx.engine.interface import StepOutcome
from phalanx.engine.sharded import ShardedEngine
from phalanx.layout.tensor_shards import TensorShard, whole_shapes
from phalanx.optim import gradients
from phalanx.parallel.model_part import make_shard_reader, to_whole_pieces

Batch = TypeVar("Batch")
Rate = float | Callable[[int], float]


class ShardedModel:
    """A model on the sharded engine. All ranks make the same calls in the same order.

    `rank`, `world` and `device` are this process's, of those that are to see different data; `mesh` holds the process
    groups, which are this model's own, and `engine` does the work. Of a model that was transformed the ranks that hold
    slices of one copy count as one, and see the same data.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: ShardedEngine,
        mesh: Mesh,
        left: contextlib.ExitStack,
        *,
        master: torch.dtype,
        lr: Rate,
        clip_norm: float | None,
        slices: Mapping[str, TensorShard] = MappingProxyType({}),
    ) -> None:
        """`left` is closed when this is; `master` is the type of the engine's state; `slices` of parameters are what
        this rank has of them."""
        self.model, self.mesh, self._slices = model, mesh, dict(slices)
        self.rank, self.world, self.device = mesh.data.rank, mesh.data.world, mesh.device
        self.engine, self._exit_stack, self._lr, self._clip_norm = engine, left, lr, clip_norm
        # What is asked for between steps has a group of its own: a rank that asks alone must not get another's answer.
        self._side_mesh = replace(mesh.data, control=mesh.data.checkpoint)
        memories = engine.memory_ids()
        # By identity, shape and memory.
        self._known = [
            (name, p, p.shape, p.requires_grad, memories.get(name, (_memory(p),)), p._version)
            for name, p in model.named_parameters()
        ]
        self._master = str(master).removeprefix("torch.")
        self._inside = self._failed = self._closed = False

    @property
    def steps(self) -> int:
        """How many steps lie behind the parameters, those before `load` included."""
        return self.engine.step

    # --------------------------------------------------------------------------------------------------------- training

    @contextlib.contextmanager
    def step(self, batches: Iterable[Batch], *, weight: int, lr: float | None = None) -> Iterator["ShardedStep[Batch]"]:
        """A context for one step: forward and backward passes within, and the update when it is left.

        `batches` are this rank's micro-batches, of any number, even none; `weight` is how many samples or tokens their
        losses are sums over. `lr` is the learning rate of this step, if it is not to be that of `shard`.
        """
        self._check_usable()
        self._check_parameters()
        counted, rate = _counted(weight), self._rate(lr)
        step = ShardedStep(self, list(batches), counted)
        self._inside = self._failed = True  # until it has ended well
        try:
            with self.blaming():
                self.engine.begin_step(self.steps + 1, counted, rate, self._clip_norm)
                asked = _StepAgreement(step.count, rate, self.mesh)
                if self.engine.sharding.lockstep:
                    step.count = asked.max_micro_batches()
                yield step
                step.end()
                asked.check_learning_rates(self.steps + 1)
                step.outcome = self.engine.finish_step()
                self.engine.commit(self.steps + 1)
            self._failed = False
        except BaseException as error:
            step.abandon(error)
            raise
        finally:
            self._inside = False

    def sum(self, *values: float) -> list[float]:
        """Sums of numbers over all ranks that see different data, such as losses and counts of an evaluation; every
        rank gives as many."""
        self._check_open()
        with self.blaming():
            return self._side_mesh.sum([float(value) for value in values])

    def full_parameters(self) -> contextlib.AbstractContextManager[dict[str, torch.Tensor]]:
        """A context in which the model's parameters are whole and may be read, by name or from the model itself.

        Of a model that was transformed: this rank's slices, which `parallel.hf_transform.full_state_dict` puts
        together.
        """
        self._check_usable()
        return self._whole()

    @contextlib.contextmanager
    def _whole(self) -> Iterator[dict[str, torch.Tensor]]:
        self._inside = True
        try:
            with self.blaming(), self.engine.full_parameters() as whole:
                yield whole
        finally:
            self._inside = False

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def save(self, folder: Path | str, extra: Mapping[str, Any] | None = None, keep: int = 2) -> None:
        """Save parameters and the rule's state under `folder`, which all ranks see; `extra` is any JSON of one's own.

        The `keep` newest stay. Frozen parameters and buffers are not saved. Raises RunError when nothing was saved.
        """
        self._check_usable()
        if keep < 1:
            raise ConfigError(f"keep is {keep}, which would leave no checkpoint; keep at least 1")
        header = {"step": self.steps, "extra": dict(extra or {}), "nodes": list(self.mesh.topology.node_of)}
        try:
            json.dumps(header, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"extra cannot be saved as JSON ({error}); keep numbers and text in it") from None
        parameters = {name: (shape, self._master) for name, shape in self._shapes().items()}
        pieces = to_whole_pieces(
            self.engine.pieces(), self._slices, self.mesh.tensor is None or self.mesh.tensor.rank == 0
        )
        said: list[str] = []
        with self.blaming():
            group = JsonGroup(self.mesh.checkpoint)
            saver = CheckpointSaver(
                Path(folder), self.mesh.rank, group, keep, lambda kind, details: said.extend(_message(details))
            )
            saver.save(header, parameters, pieces, attempt=1)
            saver.close()
        for message in said:
            warnings.warn(message, stacklevel=2)
        if saver.outcome is not None and not saver.outcome.saved:
            raise RunError(f"step {self.steps} was not saved: {saver.outcome.reason}")

    def load(self, folder: Path | str) -> dict[str, Any] | None:
        """Go on from the newest whole checkpoint under `folder`, whatever number of ranks has saved it.

        Returns the `extra` that was saved with it, or None if there is no checkpoint. Raises CheckpointError if there
        are some, but none that is whole and of this model.
        """
        self._check_usable()
        refused: list[str] = []
        with self.blaming():
            group = JsonGroup(self.mesh.checkpoint)
            found = agree_on_newest(
                Path(folder), self.mesh.rank, group, self._fits, lambda kind, details: refused.append(details["reason"])
            )
            reasons = group.broadcast_object(refused)
            if found is None:
                if reasons:
                    raise CheckpointError(reasons[0])
                return None
            self.engine.load(make_shard_reader(found.read_into, self._slices))
            self.engine.commit(int(found.header["step"]))
            found.close()
        moved = describe_node_change(self.engine.sharding.compress, found.header.get("nodes"), self.mesh.topology)
        if moved is not None and self.mesh.rank == 0:
            refused.append(moved)
        for reason in refused:  # on rank 0
            warnings.warn(reason, stacklevel=2)
        extra: dict[str, Any] = found.header.get("extra", {})
        return extra

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all that is trained, whole."""
        return whole_shapes(self.engine.trainable, self._slices)

    def _fits(self, checkpoint: Checkpoint) -> bool:
        saved = {name: shape for name, (shape, _) in checkpoint.parameters.items()}
        ours = self._shapes()
        if saved != ours:
            unlike = next(name for name in [*ours, *saved] if saved.get(name) != ours.get(name))
            raise CheckpointError(
                f"checkpoint {checkpoint.path} is of another model: they differ in {unlike}; name another folder"
            )
        return True

    # -------------------------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Finish what is under way and leave the other ranks; the model's parameters are not sharded any more.

        Of several models, close the one that was sharded first last. With zero 3 the parameters are gone: take what is
        needed from `full_parameters()` before.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if not self._failed:
                with self.blaming():
                    for _ in self.engine.pieces():  # waits for the lane
                        break
                    self._side_mesh.sum([0.0])  # nobody leaves whom others still need
        finally:
            self.engine.close()
            self._exit_stack.close()
            self._side_mesh.drop_groups()

    def __enter__(self) -> "ShardedModel":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._failed |= error is not None  # the other ranks may not come to the end
        self.close()

    @contextlib.contextmanager
    def blaming(self) -> Iterator[None]:
        """Say which rank was late where a collective has failed."""
        try:
            yield
        except RuntimeError as error:
            blamed = self.mesh.roll_call.name_missing_ranks(error)
            if blamed is error:
                raise
            raise CollectiveError(str(blamed).replace("comm.timeout_s", "timeout_s")) from error

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this model was closed; shard it again, or close it later")

    def _check_usable(self) -> None:
        self._check_open()
        if self._inside:
            raise ConfigError("this was called within a step or full_parameters(); leave that before")
        if self._failed:
            raise ConfigError(
                "a step of this model has failed half-way, so that parameters of ranks may differ; close this, make "
                "and shard the model again, and load() what was saved"
            )

    def _check_parameters(self) -> None:
        """Raise ConfigError where the model's parameters are not those that were sharded."""
        now = dict(self.model.named_parameters())
        for name, parameter, shape, trained, memories, version in self._known:
            found = now.pop(name, None)
            if found is not None and found.shape != shape:
                what = f"has the shape {tuple(found.shape)}, and had {tuple(shape)} when it was sharded"
            elif found is not parameter or _memory(found) not in memories:
                what = "was replaced, or got other memory, after the model was sharded"
            elif found.requires_grad and not trained:
                what = "needs gradients now, but was frozen when the model was sharded"
            elif found._version != version:
                what = "was written to after the model was sharded, and its values are kept elsewhere"
            else:
                continue
            raise ConfigError(f"parameter {name} {what}, so that would be lost; change a model before it is sharded")
        if now:
            raise ConfigError(
                f"parameter {next(iter(now))} was added after the model was sharded, so that would be lost; "
                "change a model before it is sharded"
            )

    def _rate(self, lr: float | None) -> float:
        rate = lr if lr is not None else self._lr(self.steps + 1) if callable(self._lr) else self._lr
        return finite_rate(rate, f"step {self.steps + 1}")


class ShardedStep(Generic[Batch]):
    """One step: an iterable of its micro-batches, each of which is to be gone through to its end."""

    def __init__(self, model: ShardedModel, batches: Sequence[Batch], weight: int) -> None:
        self.count = max(1, len(batches))  # micro-batches, with those that are empty
        self.outcome: StepOutcome | None = None
        self._model, self._batches, self._weight = model, batches, weight
        self._loss: torch.Tensor | float = 0.0
        self._done, self._open, self._passed = 0, False, 0
        self._running: Generator[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        if self._running is not None:
            raise ConfigError("the micro-batches of a step were gone through before; do so once in a step")
        self._running = self._run()
        return self._running

    def _run(self) -> Generator[Batch]:
        for index in range(self.count):
            with self._model.engine.micro_batch(last=index == self.count - 1):
                if index < len(self._batches):
                    self._open = True
                    yield self._batches[index]
                    self._open = False
            self._done += 1

    def abandon(self, error: BaseException) -> None:
        """Let the engine know of an error, since it waits for what will not come."""
        if self._running is not None:
            with contextlib.suppress(type(error)):
                self._running.throw(error)

    def backward(self, loss_sum: torch.Tensor) -> None:
        """The backward pass of a micro-batch, of the sum of its losses; once in each."""
        if not self._open:
            raise ConfigError(
                "step.backward() was called outside of `for batch in step`, where gradients would be lost; call it "
                "within"
            )
        if self._passed > self._done:
            raise ConfigError("step.backward() was called twice for a micro-batch; add up its losses, and call it once")
        if loss_sum.numel() != 1 or not loss_sum.requires_grad:
            raise ConfigError(
                f"step.backward() got a tensor of shape {tuple(loss_sum.shape)}, which must be one number that needs "
                "gradients; sum the losses of the micro-batch"
            )
        self._passed = self._done + 1
        self._loss = self._loss + loss_sum.detach().reshape(()).to(torch.promote_types(loss_sum.dtype, torch.float32))
        gradients.backward(loss_sum, 1)

    def end(self) -> None:
        """Raise ConfigError unless all was done."""
        if self._done < self.count:
            raise ConfigError(
                f"a step was left after {self._done} of {self.count} micro-batches; go through all by `for batch in "
                "step`"
            )
        if self._weight and not self._passed:
            raise ConfigError(
                f"a step of weight {self._weight} had no step.backward(); call it for each micro-batch that has losses"
            )

    @property
    def weight(self) -> int:
        """What all ranks together have counted."""
        return self._finished_outcome().weight

    @property
    def norm(self) -> float:
        """Norm of the mean gradient, before clipping; waits until all gradients are reduced."""
        return self._norm_and_skipped()[0]

    @property
    def skipped(self) -> bool:
        """Whether nothing was updated, for want of weight or of a finite gradient; waits as `norm` does."""
        return bool(self._norm_and_skipped()[1])

    def mean_loss(self) -> float:
        """The mean loss of all ranks, which all must ask for; waits for them."""
        weight = self._finished_outcome().weight
        return self._model.sum(float(self._loss))[0] / max(1, weight)

    def _norm_and_skipped(self) -> tuple[float, float]:
        with self._model.blaming():
            return self._finished_outcome().get()

    def _finished_outcome(self) -> StepOutcome:
        if self.outcome is None:
            raise ConfigError("what came of a step is known when its context has been left; ask there")
        return self.outcome


class _StepAgreement:
    """What the ranks must take a step with alike, under way to all of them."""

    def __init__(self, count: int, rate: float, mesh: Mesh) -> None:
        self._table = torch.tensor([float(count), rate, -rate], dtype=torch.float64)
        self._pending: PendingCollective = all_reduce(self._table, mesh.control, mesh.bookkeeping, dist.ReduceOp.MAX)

    def max_micro_batches(self) -> int:
        """The greatest number of micro-batches."""
        self._pending.wait()
        return int(self._table[0])

    def check_learning_rates(self, step: int) -> None:
        """Raise ConfigError on all ranks where learning rates differ."""
        self._pending.wait()
        _, most, least = self._table.tolist()
        if most != -least:
            raise ConfigError(f"learning rates of step {step} are from {-least:g} to {most:g}; give all ranks the same")


def finite_rate(rate: Any, whose: str) -> float:
    """A learning rate as a number. Raises ConfigError for what is none."""
    try:
        number = float(rate)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(f"{whose} has the learning rate {rate!r}; give a finite one, 0 or above")
    return number


def _memory(parameter: nn.Parameter) -> int:
    return int(parameter.untyped_storage()._cdata)


def _message(details: Mapping[str, Any]) -> list[str]:
    return [str(details["message"])] if "message" in details else []


def _counted(weight: Any) -> int:
    try:
        counted = operator.index(weight)
    except TypeError:
        counted = -1
    if counted < 0 or isinstance(weight, bool):
        raise ConfigError(
            f"a step has weight={weight!r}, which is no count; give the number of samples or tokens that its losses "
            "are sums over"
        )
    return counted
