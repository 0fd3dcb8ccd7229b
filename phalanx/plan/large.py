"""A job on clusters that nobody has at hand: what is simulated, beside the closed forms, as a record."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from phalanx.cluster.affairs import Policy
from phalanx.errors import ConfigError
from phalanx.plan import intervals
from phalanx.plan.advice import Question
from phalanx.plan.cluster import Cluster
from phalanx.plan.record import HARDWARE_SHARE
from phalanx.plan.search import Found, Plan
from phalanx.plan.simulate import Scenario, simulate
from phalanx.resilience_config import ResilienceSection

AIMS = (0.90, 0.95, 0.99)
SIZES = (8, 32, 128, 512, 2048, 8192, 16384)
HANG_S, HANG_STEPS = 20.0, 10  # resilience.hang_s auto
MOST_DEVICES = 131_072
Keep = Literal["checkpoints", "memory", "copies"]
# Of failures, the share that takes back to a checkpoint, by what is kept.
TAKES_BACK: dict[Keep, float] = {"checkpoints": 1.0, "memory": HARDWARE_SHARE, "copies": 0.0}


@dataclass(frozen=True)
class Job:
    """What is to be simulated; seconds. `step_assumed`: nobody has said what it trains. `group`: devices that hold a
    copy of the model together."""

    devices: int
    per_node: int
    mtbf_s: float
    days: float
    step_s: float
    step_assumed: bool
    checkpoint_s: float
    keep: Keep
    spares: int
    seed: int
    group: int = 1
    detect_s: float = 1.0
    restart_s: float = 60.0
    straggler_every_s: float = math.inf
    stall_every_s: float = math.inf

    @property
    def nodes(self) -> int:
        return self.devices // self.per_node

    def saving(self, step_s: float, mtbf_s: float, keep: Keep) -> intervals.Saving:
        """As the closed forms take it."""
        recovery_s = self.detect_s + self.restart_s
        return intervals.Saving(step_s, mtbf_s, recovery_s, self.checkpoint_s, hard=TAKES_BACK[keep])


def simulated(
    job: Job, resilience: ResilienceSection, question: tuple[Question, Cluster, Found] | None
) -> dict[str, Any]:
    """The record of a simulated job. Raises ConfigError for what takes too long, or comes to no whole nodes."""
    if job.devices % job.per_node or job.devices > MOST_DEVICES:
        raise ConfigError(
            f"--gpus {job.devices} are no whole nodes of {job.per_node} devices, or more than {MOST_DEVICES:,}; give a "
            "multiple, or another --per-node"
        )
    best = intervals.best(job.saving(job.step_s, job.mtbf_s, job.keep))
    outcome = simulate(
        Scenario(
            nodes=job.nodes, span_s=job.days * 86400, mtbf_s=job.mtbf_s, step_s=job.step_s, hard=HARDWARE_SHARE,
            detect_s=job.detect_s, restart_s=job.restart_s, memory=job.keep != "checkpoints",
            copied=job.keep == "copies", checkpoint_steps=best.checkpoint_steps or 0, checkpoint_s=job.checkpoint_s,
            spares=job.spares, straggler_every_s=job.straggler_every_s, stall_every_s=job.stall_every_s,
            hang_s=_hang_s(resilience, job.step_s), policy=_policy(resilience, job),
        ),
        job.seed,
    )  # fmt: skip
    return {
        "version": 1,
        "job": {
            "devices": job.devices, "nodes": job.nodes, "mtbf_s": job.mtbf_s, "step_s": job.step_s,
            "step_assumed": job.step_assumed, "checkpoint_s": job.checkpoint_s, "keep": job.keep,
            "checkpoint_steps": best.checkpoint_steps,
            "detect_s": job.detect_s, "restart_s": job.restart_s, "spares": job.spares, "seed": job.seed,
        },
        "span_s": outcome.span_s,
        "goodput": outcome.goodput,
        "closed_form": best.goodput,
        "if_kept": {keep: intervals.best(job.saving(job.step_s, job.mtbf_s, keep)).goodput for keep in TAKES_BACK},
        "seconds": outcome.seconds,
        "steps": outcome.steps,
        "attempts": outcome.attempts,
        "hard": outcome.hard,
        "soft": outcome.soft,
        "stalls": outcome.stalls,
        "stragglers": outcome.stragglers,
        "fewest": outcome.fewest,
        "ended": outcome.ended,
        "recovery_for": [
            (aim, intervals.recovery_for_s(aim, job.saving(job.step_s, job.mtbf_s, job.keep))) for aim in AIMS
        ],
        "scaling": [_scaled(job, size, question) for size in SIZES],
    }  # fmt: skip


def _scaled(job: Job, devices: int, question: tuple[Question, Cluster, Found] | None) -> dict[str, Any]:
    """As many devices of the same kind (of unlike ones of the first), in whole nodes, each failing as often; the same
    steps, where it is known what they are."""
    step_s = job.step_s
    rates: dict[str, float | None] = {}
    if question is not None:
        asked, cluster, found = question
        group = cluster.groups[0]
        there = replace(cluster, groups=(replace(group, nodes=max(1, devices // group.per_node)),))
        devices = there.devices
        plan, best = _best_on(there, asked, found), found.best
        rates = {"tokens_per_s": None, "of_ideal": None}
        if plan is not None:
            step_s, per_s = plan.estimate.step_s, plan.estimate.tokens_per_s
            rates = {"tokens_per_s": per_s, "of_ideal": per_s * best.devices / (best.estimate.tokens_per_s * devices)}
    mtbf_s = job.mtbf_s * job.devices / devices
    best_of = intervals.best(job.saving(step_s, mtbf_s, job.keep))
    every_s = None if best_of.checkpoint_steps is None else best_of.checkpoint_steps * step_s
    return {
        "devices": devices, "mtbf_s": mtbf_s, **rates, "checkpoint_every_s": every_s, "goodput": best_of.goodput,
    }  # fmt: skip


def _best_on(there: Cluster, question: Question, near: Found) -> Plan | None:
    """The best plan; None where nothing fits, or what the command line holds fixed needs more devices."""
    try:
        plans = question.on(there, near).plans
    except ConfigError:
        return None
    return plans[0] if plans else None


def _hang_s(resilience: ResilienceSection, step_s: float) -> float:
    wanted = resilience.hang_s
    if wanted == "off":
        return math.inf
    return max(HANG_S, HANG_STEPS * step_s) if wanted == "auto" else float(wanted)


def _policy(resilience: ResilienceSection, job: Job) -> Policy:
    """As a run would have it, but for nodes in place of ranks."""
    return Policy(
        nodes=job.nodes,
        max_restarts=resilience.max_restarts,
        on_lost_node=tuple(resilience.on_lost_node),
        wait_s=resilience.wait_for_node_s,
        grow=resilience.grow,
        same_crash=resilience.same_crash,
        group=-(-job.group // job.per_node),
    )
