"""Simulations of large jobs: a record of the simulation beside the closed forms."""

import math
from dataclasses import dataclass, replace
from typing import Any

from phalanx.config.operations import ResilienceSection
from phalanx.core.errors import ConfigError
from phalanx.elastic.supervisor.state import RecoveryPolicy
from phalanx.planner import checkpoint_interval
from phalanx.planner.advice import PlanQuery
from phalanx.planner.cluster import ClusterSpec
from phalanx.planner.compute_cost import peak_dtype
from phalanx.planner.cost import CostModel, RecoverySource, StepEstimate
from phalanx.planner.failures import HARDWARE_SHARE
from phalanx.planner.plan import Plan, SearchResult
from phalanx.planner.simulate import Scenario, Stalls, Stragglers, simulate

AIMS = (0.90, 0.95, 0.99)
SIZES = (8, 32, 128, 512, 2048, 8192, 16384)
HANG_S, HANG_STEPS = 20.0, 10  # resilience.hang_timeout_s auto
MOST_DEVICES = 131_072
MOST_STEPS = 10**9  # between copies
# Fraction of failures after which a job returns to a checkpoint, by recovery source.
CHECKPOINT_LOSS_SHARE: dict[RecoverySource, float] = {"checkpoints": 1.0, "memory": HARDWARE_SHARE, "copies": 0.0}
RECOVERY_SOURCES: tuple[RecoverySource, ...] = tuple(CHECKPOINT_LOSS_SHARE)


def estimate_by_source(plan: Plan, question: PlanQuery) -> dict[RecoverySource, StepEstimate]:
    """The step estimates of a plan's layout by recovery source, whatever the recipe says; without those that do
    not fit."""
    resilience = question.config.resilience
    memory = "true" if resilience.in_memory_checkpoints is True else "auto"
    every = "auto" if resilience.replicate_every == "off" else resilience.replicate_every
    found: dict[RecoverySource, StepEstimate] = {}
    for said in (("false", "off"), (memory, "off"), (memory, every)):
        asked = question.with_keys(
            f"resilience.in_memory_checkpoints={said[0]}", f"resilience.replicate_every={said[1]}"
        )
        estimate = CostModel(asked.work(plan.cluster), plan.cluster, asked.constants).estimate(plan.choice)
        if estimate.fits:
            found.setdefault(estimate.recovers_from, estimate)
    return found


def keys_for(keep: RecoverySource, resilience: ResilienceSection) -> dict[str, Any]:
    """The keys of a recipe with which that outlives a failure."""
    if keep == "checkpoints":
        return {"resilience.in_memory_checkpoints": False, "resilience.replicate_every": "off"}
    every = "every_step" if resilience.replicate_every == "off" else resilience.replicate_every
    return {
        "resilience.in_memory_checkpoints": resilience.in_memory_checkpoints or "auto",
        "resilience.replicate_every": "off" if keep == "memory" else every,
    }


@dataclass(frozen=True)
class LargeJob:
    """The job to simulate, in seconds. `step_assumed`: without a recipe, the step's time is assumed. `commit_s` comes
    to `step_s` where steps are kept, and `copies_s` besides where each `copies_every`th is copied, on average.
    `possible`: what there is room for. `group`: devices that hold a copy of the model together. `checkpoint_every`:
    steps between checkpoints, where that is held fixed; None: as pays best."""

    devices: int
    per_node: int
    mtbf_s: float
    days: float
    step_s: float
    step_assumed: bool
    checkpoint_s: float
    keep: RecoverySource
    spares: int
    seed: int
    commit_s: float = 0.0
    copies_s: float = 0.0
    copies_every: int = 1
    possible: tuple[RecoverySource, ...] = RECOVERY_SOURCES
    group: int = 1
    checkpoint_every: int | None = None
    detect_s: float = 1.0
    restart_s: float = 60.0
    straggler_every_s: float = math.inf
    stall_every_s: float = math.inf

    @property
    def nodes(self) -> int:
        return self.devices // self.per_node

    def recovery_source_on(self, devices: int) -> RecoverySource:
        """The recovery source on a number of devices: a single node has no other node for copies."""
        return "memory" if self.keep == "copies" and devices <= self.per_node else self.keep

    def overhead_s(self, keep: RecoverySource) -> float:
        """By which each step is longer for that to outlive a failure."""
        commit_s = 0.0 if keep == "checkpoints" else self.commit_s
        return commit_s + (self.copies_s if keep == "copies" else 0.0)

    def with_plan(self, plan: Plan, question: PlanQuery) -> "LargeJob":
        """Use the steps of a plan, and its costs of commits and copies."""
        kept = estimate_by_source(plan, question)
        alone_s = kept["checkpoints"].step_s  # what takes the least memory fits wherever the plan does
        memory_s = kept["memory"].step_s if "memory" in kept else alone_s
        every = question.config.resilience.replicate_every
        return replace(
            self,
            step_s=alone_s,
            step_assumed=False,
            commit_s=memory_s - alone_s,
            copies_s=kept["copies"].step_s - memory_s if "copies" in kept else 0.0,
            copies_every=every if isinstance(every, int) else 1,
            possible=tuple(kept),
            checkpoint_every=question.failure_model().checkpoint_steps,
        )

    def checkpoint_costs(self, keep: RecoverySource) -> checkpoint_interval.CheckpointCosts:
        """As the closed forms take it. A lost node takes the run back to the last step that another one has: as to a
        checkpoint that costs nothing."""
        recovery_s, commit_s = self.detect_s + self.restart_s, self.overhead_s(keep)
        if self.loses_kept_steps(keep):
            return checkpoint_interval.CheckpointCosts(
                self.step_s, self.mtbf_s, recovery_s, 0.0, commit_s, HARDWARE_SHARE
            )
        return checkpoint_interval.CheckpointCosts(
            self.step_s, self.mtbf_s, recovery_s, self.checkpoint_s, commit_s, CHECKPOINT_LOSS_SHARE[keep]
        )

    def loses_kept_steps(self, keep: RecoverySource) -> bool:
        """Whether a lost node takes steps back that are kept, since not all of them are copied."""
        return keep == "copies" and self.copies_every > 1

    def checkpoint_steps(self, keep: RecoverySource) -> int | None:
        """Steps between checkpoints; None: no failure returns to one, and none are requested."""
        if self.checkpoint_every is not None:
            return self.checkpoint_every
        return (
            None
            if self.loses_kept_steps(keep)
            else checkpoint_interval.best_intervals(self.checkpoint_costs(keep)).checkpoint_steps
        )

    def goodput(self, keep: RecoverySource, saving: checkpoint_interval.CheckpointCosts | None = None) -> float:
        """Goodput by the closed form, with each step committed; `saving` replaces the job's costs."""
        saving = saving or self.checkpoint_costs(keep)
        if keep != "copies":
            return checkpoint_interval.goodput(
                saving, 1, self.checkpoint_every or checkpoint_interval.best_intervals(saving).checkpoint_steps
            )
        found = checkpoint_interval.goodput(saving, 1, self.copies_every if self.loses_kept_steps(keep) else None)
        # Checkpoints that are asked for hold training up all the same.
        held_up_s = 0.0 if self.checkpoint_every is None else self.checkpoint_s / self.checkpoint_every
        period_s = self.step_s + self.overhead_s(keep)
        return found * period_s / (period_s + held_up_s)


def check_device_count(devices: int, per_node: int) -> None:
    """Raises ConfigError for devices that are no whole nodes, or too many."""
    if devices % per_node or devices > MOST_DEVICES:
        raise ConfigError(
            f"--gpus {devices} is no multiple of {per_node} devices per node, or more than {MOST_DEVICES:,}; give a "
            "multiple, or another --per-node"
        )


def simulate_job(
    job: LargeJob, resilience: ResilienceSection, question: tuple[PlanQuery, ClusterSpec, SearchResult] | None
) -> dict[str, Any]:
    """The record of a simulated job. Raises ConfigError if it takes too long, or if the devices do not make whole
    nodes."""
    check_device_count(job.devices, job.per_node)
    if job.spares * job.per_node > MOST_DEVICES:
        raise ConfigError(f"--spares {job.spares} are nodes of more than {MOST_DEVICES:,} devices; give fewer")
    keep, checkpoint_steps = job.keep, job.checkpoint_steps(job.keep)
    outcome = simulate(
        Scenario(
            nodes=job.nodes, span_s=job.days * 86400, mtbf_s=job.mtbf_s, step_s=job.step_s, hard=HARDWARE_SHARE,
            detect_s=job.detect_s, restart_s=job.restart_s, memory=keep != "checkpoints",
            commit_s=job.overhead_s(keep), copied=job.copies_every if keep == "copies" else 0,
            checkpoint_steps=checkpoint_steps or 0, checkpoint_s=job.checkpoint_s,
            spares=job.spares, stragglers=Stragglers(job.straggler_every_s),
            stalls=Stalls(job.stall_every_s, hang_s=_hang_s(resilience, job.step_s)), policy=_policy(resilience, job),
        ),
        job.seed,
    )  # fmt: skip
    return {
        "version": 1,
        "job": {
            "devices": job.devices, "nodes": job.nodes, "mtbf_s": job.mtbf_s, "step_s": job.step_s,
            "step_assumed": job.step_assumed, "checkpoint_s": job.checkpoint_s, "keep": keep,
            "checkpoint_steps": checkpoint_steps, "checkpoint_held": job.checkpoint_every is not None,
            "commit_s": job.overhead_s(keep), "copies_every": job.copies_every,
            "detect_s": job.detect_s, "restart_s": job.restart_s, "spares": job.spares, "seed": job.seed,
        },
        "span_s": outcome.span_s,
        "goodput": outcome.goodput,
        "closed_form": job.goodput(keep),
        "if_kept": {each: job.goodput(each) for each in job.possible},
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
            (
                aim,
                checkpoint_interval.longest_recovery_s(
                    aim, job.checkpoint_costs(keep), lambda saving: job.goodput(keep, saving)
                ),
            )
            for aim in AIMS
        ],
        "mixed": question is not None and len(question[1].groups) > 1,
        "scaling": [_scaled(job, size, question) for size in SIZES],
    }  # fmt: skip


def _scaled(
    job: LargeJob, devices: int, question: tuple[PlanQuery, ClusterSpec, SearchResult] | None
) -> dict[str, Any]:
    """Scale the job to another number of devices in whole nodes, in the same mix of kinds and with the same failure
    rate per device. Tokens per second exclude the cost of commits, which the goodput includes."""
    there_job, rates, keep = job, dict[str, float | None](), job.recovery_source_on(devices)
    if question is not None:
        asked, cluster, found = question
        there = resize_cluster(cluster, devices)
        devices = there.devices
        mtbf_s = job.mtbf_s * job.devices / devices
        asked = replace(asked, failures=replace(asked.failures, mtbf_s=mtbf_s))
        plan, best = _best_on(there, asked, found), found.best
        rates = {"tokens_per_s": None, "of_ideal": None}
        if plan is not None:
            there_job, keep = job.with_plan(plan, asked), plan.estimate.recovers_from
            alike = plan.estimate.tokens_per_s / best.estimate.tokens_per_s
            ideal = _power(there, there.devices, asked) / _power(best.cluster, best.devices, asked)
            per_s = plan.estimate.tokens_per_s * plan.estimate.step_s / there_job.step_s
            rates = {"tokens_per_s": per_s, "of_ideal": alike / ideal}
    there_job = replace(there_job, mtbf_s=job.mtbf_s * job.devices / devices)
    steps = there_job.checkpoint_steps(keep)
    return {
        "devices": devices, "mtbf_s": there_job.mtbf_s, **rates,
        "checkpoint_every_s": None if steps is None else steps * there_job.step_s,
        "goodput": there_job.goodput(keep),
    }  # fmt: skip


def resize_cluster(cluster: ClusterSpec, devices: int) -> ClusterSpec:
    """A cluster of about that many devices in whole nodes, with unchanged proportions of the groups; nodes lost by
    rounding go to the groups with the largest remainder."""
    there = sum(group.nodes for group in cluster.groups)
    nodes = max(1, round(devices * there / cluster.devices))
    exact = [nodes * group.nodes / there for group in cluster.groups]
    whole = [int(part) for part in exact]
    lacking = sorted(range(len(exact)), key=lambda number: whole[number] - exact[number])
    for number in lacking[: nodes - sum(whole)]:
        whole[number] += 1
    return cluster.resize_groups(whole)


def _power(cluster: ClusterSpec, devices: int, question: PlanQuery) -> float:
    """Matrix-product FLOP/s of the first devices."""
    work = question.work(cluster)
    return sum(
        max(0, min(behind, devices) - begin)
        * group.kind.peak_flop_per_s(peak_dtype(work, group.kind))
        * group.kind.sustained
        for begin, behind, group in cluster.spans
    )


def _best_on(there: ClusterSpec, question: PlanQuery, near: SearchResult) -> Plan | None:
    """The best plan; None where nothing fits, or what the command line holds fixed needs more devices."""
    try:
        plans = question.search(there, near).plans
    except ConfigError:
        return None
    return plans[0] if plans else None


def _hang_s(resilience: ResilienceSection, step_s: float) -> float:
    wanted = resilience.hang_timeout_s
    if wanted == "off":
        return math.inf
    return max(HANG_S, HANG_STEPS * step_s) if wanted == "auto" else float(wanted)


def _policy(resilience: ResilienceSection, job: LargeJob) -> RecoveryPolicy:
    """As a run would have it, but for nodes in place of ranks."""
    return RecoveryPolicy(
        nodes=job.nodes,
        max_restarts=resilience.max_restarts,
        on_lost_node=tuple(resilience.on_lost_node),
        wait_s=resilience.wait_for_node_s,
        grow=resilience.rejoin_nodes,
        same_crash=resilience.max_identical_failures,
        group=-(-job.group // job.per_node),
    )
