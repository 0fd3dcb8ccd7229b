"""The sharded engine: each rank keeps and updates a range of every bucket, while gradients and parameters travel.

A unit's parameters are views of flat buffers. When its gradients are complete, they are summed to their owners
(reduce-scatter) while the backward pass goes on; each rank updates its ranges; parameters are gathered while the next
forward pass goes on, which waits for each unit as it comes to it. All of this is done by one lane (comm_thread.py) in
an order that is the same on every rank, whatever becomes ready first (comm_schedule.py makes it). Sources: ZeRO
(Rajbhandari et al.
2020) for what is sharded, Megatron-LLaMA's OverlappedDistributedOptimizer for hiding both; unequal ranges are ours.

With `zero` 1 gradients stay whole on every rank; with 2 their buffers are given back as soon as they are summed; with 3
parameters are whole only while they are used, and gathered for the forward and again for the backward pass.
"""

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from phalanx.comm import collectives
from phalanx.comm.codec import PLAIN
from phalanx.comm.collectives import Pending, Traffic
from phalanx.comm.comm_thread import Lane, Mark
from phalanx.comm.mesh import Mesh
from phalanx.comm.routes import ways
from phalanx.engine.bucket import IN_FLIGHT_RELEASED, Gradient, Held, Pool, place, reduced
from phalanx.engine.collective_queue import Carrier
from phalanx.engine.grad_accumulation import Several
from phalanx.engine.hooks import Marks, Passes
from phalanx.engine.interface import Keeper, Outcome, Precision
from phalanx.engine.schedule import Timetable
from phalanx.engine.sharding_spec import PART_BYTES, PREFETCH, Sharding
from phalanx.engine.state_slots import Shards, Slots
from phalanx.engine.step_consensus import Agreement
from phalanx.engine.step_state import Done, Step
from phalanx.engine.units import Unit, describe
from phalanx.layout import buckets
from phalanx.layout.comm_simulation import Op
from phalanx.optim import gradients
from phalanx.optim.state import Allocator, Piece, Shard
from phalanx.optim.update import NO_COPIES, Change, Read, Rule, zeros

EVEN = Sharding()
# Early updates: after so many gathers the ranks begin to agree, and must have agreed; the link is not idle meanwhile.
ASKED, HEARD = 1, 3
NEAR_CLIPPING = 0.8  # of the limit: a norm that was below is taken to stay below it in the next step


class Sharded:
    """Master parameters and what the rule keeps of them exist only for the own ranges, in fp32 (or fp64)."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[tuple[str, nn.Module]],
        *,
        mesh: Mesh,
        rule: Rule,
        nominal_weight: int,
        precision: Precision,
        loss_scale: gradients.LossScale | None = None,
        allocate: Allocator = zeros,
        sharding: Sharding = EVEN,
        copies: Mapping[str, int] = NO_COPIES,
        keeper: Keeper | None = None,
    ) -> None:
        """`model` is on meta, or holds values. `copies`: of parameters that several ranks of `mesh.model` hold alike,
        how many do. `keeper`: what outlives the process. Raises ConfigError for shards that there cannot be."""
        self.model, self.mesh, self.rule, self.nominal_weight = model, mesh, rule, nominal_weight
        self.step, self.loss_scale, self.sharding = 0, loss_scale, sharding
        self._precision, self._allocate, self._held_alike, self._keeper = precision, allocate, copies, keeper
        self._degree = degree = sharding.degree or mesh.world
        weights = sharding.weights_over(mesh.world, mesh.alike)
        parameters = describe(model, units, rule)
        if sharding.compress == "int8":
            buckets.check_rows(parameters)
        self._shapes = {parameter.name: parameter.shape for parameter in parameters}
        self._trained = [parameter.name for parameter in parameters if parameter.trained]
        # Where the host moves them, buckets travel in parts, so that an urgent one waits for a part at the most.
        parts, least = sharding.parts if degree > 1 and mesh.on_host else 1, PART_BYTES // precision.shared.itemsize
        self.buckets = buckets.lay_out(parameters, weights, parts, least, sharding.apart)
        self._parts = max((len(bucket.parts) for bucket in self.buckets), default=1)
        self._modules, self._released = dict(units), sharding.zero == 3
        self.traffic = Traffic()  # the lane's: nobody but the lane is held up by it
        self._lane = Lane(mesh.device, mesh.traffic)
        self._rank, self._copies = mesh.rank % degree, mesh.world // degree
        owned = (each for bucket in self.buckets if bucket.trained for each in bucket.fragments(self._rank))
        self._shards = Shards(tuple(owned), rule, precision.master, mesh.device)
        self._zero = torch.zeros((), dtype=precision.master, device=mesh.device)
        self._ways = ways(mesh, degree, self.traffic, sharding.compress)
        self._whole: deque[tuple[Unit, Mark, Mark]] = deque()  # units, when they may be released, when they are there
        self._root: tuple[Unit, Mark, Mark] | None = None  # the model's own parameters, likewise, for a whole pass
        self._complete: Pending | None = None  # all ranks have finished, and committed, the step before
        self._unconfirmed = False  # this one has not said so
        self._last_norm: float | None = None  # of a step that was taken
        self._used = set(self._trained)  # by the last step, on any rank
        self._before: Mark | None = None  # the ranks have agreed on the step before

    @property
    def trainable(self) -> dict[str, tuple[int, ...]]:
        return {name: self._shapes[name] for name in self._trained}

    # --------------------------------------------------------------------------------------------------- taking memory

    def initialise(self, fill: Callable[[Shard], None]) -> None:
        parameters = dict(self.model.named_parameters())
        whole = self.sharding.zero == 1 and self.sharding.reduce == "per_step"
        self._pool = pool = None if whole else Pool(IN_FLIGHT_RELEASED, keeps=False) if self._released else Pool()
        helds: list[Held] = []
        replaced: dict[int, nn.Parameter] = {}
        # In the masters' type and all its digits, with one slot in plain memory, the model's range is the master.
        itself = self._precision.compute == self._precision.master and self.sharding.compress == PLAIN
        itself &= self.sharding.slots == 1 and self._allocate is zeros and not self._released and self._keeper is None
        make = functools.partial(self._shards.make, masters=not itself)
        self._state = Slots(make, self._shards.pieces, self._allocate, self.sharding.slots, self._keeper)
        for bucket in self.buckets:  # one after the other: what is released between uses was never there all at once
            shared = self._precision, self._lane, pool, self._released, self._state.working
            held = Held(bucket, self._rank, self.mesh.device, *shared)
            held.take([parameters[member.parameter.name] for member in bucket.members], replaced)
            for fragment in held.fragments if itself and bucket.trained else ():
                self._state.source[fragment.key]["param"] = held.own(fragment)
            self._fill(held, fill)
            if self._released:
                held.release()
            helds.append(held)
        place(self.model, replaced, self.mesh.device)
        self._trained_held = [held for held in helds if held.bucket.trained]
        names = list(dict.fromkeys(held.bucket.unit for held in helds))
        self._units = [
            Unit(number, name, self._modules.get(name, self.model), [h for h in helds if h.bucket.unit == name])
            for number, name in enumerate(names)
        ]
        self._timetable = Timetable(
            self._units, self.mesh, self.sharding, self._parts, self._precision, self.traffic, self._ways
        )
        self._carrier = Carrier(self._ways, self._timetable, pool)
        self._passes = Passes(
            self.model, self._units, self._lane, self.mesh.traffic, self._released, self._put_evaluation,
            self._timetable.laps,
        )  # fmt: skip
        self.several = Several(self._trained_held, self._timetable.laps)
        self._state.arrive()
        if self._released:
            self._lane.follow()
        else:
            self._bring_masters(wait=not self._state.attached)  # nothing else is to be written there then

    def _fill(self, held: Held, fill: Callable[[Shard], None]) -> None:
        if held.bucket.trained and self._state.attached:
            return  # it is filled
        if held.bucket.trained or self._released:
            for fragment in held.fragments:
                name, shape = fragment.parameter.name, fragment.parameter.shape
                into = self._state.source[fragment.key]["param"] if held.bucket.trained else held.own(fragment)
                fill(Shard(name, fragment.start, fragment.stop, shape, into, trainable=held.bucket.trained))
        else:
            for member, values in held.members():
                fill(Shard(member.parameter.name, 0, values.numel(), member.parameter.shape, values, trainable=False))

    def memories(self) -> dict[str, tuple[int, ...]]:
        """Where parameters may be: by name, what identifies their memory."""
        return {name: held.memories for unit in self._units for held in unit.helds for name in held.names}

    # ------------------------------------------------------------------------------------------------- the main thread

    def begin_step(self, step: int, weight: int, lr: float, clip: float | None) -> None:
        assert step == self.step + 1, (step, self.step)
        self._lane.check()
        weights = gradients.TotalWeight(weight, self.mesh.control, self.mesh.traffic)
        self._now = Step(step, lr, clip, weights, Mark(self._lane))
        for held in self._trained_held:
            held.begin_step()
        if self.mesh.pipe is not None:  # other stages must not wait for this one's passes to hear it
            self._put(self._confirm)

    @contextlib.contextmanager
    def micro_batch(self, last: bool, several: bool = False) -> Iterator[None]:
        """`several`: inside, passes of several micro-batches mix; `self.several` is told of the last."""
        reduces = last or self.sharding.reduce == "per_micro_batch"
        for held in self._trained_held:
            held.begin_micro_batch(reduces and not several)
        self._passes.begin(last)
        if last:
            self._now.used_here = [held.used for held in self._trained_held]
            self._now.early = self._may_be_early(self._now.clip)
        if reduces or self._released:
            self._put_script(reduces, last)
        try:
            yield
        except BaseException as error:
            self._lane.fail(error)
            raise
        if reduces:
            if self._pool is None:  # there the lane may still read what a unit that is not used now had before
                self._passes.catch_up()
            for held in reversed(self._trained_held):
                held.complete()  # what no gradient has come for
        self._passes.end(last)

    def _may_be_early(self, clip: float | None) -> bool:
        """Whether units are updated as soon as they are reduced; the same on all ranks, as the norm before is."""
        if self.sharding.slots == 1 or self._released:
            return False
        if self._before is not None:
            self._before.wait(self.mesh.traffic)  # the lane writes the norm; nothing is computed before that anyway
        return clip is None or (self._last_norm is not None and self._last_norm < NEAR_CLIPPING * clip)

    def _put_script(self, reduces: bool, last: bool) -> None:
        """Tell the lane what to do in this micro-batch, and behind the last one."""
        now, passes = self._now, self._passes
        sent = {id(held): held.gradient for held in self._trained_held}
        known = self._timetable.of(now.number)
        order = known.of(now.early) if last or self._released else known.reduces
        summed = max((at for at, op in enumerate(order) if op.kind == "reduce"), default=-1)
        asks, hears = (min(summed + later, len(order) - 1) for later in ((ASKED, HEARD) if now.early else (0, 0)))
        for at, op in enumerate(order):
            unit = self._units[op.bucket]
            if self._released and op.kind != "reduce":
                self._put(self._gather_released, unit, op, passes.marks)
            elif op.kind != "reduce":
                self._put(self._gather_updated, now, unit, op.part, passes.next_fresh[op.bucket])
            elif reduces:
                for held in unit.trained:
                    if self._released and op.part == 0:
                        self._put(self._release_behind, unit, sent[id(held)], passes.marks)
                    self._put(self._reduce, now, unit, held, sent[id(held)], op.part, last)
            if last and at == asks:
                self._put(self._ask, now)
            if last and at == hears:
                self._put(self._hear, now)
        if self._released:
            self._put(self._release_all)
        if last:
            self._put(self._end, now, self._timetable.expect(now.number, self._lane))

    def _put(self, work: Callable[..., None], *args: object) -> None:
        self._lane.put(lambda: work(*args))

    def _put_evaluation(self, marks: Marks) -> None:
        """A forward pass alone begins: have the lane gather what is released between uses."""
        for op in self._timetable.of(self.step + 1).forward:
            self._put(self._gather_released, self._units[op.bucket], op, marks)
        self._put(self._release_all)

    def grads_ready(self, unit: str) -> None:
        for held in self._trained_held:
            if held.bucket.unit == (unit if unit in self._modules else ""):
                held.fold_all()

    def finish_step(self) -> Outcome:
        self.mesh.traffic.add(self.traffic.take())
        self._before = self._now.agreed
        return Done(self._now, self.mesh.traffic)

    def notices(self) -> list[tuple[str, dict[str, Any]]]:
        return self._timetable.notices()

    def commit(self, step: int) -> None:
        self.step = step

    def begin_after(self, step: int) -> None:
        if not self._state.attached:
            self._lane.drain()
        self._state.loaded(step)
        self.step = step

    def close(self) -> None:
        self._lane.close()
        if "_passes" in self.__dict__:
            self._passes.leave()
        # Their groups end with the last reference, and none may outlive the interpreter, as this engine may.
        self._complete = None
        for name in ("_ways", "_carrier", "_timetable", "_now"):
            self.__dict__.pop(name, None)

    # -------------------------------------------------------------------------------------------------------- the lane

    def _reduce(self, now: Step, unit: Unit, held: Held, gradient: Gradient, part: int, last: bool) -> None:
        def then() -> None:
            if last and now.early and part == self._parts - 1 and held is unit.trained[-1]:
                self._update(now, unit, self._likely(now))

        self._carrier.reduce(held, gradient, part, then)

    def _likely(self, now: Step) -> Change:
        """What the ranks will agree on unless this step is clipped or skipped."""
        if now.change is None:
            self._await_others()
            divisor = gradients.unclipped(self._zero, self.nominal_weight, now.weight.get(), self.loss_scale)
            now.change = Change(now.number, now.lr, self._shards.no_decay, divisor, torch.zeros_like(divisor).float())
        return now.change

    def _await_others(self) -> None:
        """No update begins before all ranks are through with the step before, and have committed it."""
        self._confirm()
        if self._complete is not None:
            self._complete.wait()
            self._complete = None

    def _confirm(self) -> None:
        """Begin to tell all ranks, those of other parts of the model, too, that this one is through with its step."""
        if self._unconfirmed:
            self._state.settle()
            group = self.mesh.everyone or self.mesh.agreement
            self._complete = collectives.all_reduce(torch.ones((), dtype=torch.int32), group, self.traffic)
            self._unconfirmed = False

    def _ask(self, now: Step) -> None:
        """Begin to agree on the norm of the whole gradient, and on which parameters have one."""
        self._carrier.settle_sums()
        self._await_others()
        ours, zero = reduced(self._trained_held, self._held_alike), self._zero
        squares = gradients.squares_once(ours, zero.dtype, zero.device)
        names = [name for held in self._trained_held for name in held.names]
        mine, rates, here = squares.item() / self._copies, self._timetable.rates(), set().union(*now.used_here)
        now.agreement = Agreement(mine, rates, names, here, self.mesh.agreement, self.traffic)

    def _hear(self, now: Step) -> None:
        """What the ranks have agreed on: the same on all of them from here on."""
        assert now.agreement is not None
        squares, rates, used = now.agreement.hear()
        now.makes_order = self._timetable.told(rates)
        now.loss_scale = self.loss_scale.factor.item() if self.loss_scale is not None else None
        with self._lane.awaiting(lambda: False):  # other stages, to whom the main thread may still have to send
            squares = gradients.over_model(squares, self.mesh.model, self.traffic)
        norm, divisor, skip = gradients.fold(
            squares.to(self._zero), nominal_weight=self.nominal_weight, total_weight=now.weight.get(), clip=now.clip,
            scale=self.loss_scale,
        )  # fmt: skip
        # The lane, and nobody else, waits for the device here.
        now.norm, now.skipped = norm.item(), skip.item()
        likely = now.change is None or (
            not now.skipped and torch.equal(divisor, now.change.divisor) and used == self._used
        )
        now.change = Change(now.number, now.lr, self._shards.no_decay, divisor, skip)
        self._used, self._last_norm = used, None if now.skipped else now.norm
        if not likely:
            self._do_again(now)
        now.agreed.set()  # behind that: what arrives from here on is good
        for fresh in now.early_fresh:
            fresh.set()

    def _do_again(self, now: Step) -> None:
        """What was updated early was updated wrongly: once more, from the state that was kept."""
        now.updated = set()
        for number in sorted(now.gathered):
            for part in range(self._parts):
                self._gather_updated(now, self._units[number], part, None)
        self._carrier.settle()
        now.again = now.gathered.copy()

    def _update(self, now: Step, unit: Unit, change: Change) -> None:
        begun = self._timetable.mark()
        self._state.begin()
        source, target = self._state.source, self._state.target
        for held in unit.trained:
            keys = [fragment.key for fragment in held.fragments]
            grads = {f.key: held.gradient_of(f) for f in held.fragments if f.parameter.name in self._used}
            self._state.updates(keys, grads, change)
            if now.early:  # they may be needed again
                grads = {key: grad.clone() for key, grad in grads.items()}
            self.rule.apply({key: source[key] for key in keys}, {key: target[key] for key in keys}, grads, change)
            if not self._released:
                held.round([target[key]["param"] for key in keys])
        now.updated.add(unit.number)
        self._timetable.updated(unit.number, begun)

    def _gather_updated(self, now: Step, unit: Unit, part: int, fresh: Mark | None) -> None:
        """`fresh` is set when the last part has arrived, and the ranks have agreed."""
        if unit.trained and unit.number not in now.updated:
            self._carrier.settle()  # which may update it
            if unit.number not in now.updated:
                assert now.change is not None
                self._update(now, unit, now.change)
        now.gathered.add(unit.number)

        def then() -> None:
            if fresh is not None and part == self._parts - 1:
                if now.agreed.reached:
                    fresh.set()
                else:
                    now.early_fresh.append(fresh)

        self._carrier.gather([] if unit.number in now.again else unit.trained, part, then)

    def _end(self, now: Step, ended: Mark) -> None:
        if self._released:
            assert now.change is not None
            for unit in self._units:
                self._update(now, unit, now.change)
        self._carrier.settle()
        self._state.turn(now.number, Done(now, self.traffic))
        self._unconfirmed = True
        if not self._state.late:  # else the next update asks
            self._confirm()
        if now.makes_order:
            self._timetable.make(now.number + 2)
        ended.set()

    # ------------------------------------------------------------------------------ the lane, where units are released

    def _gather_released(self, unit: Unit, op: Op, marks: Marks) -> None:
        """Gather a part of a unit for the pass that `op` is of; before its first, release what is not needed."""
        again = op.kind == "regather"
        mark = (marks.regathered if again else marks.gathered)[unit.number]
        if op.part == 0:
            while len(self._whole) > PREFETCH:
                self._release(self._whole.popleft())
            self._restore(unit)
            used = (marks.used_again if again else marks.used)[unit.number]
            if unit.module is self.model:
                self._root = unit, marks.used_again[unit.number] if marks.training else used, mark
            else:
                self._whole.append((unit, used, mark))
        self._carrier.gather(unit.helds, op.part, lambda: mark.set() if op.part == self._parts - 1 else None)

    def _release_behind(self, unit: Unit, gradient: Gradient, marks: Marks) -> None:
        """The backward pass of a unit is through: its parameters need not be there while its gradient is sent."""
        self._carrier.wait(gradient.ready)
        if self._whole and unit.number > (self._units[0].module is self.model):  # of the first nothing tells the end
            self._carrier.wait(marks.used_again[unit.number])
        while self._whole and all(mark.reached for mark in self._whole[0][1:]):  # what nobody uses may still arrive
            self._release(self._whole.popleft())

    def _restore(self, unit: Unit) -> None:
        slot = self._state.source
        for held in unit.helds:
            held.restore()
            if held.bucket.trained:
                held.round([slot[fragment.key]["param"] for fragment in held.fragments])

    def _release(self, whole: tuple[Unit, Mark, Mark]) -> None:
        self._carrier.wait(whole[1])
        for held in whole[0].helds:
            held.release()

    def _release_all(self) -> None:
        self._carrier.settle()  # the last to be gathered may still arrive, where nothing has used it
        while self._whole:
            self._release(self._whole.popleft())
        if self._root is not None:
            self._release(self._root)
            self._root = None

    # ------------------------------------------------------------------------------------------------------------ state

    def _bring_masters(self, wait: bool = True) -> None:
        """Bring the masters, and whatever else ranks own of the parameters, into the model; units wait for theirs."""

        def bring(unit: Unit) -> None:
            if self._released:
                self._restore(unit)
            else:
                slot = self._state.source
                for held in unit.trained:
                    held.round([slot[fragment.key]["param"] for fragment in held.fragments])
            helds, fresh = unit.helds if self._released else unit.trained, self._passes.fresh[unit.number]
            for part in range(self._parts):
                self._carrier.gather(helds, part, fresh.set if part == self._parts - 1 else lambda: None)

        self._lane.follow()
        for unit in self._units:
            self._put(bring, unit)
        self._put(self._carrier.settle)
        if wait:
            self._lane.drain()

    @contextlib.contextmanager
    def full_parameters(self) -> Iterator[dict[str, torch.Tensor]]:
        self._lane.drain()
        if self._released:
            self._bring_masters()
            self._passes.whole = True
        try:
            yield {name: parameter.data for name, parameter in self.model.named_parameters()}
        finally:
            if self._released:
                self._passes.whole = False
                self._lane.follow()  # whose memory it is, and who may use it again at once
                for unit in self._units:
                    for held in unit.helds:
                        held.release()

    def pieces(self, twins: bool = False) -> Iterator[Piece]:
        """As the interface has it: nothing where another rank holds the same, unless `twins` are wanted too."""
        self._lane.drain()
        return self._shards.pieces(self._state.source) if twins or self.mesh.rank < self._degree else iter(())

    def load(self, read: Read) -> None:
        self._lane.drain()
        self._shards.load(self._state.source, read)
        if self._released:
            self._lane.follow()
        else:
            self._bring_masters()
