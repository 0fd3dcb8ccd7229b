"""Fault injection (`--inject kill:rank=1,step=7`), to test how a run recovers.

This module defines and parses faults; `workload/injection.py` makes them happen. No torch here.
"""

import dataclasses
import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.core.errors import ConfigError

# What each kind does, and its keys beside rank, step, attempt and every.
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "kill": ("the rank kills itself by SIGKILL", ("phase",)),
    "crash": ("it dies by SIGSEGV, as from a bug in native code", ("phase",)),
    "exception": ("it raises a RuntimeError", ("phase",)),
    "hang": ("it sleeps forever", ("phase",)),
    "freeze": ("it stops itself by SIGSTOP", ("phase",)),
    "node-down": (
        "its node's agent and ranks are killed at once, as when a machine crashes",
        ("phase",),
    ),
    "oom": ("it raises the out-of-memory error of the device's allocator", ("phase",)),
    "slow": ("its forward and backward passes take `factor` times as long, for `steps` steps", ("factor", "steps")),
    "nan": ("its loss is not a number", ()),
    "spike": ("its loss is `factor` times as large", ("factor",)),
    "bit-flip": ("a bit of a parameter in memory is flipped after the step", ("parameter", "element", "bit")),
    "disk-full": ("the disk is full when its part of the next checkpoint is saved", ()),
    "corrupt-checkpoint": ("a byte of its file of the next checkpoint is changed after it is saved", ()),
}
FAULT_PHASES = ("data", "forward", "backward", "update")  # phases of a step at whose beginning a rank can fail
EXAMPLE = "kill:rank=1,step=7"


@dataclass(frozen=True)
class Fault:
    """An injected fault. It happens once, in attempt `attempt`; with `every`, in each attempt that reaches the step."""

    kind: str
    step: int
    rank: int = 0
    attempt: int = 1
    every: bool = False
    phase: str = "forward"
    factor: float = 3.0
    steps: int = 10
    parameter: str | None = None
    element: int | None = None
    bit: int = 20

    @property
    def text(self) -> str:
        """Format as on the command line, without default values."""
        told: list[tuple[str, Any]] = [("rank", self.rank), ("step", self.step)]
        for field in dataclasses.fields(self)[3:]:
            value = getattr(self, field.name)
            if value != field.default:
                told.append((field.name, str(value).lower() if isinstance(value, bool) else value))
        return f"{self.kind}:{','.join(f'{name}={value}' for name, value in told)}"

    @property
    def last_step(self) -> int:
        """The last step that the fault affects."""
        return self.step + self.steps - 1 if self.kind == "slow" else self.step

    def applies_to(self, attempt: int) -> bool:
        return self.every or attempt == self.attempt


def parse_faults(texts: Iterable[str]) -> list[Fault]:
    """Parse the faults of `--inject` options; `;` separates several in one. Raises ConfigError for the first
    mistake."""
    return [_parse_fault(one.strip()) for text in texts for one in text.split(";") if one.strip()]


def _parse_fault(text: str) -> Fault:
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(KINDS)}"
        raise ConfigError(f"--inject {text}: unknown fault {kind!r}; {hint}")
    allowed = ("rank", "step", "attempt", "every", *KINDS[kind][1])
    values: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not value:
            raise ConfigError(f"--inject {text}: {pair!r} is not key=value; write it as in {EXAMPLE}")
        if name not in allowed:
            raise ConfigError(f"--inject {text}: {kind} takes no {name}; it takes {', '.join(allowed)}")
        if name in values:
            raise ConfigError(f"--inject {text}: {name} is given twice; remove one")
        values[name] = _value(text, name, value)
    if "step" not in values:
        raise ConfigError(f"--inject {text}: step is missing; write it as in {EXAMPLE}")
    return Fault(kind, **values)


def _value(text: str, name: str, value: str) -> Any:
    least = {"rank": 0, "step": 1, "attempt": 1, "steps": 1, "element": 0, "bit": 0}
    if name in least:
        if not value.isdecimal() or not value.isascii() or len(value) > 15 or int(value) < least[name]:
            raise ConfigError(f"--inject {text}: {name} must be a whole number from {least[name]}, not {value!r}")
        return int(value)
    if name == "every":
        if value not in ("true", "false"):
            raise ConfigError(f"--inject {text}: every is true or false, not {value!r}")
        return value == "true"
    if name == "factor":
        try:
            factor = float(value)
        except ValueError:
            factor = 0.0
        if not 1.0 < factor <= 1e6:
            raise ConfigError(f"--inject {text}: factor must be a number above 1, and 1e6 at most, not {value!r}")
        return factor
    if name == "phase" and value not in FAULT_PHASES:
        raise ConfigError(f"--inject {text}: phase is one of {', '.join(FAULT_PHASES)}, not {value!r}")
    return value


def check_faults(faults: Sequence[Fault], world: int, steps: int, local: bool, nodes: int = 1) -> None:
    """Check that faults can happen in a run of `world` ranks, `steps` steps and `nodes` agents, whose folder is `local`
    or at a URL. Raises ConfigError for the first that cannot."""
    for fault in faults:
        given = f"--inject {fault.text}"
        if fault.rank >= world:
            ranks = "rank 0" if world == 1 else f"ranks 0 to {world - 1}"
            raise ConfigError(f"{given}: no rank {fault.rank} in a run of {ranks}; choose one of these")
        if fault.step > steps:
            raise ConfigError(f"{given}: the run has {steps} steps (train.steps); choose one of these")
        if fault.kind == "corrupt-checkpoint" and not local:
            raise ConfigError(f"{given}: checkpoints at a URL are not changed; use a run folder on a disk")
        if fault.kind == "node-down" and nodes < 2:
            raise ConfigError(f"{given}: needs another node that continues (--nodes); use kill")


def shift_attempts(faults: Iterable[Fault], first_attempt: int) -> tuple[Fault, ...]:
    """Convert attempts counted from the start of a command to attempts counted from the start of the run folder."""
    return tuple(dataclasses.replace(fault, attempt=first_attempt + fault.attempt - 1) for fault in faults)


def faults_to_message(faults: Iterable[Fault]) -> list[dict[str, Any]]:
    """Convert to JSON, for other nodes."""
    return [dataclasses.asdict(fault) for fault in faults]


def faults_from_message(rows: Iterable[Mapping[str, Any]]) -> tuple[Fault, ...]:
    return tuple(Fault(**row) for row in rows)


def find_missed_faults(faults: Sequence[Fault], happened: Collection[str]) -> list[Fault]:
    """Faults that did not happen; `happened` has the texts of those that did."""
    return [fault for fault in faults if fault.text not in happened]
