"""A sharded model in a custom training loop: steps, evaluation, checkpoints.

Losses are sums and weights are counts, so that neither ranks nor micro-batches change the mean.
"""

import contextlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from phalanx.api.sharded_step import Batch, ShardedStep, StepAgreement, check_weight, finite_rate
from phalanx.checkpoint.disk.load import Checkpoint, agree_on_newest
from phalanx.checkpoint.disk.save import CheckpointSaver
from phalanx.comm.compression import describe_node_change
from phalanx.comm.mesh import Mesh
from phalanx.comm.rendezvous import JsonGroup
from phalanx.core.errors import CheckpointError, CollectiveError, ConfigError, RunError
from phalanx.engine.sharded import ShardedEngine
from phalanx.layout.tensor_shards import TensorShard, whole_shapes
from phalanx.parallel.model_part import make_shard_reader, to_whole_pieces

Rate = float | Callable[[int], float]


class ShardedModel:
    """A model whose state is sharded over ranks. All ranks make the same calls in the same order.

    `phalanx.shard` returns it. Use it as a context manager, or call `close`.

    Attributes:
        model: The module that was sharded.
        rank: This process's number among those that see different data, from 0. The ranks that hold one copy of a
            transformed model count as one.
        world: How many of these there are.
        device: Where the parameters are.

    Examples:
        >>> net = torch.nn.Linear(3, 1)
        >>> with phalanx.shard(net, lr=1e-2) as sharded:
        ...     for inputs in [torch.ones(4, 3), torch.zeros(2, 3)]:
        ...         with sharded.step([inputs], weight=len(inputs)) as step:
        ...             for batch in step:
        ...                 step.backward(net(batch).square().sum())
        ...     sharded.save("checkpoints")
        ...     sharded.steps
        2
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
        # `left` is closed with this object; `master` is the dtype of the engine's state; `slices` are this rank's.
        self.model, self.mesh, self._slices = model, mesh, dict(slices)
        self.rank, self.world, self.device = mesh.data.rank, mesh.data.world, mesh.device
        self.engine, self._exit_stack, self._lr, self._clip_norm = engine, left, lr, clip_norm
        # A separate group for calls between steps: a rank that calls alone must not receive another call's data.
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
        """The number of completed steps, including those before the checkpoint that `load` read."""
        return self.engine.step

    # --------------------------------------------------------------------------------------------------------- training

    @contextlib.contextmanager
    def step(self, batches: Iterable[Batch], *, weight: int, lr: float | None = None) -> Iterator["ShardedStep[Batch]"]:
        """Open a training step: forward and backward passes inside the `with` block, the update at its end.

        Args:
            batches: This rank's micro-batches, of any number and size, even none.
            weight: The number of samples or tokens that this rank's losses are sums over.
            lr: Learning rate of this step. Default: that of `phalanx.shard`.

        Returns:
            A context manager of a `ShardedStep`, which is iterated over for its micro-batches.

        Raises:
            errors.ConfigError: an argument is no count or rate, ranks differ, or a micro-batch had no passes.
            errors.CollectiveError: a rank did not arrive within `timeout_s`; the message names it.
        """
        self._check_usable()
        self._check_parameters()
        counted, rate = check_weight(weight), self._rate(lr)
        step = ShardedStep(self.engine, list(batches), counted, self.sum, self._name_missing)
        self._inside = self._failed = True  # until it has ended without error
        try:
            with self._name_missing():
                self.engine.begin_step(self.steps + 1, counted, rate, self._clip_norm)
                asked = StepAgreement(step.count, rate, self.mesh)
                if self.engine.sharding.lockstep:
                    step.count = asked.max_micro_batches()
                yield step
                step._end()
                asked.check_learning_rates(self.steps + 1)
                step.outcome = self.engine.finish_step()
                self.engine.commit(self.steps + 1)
            self._failed = False
        except BaseException as error:
            step._abandon(error)
            raise
        finally:
            self._inside = False

    def sum(self, *values: float) -> list[float]:
        """Sum numbers over all ranks that see different data, such as the losses and counts of an evaluation.

        Args:
            values: Numbers; every rank gives as many.

        Returns:
            The sums, in the same order, the same on all ranks.
        """
        self._check_open()
        with self._name_missing():
            return self._side_mesh.sum([float(value) for value in values])

    def full_parameters(self) -> contextlib.AbstractContextManager[dict[str, torch.Tensor]]:
        """Gather all parameters for the length of a `with` block, in which they may be read but not written.

        Returns:
            A context manager of the parameters by name; the model's own are whole in it, too, so `state_dict()` and
            evaluation work. Of a model that `transform` divided these are this rank's slices.
        """
        self._check_usable()
        return self._whole()

    @contextlib.contextmanager
    def _whole(self) -> Iterator[dict[str, torch.Tensor]]:
        self._inside = True
        try:
            with self._name_missing(), self.engine.full_parameters() as whole:
                yield whole
        finally:
            self._inside = False

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def save(self, folder: Path | str, extra: Mapping[str, Any] | None = None, keep: int = 2) -> None:
        """Save a checkpoint of the trained parameters and the optimizer state. Collective.

        Args:
            folder: Where checkpoints go, a folder that all ranks see.
            extra: Anything that JSON can hold, which `load` returns.
            keep: How many of the newest checkpoints stay in the folder.

        Raises:
            errors.RunError: nothing was saved, as on a full disk.
            errors.ConfigError: `extra` is not JSON, or `keep` is below 1.
        """
        self._check_usable()
        if keep < 1:
            raise ConfigError(f"keep is {keep}, which would leave no checkpoint; keep at least 1")
        header = {"step": self.steps, "extra": dict(extra or {}), "nodes": list(self.mesh.topology.node_of)}
        try:
            json.dumps(header, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"extra cannot be saved as JSON ({error}); use only numbers and strings in it") from None
        parameters = {name: (shape, self._master) for name, shape in self._shapes().items()}
        pieces = to_whole_pieces(
            self.engine.pieces(), self._slices, self.mesh.tensor is None or self.mesh.tensor.rank == 0
        )
        said: list[str] = []
        with self._name_missing():
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
        """Load the newest complete checkpoint of a folder, saved by any number of ranks. Collective.

        Args:
            folder: Where `save` has put checkpoints.

        Returns:
            The `extra` of the checkpoint, or None if the folder has none.

        Raises:
            errors.CheckpointError: there are checkpoints, but none is complete and of this model.
        """
        self._check_usable()
        refused: list[str] = []
        with self._name_missing():
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
        """Shapes of all trained parameters, whole."""
        return whole_shapes(self.engine.trainable, self._slices)

    def _fits(self, checkpoint: Checkpoint) -> bool:
        saved = {name: shape for name, (shape, _) in checkpoint.parameters.items()}
        ours = self._shapes()
        if saved != ours:
            unlike = next(name for name in [*ours, *saved] if saved.get(name) != ours.get(name))
            raise CheckpointError(
                f"checkpoint {checkpoint.path} belongs to another model (they differ in {unlike}); use another folder"
            )
        return True

    # -------------------------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Finish what is in flight and leave the process groups; the parameters are not sharded any longer.

        Close several models in the opposite order of `phalanx.shard`. With `zero=3` the parameters are gone
        afterwards: read them in `full_parameters` before.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if not self._failed:
                with self._name_missing():
                    for _ in self.engine.pieces():  # waits for the communication thread
                        break
                    self._side_mesh.sum([0.0])  # no rank leaves while others need it
        finally:
            self.engine.close()
            self._exit_stack.close()
            self._side_mesh.drop_groups()

    def __enter__(self) -> "ShardedModel":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._failed |= error is not None  # the other ranks may not finish the step
        self.close()

    @contextlib.contextmanager
    def _name_missing(self) -> Iterator[None]:
        """Name the late ranks if a collective failed or timed out."""
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
            raise ConfigError("this was called within a step or full_parameters(); call it outside")
        if self._failed:
            raise ConfigError(
                "a step of this model failed half-way, so ranks may hold different parameters; close it, build and "
                "shard the model again, and load() a checkpoint"
            )

    def _check_parameters(self) -> None:
        """Raise ConfigError if the model's parameters are not those that were sharded."""
        now = dict(self.model.named_parameters())
        for name, parameter, shape, trained, memories, version in self._known:
            found = now.pop(name, None)
            if found is not None and found.shape != shape:
                what = f"has the shape {tuple(found.shape)}, and had {tuple(shape)} when it was sharded"
            elif found is not parameter or _memory(found) not in memories:
                what = "was replaced or moved to other memory after the model was sharded"
            elif found.requires_grad and not trained:
                what = "needs gradients now, but was frozen when the model was sharded"
            elif found._version != version:
                what = "was written to after the model was sharded, but its values are stored elsewhere"
            else:
                continue
            raise ConfigError(f"parameter {name} {what}, so this would be lost; change a model before it is sharded")
        if now:
            raise ConfigError(
                f"parameter {next(iter(now))} was added after the model was sharded, so this would be lost; change a "
                "model before it is sharded"
            )

    def _rate(self, lr: float | None) -> float:
        rate = lr if lr is not None else self._lr(self.steps + 1) if callable(self._lr) else self._lr
        return finite_rate(rate, f"step {self.steps + 1}")


def _memory(parameter: nn.Parameter) -> int:
    return int(parameter.untyped_storage()._cdata)


def _message(details: Mapping[str, Any]) -> list[str]:
    return [str(details["message"])] if "message" in details else []
