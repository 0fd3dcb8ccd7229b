"""Training checks: runs of a tiny model as a user starts them, compared with the loss of one rank on the CPU."""

import contextlib
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.config import load
from phalanx.core import faults
from phalanx.core.errors import RunError
from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind, read_events, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.doctor.machine_checks import append_log_tail
from phalanx.doctor.results import CheckResult, CheckState
from phalanx.launch import run

STEPS, CHECKPOINT_STEP, KILL_STEP, HANG_STEP = 8, 4, 7, 4  # number of steps; steps of the checkpoint and of the faults
TOLERANCE = 1e-4  # relative tolerance of a loss in fp32, for other kernels and another order of sums
HANG_S = 5.0  # limit without progress in a step, after which a rank counts as hung
COLLECTIVE_TIMEOUT_S, COLLECTIVE_TIMEOUT_ON_HOST_S = (
    20.0,
    10.0,
)  # limit of a collective; devices connect during the first one
SEQUENCES = 8  # sequences of a step, or enough that all ranks have equally many
DOCUMENTS = 80
ONE_RANK, PLAIN = "reference", {"parallel.engine": "single"}
REMEDY = "do not train here until the cause is found; see the report for the last log lines"


@dataclass(frozen=True)
class TrainingTestbed:
    """Folder of the test runs, and their ranks: one for each of `devices`."""

    folder: Path
    devices: tuple[str, ...]

    @property
    def world(self) -> int:
        return len(self.devices)

    @property
    def on_cpu(self) -> bool:
        return self.devices[0] == "cpu"

    @property
    def ranks_text(self) -> str:
        """The ranks in words."""
        kind = self.devices[0].partition(":")[0]
        return f"{self.world} rank{'s' if self.world > 1 else ''} on {'the CPU' if kind == 'cpu' else kind}"


@dataclass(frozen=True)
class TestRun:
    """Results of a run: its loss by step, and its events."""

    losses: list[float]
    events: list[dict[str, Any]]


def check_one_rank(place: TrainingTestbed) -> list[CheckResult]:
    """Check the loss of one rank: on the CPU, and on the first device against that."""
    on_host = reference_losses(place)
    if not all(map(math.isfinite, on_host)) or on_host[-1] > 0.9 * on_host[0]:
        text = f"one rank on the CPU does not learn: its loss goes from {on_host[0]:.4g} to {on_host[-1]:.4g}; {REMEDY}"
        return [CheckResult("one-rank", CheckState.WRONG, text)]
    learnt = f"the loss falls from {on_host[0]:.4f} to {on_host[-1]:.4f} in {STEPS} steps"
    if place.on_cpu:
        return [CheckResult("one-rank", CheckState.OK, f"one rank on the CPU learns: {learnt}")]
    found = _train(place, "one-rank", 1, PLAIN)
    return [_compare_with_reference(place, "one-rank", f"one rank on {place.devices[0]}", found.losses, f"; {learnt}")]


def check_zero(place: TrainingTestbed, zero: int) -> list[CheckResult]:
    """Check the loss of all ranks with a stage of ZeRO."""
    name = f"zero-{zero}"
    found = _train(place, name, place.world, {"parallel.zero": zero})
    return [_compare_with_reference(place, name, f"{place.ranks_text}, zero {zero}", found.losses)]


def check_resume(place: TrainingTestbed) -> list[CheckResult]:
    """Check resuming: a run that resumes from its checkpoint, and recovers after a rank is killed."""
    name, rank = "resume", place.world - 1
    _train(place, name, place.world, {"parallel.zero": 2, "train.steps": CHECKPOINT_STEP})
    found = _train(place, name, place.world, {"parallel.zero": 2}, f"kill:rank={rank},step={KILL_STEP}")
    died = [event["reason"] for event in found.events if event["kind"] == EventKind.WORKER_DIED]
    resumed = [event for event in found.events if event["kind"] == EventKind.RESUMED]
    if not died or len(resumed) < 2:
        text = (
            f"a rank was killed in step {KILL_STEP}, but the run recorded {len(died)} deaths and {len(resumed)} resumes"
        )
        return [CheckResult(name, CheckState.WRONG, f"{text}; {REMEDY}")]
    told = f"; it resumed from {', then from '.join(map(_describe_source, resumed))}"
    return [
        _compare_with_reference(
            place, name, f"{place.ranks_text}, ended, resumed, killed and resumed", found.losses, told
        )
    ]


def _describe_source(resumed: dict[str, Any]) -> str:
    return f"{'memory' if resumed.get('memory') else 'the checkpoint'} at step {resumed['step']}"


def check_hang(place: TrainingTestbed) -> list[CheckResult]:
    """Check hang detection: a hung rank must be identified and stopped in time, and the run must continue."""
    name, rank = "time-limit", place.world - 1
    changes = {"parallel.zero": 2, "resilience.hang_timeout_s": HANG_S}
    found = _train(place, name, place.world, changes, f"hang:rank={rank},step={HANG_STEP}")
    died = [event for event in found.events if event["kind"] == EventKind.WORKER_DIED]
    if not any(event.get("type") == "Hang" and event["rank"] == rank for event in died):
        said = "; ".join(f"rank {event['rank']} {event['reason']}" for event in died) or "no rank was stopped"
        text = f"rank {rank} hung in step {HANG_STEP}, but the run did not detect it ({said})"
        remedy = "lower resilience.hang_timeout_s and comm.timeout_s, and monitor runs here"
        return [CheckResult(name, CheckState.WRONG, f"{text}; {remedy}")]
    told = f"; the hung rank was identified and stopped after {HANG_S:g} s"
    return [_compare_with_reference(place, name, f"{place.ranks_text}, one of which hung", found.losses, told)]


def reference_losses(place: TrainingTestbed) -> list[float]:
    """The losses of one rank on the CPU, from a run on first use."""
    done = _losses(RunPaths(place.folder / ONE_RANK))
    return done if len(done) == STEPS else _train(place, ONE_RANK, 1, PLAIN, on_cpu=True).losses


def _compare_with_reference(
    place: TrainingTestbed, name: str, who: str, losses: Sequence[float], remark: str = ""
) -> CheckResult:
    expected = reference_losses(place)
    if len(losses) != STEPS:
        return CheckResult(name, CheckState.WRONG, f"{who}: {len(losses)} of {STEPS} steps have a loss; {REMEDY}")
    off = [abs(found - right) / abs(right) for found, right in zip(losses, expected, strict=True)]
    worst = next((step for step, each in enumerate(off, 1) if not each <= TOLERANCE), None)
    if worst is not None:
        text = f"{who}: the loss differs from one rank on the CPU, {losses[worst - 1]:.6g} instead of"
        return CheckResult(
            name, CheckState.WRONG, f"{text} {expected[worst - 1]:.6g} in step {worst}; {REMEDY}", off[worst - 1]
        )
    return CheckResult(
        name, CheckState.OK, f"{who}: the loss of one rank on the CPU, within {max(off):.0e}{remark}", max(off)
    )


def _train(
    place: TrainingTestbed,
    name: str,
    ranks: int,
    changes: dict[str, Any],
    fault: str | None = None,
    on_cpu: bool = False,
) -> TestRun:
    """Train in a folder of that name, as `phalanx train` does. Raises RunError if it does not finish."""
    paths = RunPaths(place.folder / name)
    planned = faults.parse_faults([] if fault is None else [fault])
    code = run.train(_recipe(place, changes), paths, ranks, {}, on_cpu=on_cpu or place.on_cpu, planned=planned)
    events = list(read_events(paths.events))
    if code != ExitCode.DONE:
        died = [f"rank {event['rank']} {event['reason']}" for event in events if event["kind"] == EventKind.WORKER_DIED]
        for log in sorted(paths.root.glob("logs/*/*.log")):
            append_log_tail(log)
        why = died[-1] if died else "its log may say why"
        raise RunError(f"the run of {ranks} rank{'s' if ranks > 1 else ''} ended with exit code {code} ({why})")
    return TestRun(_losses(paths), events)


def _losses(paths: RunPaths) -> list[float]:
    with contextlib.suppress(OSError):
        return [record["loss"] for record in read_steps(paths.metrics)]
    return []


def _recipe(place: TrainingTestbed, changes: dict[str, Any]) -> Any:
    text = place.folder / "text.jsonl"
    if not text.exists():
        text.write_text(_documents(), encoding="utf-8")
    meeting_s = COLLECTIVE_TIMEOUT_ON_HOST_S if place.on_cpu else COLLECTIVE_TIMEOUT_S
    wanted: dict[str, Any] = {
        "model": {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 64},
        "data": {"source": str(text), "tokenizer_vocab": 280, "seq_len": 32, "cache": str(place.folder / "cache")},
        "train": {
            "steps": STEPS,
            "global_batch": place.world * math.ceil(SEQUENCES / place.world),
            "micro_batch": 1,
            "dtype": "fp32",
        },
        "optim": {"lr": 1e-2, "decay_steps": STEPS, "warmup_steps": 2},
        "parallel": {"engine": "sharded"},
        "balance": {"batch": "even"},
        "checkpoint": {"every": CHECKPOINT_STEP},
        "comm": {"timeout_s": meeting_s},
        "resilience": {"health": "off"},  # which prints lines as well
        "report": {"tensorboard": False},
    }
    wanted["train"] |= {"eval_sequences": 0, "compile": False}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        wanted[section][name] = value
    return load.build_config(wanted, "the recipe of phalanx doctor")


def _documents() -> str:
    """Training text generated by this module: the same on every machine."""
    chosen = random.Random(7)
    words = ["a", "rank", "reads", "its", "share", "of", "the", "text", "and", "adds", "a", "part", "to", "one", "sum"]
    lines = (" ".join(chosen.choices(words, k=60)) for _ in range(DOCUMENTS))
    return "".join(json.dumps({"text": line}) + "\n" for line in lines)
