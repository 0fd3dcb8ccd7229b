"""Fault injection (`--inject`, see `faults.py`): each fault at its point of a step."""

import errno
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from phalanx.checkpoint.disk.load import OnEvent, step_folder
from phalanx.core.errors import ConfigError
from phalanx.core.faults import Fault
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind, write_event
from phalanx.core.run_paths import RunPaths, Url
from phalanx.engine.interface import Engine
from phalanx.system import accelerator
from phalanx.workload.master_weights import find_master_pieces, keeps_whole_parameters, view_as_integers
from phalanx.workload.sinks import RecordWriter

BYTES_FROM_END = 100  # where a byte of a file is changed
SLOW_PHASES = ("forward", "backward")


class FaultInjector:
    """The faults of one rank in one attempt. `say(fault, step)` is told of each before it happens."""

    def __init__(
        self,
        faults: Iterable[Fault],
        rank: int,
        attempt: int,
        checkpoints: Path | Url,
        report: Callable[[Fault, int], None],
    ) -> None:
        self._rank, self._checkpoints, self._report = rank, checkpoints, report
        self._planned = [fault for fault in faults if fault.applies_to(attempt)]
        self._done: set[Fault] = set()
        self._phase, self._begun, self._step = "", 0.0, 0

    def check_bit_flips(self, engine: Engine) -> None:
        """Raise ConfigError for a bit that this rank does not have."""
        for fault in self._planned:
            if fault.kind != "bit-flip" or fault.rank != self._rank:
                continue
            name, target = self._target(fault, engine)
            if target is None:
                raise ConfigError(
                    f"--inject {fault.text}: rank {self._rank} has no part of a parameter {name}; remove parameter, "
                    f"or name one such as {next(iter(engine.trainable))}"
                )
            element, bits = fault.element or 0, 8 * target.element_size()
            if element >= target.numel() or fault.bit >= bits:
                raise ConfigError(
                    f"--inject {fault.text}: rank {self._rank} holds {target.numel()} elements of {bits} bits of "
                    f"{name}; choose one of these"
                )

    def enter_phase(self, phase: str, step: int) -> None:
        """This rank begins a phase of a step."""
        self._slow_down(phase, step)
        if phase == "data":  # another step, or the same once more
            self._done = {fault for fault in self._done if not fault.every}
        for fault in self._due(("kill", "crash", "hang", "freeze", "exception", "oom", "node-down"), step):
            if fault.phase == phase:
                self._start_fault(fault, step)
                _execute_fault(fault)

    def apply_loss_faults(self, loss_sum: torch.Tensor, step: int) -> torch.Tensor:
        """The loss of a micro-batch, or what becomes of it."""
        for fault in self._due(("nan", "spike"), step):
            self._start_fault(fault, step)
            loss_sum = loss_sum * (torch.nan if fault.kind == "nan" else fault.factor)
        return loss_sum

    def after_commit(self, engine: Engine, step: int) -> None:
        """A step is done."""
        for fault in self._due(("bit-flip",), step):
            self._start_fault(fault, step)
            _, target = self._target(fault, engine)
            assert target is not None
            bits = view_as_integers(target)
            # As a shift of a number of that width: the highest bit is its sign.
            flip = fault.bit if fault.bit < 8 * target.element_size() - 1 else None
            mask = torch.iinfo(bits.dtype).min if flip is None else 1 << flip
            bits[fault.element or 0] ^= mask

    def before_checkpoint_write(self, step: int) -> None:
        """This rank is about to write its part of a checkpoint. Raises OSError."""
        for fault in self._due(("disk-full",), step, later=True):
            self._start_fault(fault, step)
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, as --inject has asked for")

    def wrap_on_event(self, on_event: OnEvent) -> OnEvent:
        """What a saver, on rank 0, is to tell its events, so that saved files can be damaged."""

        def note(kind: str, details: dict[str, Any]) -> None:
            on_event(kind, details)
            if kind == EventKind.CHECKPOINT_SAVED:
                self._corrupt_checkpoint(int(details["step"]))

        return note

    def _corrupt_checkpoint(self, step: int) -> None:
        for fault in self._planned:
            if fault.kind == "corrupt-checkpoint" and step >= fault.step and self._is_pending(fault):
                assert isinstance(self._checkpoints, Path), "faults.check refuses that at a URL"
                file = step_folder(self._checkpoints, step) / f"rank-{fault.rank:05d}.safetensors"
                if file.exists():  # else there are fewer ranks by now, and the fault is reported as not happened
                    self._start_fault(fault, step)
                    corrupt_byte(file)

    def _due(self, kinds: Collection[str], step: int, later: bool = False) -> Iterator[Fault]:
        for fault in self._planned:
            comes = step >= fault.step if later else step == fault.step
            if fault.kind in kinds and fault.rank == self._rank and comes and self._is_pending(fault):
                yield fault

    def _is_pending(self, fault: Fault) -> bool:
        return fault not in self._done

    def _start_fault(self, fault: Fault, step: int) -> None:
        self._done.add(fault)
        self._report(fault, step)

    def _slow_down(self, phase: str, step: int) -> None:
        """Draw out the phase that ends here."""
        now = time.perf_counter()
        for fault in self._planned:
            slow = fault.kind == "slow" and fault.rank == self._rank and fault.step <= self._step <= fault.last_step
            if slow and self._phase in SLOW_PHASES:
                if fault not in self._done:
                    self._start_fault(fault, self._step)
                time.sleep((fault.factor - 1.0) * (now - self._begun))
        self._phase, self._begun, self._step = phase, time.perf_counter(), step

    def _target(self, fault: Fault, engine: Engine) -> tuple[str, torch.Tensor | None]:
        """The parameter that a bit is flipped in: as this rank computes with it where it is kept, else this rank's
        shard of it."""
        name = fault.parameter or next(iter(engine.trainable))
        if keeps_whole_parameters(engine):
            with engine.full_parameters() as parameters:
                return name, parameters[name].view(-1) if name in parameters else None
        return name, next((piece.tensor for piece in find_master_pieces(engine) if piece.name == name), None)


def _execute_fault(fault: Fault) -> None:
    """Fail as a fault says. Returns only in a process that is stopped and continued."""
    said = f"--inject {fault.text} has asked for this"
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            while True:
                time.sleep(3600)
        case "node-down":
            os.kill(os.getppid(), signal.SIGKILL)  # the agent, with which the kernel ends all that it has started
            time.sleep(60)
            raise RuntimeError(f"{said}, and the agent could not be killed")  # the first process of a container, say
        case "exception":
            raise RuntimeError(said)
        case "oom":
            raise accelerator.out_of_memory(said)


def corrupt_byte(path: Path) -> None:
    """Change a byte near the end of a file."""
    with open(path, "r+b", buffering=0) as file:
        file.seek(-min(BYTES_FROM_END, path.stat().st_size), os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def make_fault_injector(
    faults: Iterable[Fault], paths: RunPaths, placement: Placement, records: RecordWriter
) -> FaultInjector:
    """The faults of a rank, which are recorded as events by the rank that they happen to."""

    def say(fault: Fault, step: int) -> None:
        details = {"rank": fault.rank, "step": step, "fault": fault.text}
        if placement.rank == 0:
            records.write_event(EventKind.INJECTED, details)
        else:
            write_event(paths.events, EventKind.INJECTED, placement.attempt, **details)

    return FaultInjector(faults, placement.rank, placement.attempt, paths.checkpoints, say)
