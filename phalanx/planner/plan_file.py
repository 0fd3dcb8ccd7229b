"""plan.json: the query, the chosen layout as recipe keys, its prediction, and further advice.

Written for people and programs; `tables.py` shows it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from phalanx.planner import advice, parse_cluster
from phalanx.planner.advice import PlanQuery
from phalanx.planner.checkpoint_interval import best_intervals
from phalanx.planner.cluster import ClusterSpec
from phalanx.planner.failures import FailureModel, ObservedFailures, check_goodput
from phalanx.planner.memory import DeviceMemory
from phalanx.planner.plan import Plan, SearchResult, Shortfall
from phalanx.planner.recipe_keys import apply_plan, keys_of

VERSION = 1
DAY_S = 86400.0


@dataclass(frozen=True)
class PlanOptions:
    """Options of the command line beside the layout; None: not given."""

    tokens: float | None = None  # to train on
    price: float | None = None  # of a device for an hour
    explain: str | None = None  # key=value
    experience: ObservedFailures | None = None  # a run's observed failures and checkpoint times


def plan_record(
    question: PlanQuery, cluster: ClusterSpec, found: SearchResult, wanted: PlanOptions, recipe_name: str
) -> dict[str, Any]:
    """The record of a plan, JSON-able. Raises ConfigError if the recipe rejects the layout, or an option, and if
    failures leave no goodput."""
    plan = found.best
    work = question.work(plan.cluster)
    apply_plan(question.config, plan)
    saving = saving_of(plan, question.failure_model(), wanted.experience)
    record: dict[str, Any] = {
        "version": VERSION,
        "recipe": recipe_name,
        "model": {
            "parameters": work.parameters(), "layers": work.layers, "hidden": work.hidden, "seq_len": work.seq_len,
            "global_batch": work.global_batch, "precision": work.precision,
        },
        "cluster": _cluster(cluster),
        "used": {**_cluster(plan.cluster), "devices": plan.devices, "copies": plan.copies},
        "keys": {**keys_of(plan, question.config), "checkpoint.every": saving["checkpoint_steps"] or 0},
        "expected": prediction_record(plan),
        "saving": saving,
        "idle": advice.explain_idle_devices(question, cluster, plan),
        "runners_up": [
            {
                "keys": keys_of(other, question.config),
                "cluster": parse_cluster.format_cluster(other.cluster),
                "step_s": other.estimate.step_s,
                "goodput": other.goodput,
                "why": advice.why_slower(other, plan),
            }
            for other in found.plans[1:5]
        ],
        "helps": [{"what": what, "times": times} for what, times in advice.suggest_purchases(question, cluster, found)],
        "tried": found.tried,
    }  # fmt: skip
    if wanted.tokens is not None:
        record["goal"] = goal_record(plan, wanted.tokens, wanted.price, saving["goodput"])
    if wanted.explain is not None:
        asked = advice.explain_key(question, cluster, plan, wanted.explain)
        theirs = asked.pop("plan", None)
        if theirs is not None:
            config = question.with_keys(wanted.explain).config
            asked |= {"keys": keys_of(theirs, config), "expected": prediction_record(theirs)}
        record["explain"] = asked
    return record


def prediction_record(plan: Plan) -> dict[str, Any]:
    """The prediction of a step: its time and memory by item."""
    estimate = plan.estimate
    return {
        "step_s": estimate.step_s,
        "terms": dict(estimate.terms),
        "tokens_per_s": estimate.tokens_per_s,
        "tokens_per_s_per_device": estimate.tokens_per_s / plan.devices,
        "mfu": estimate.mfu,
        "memory": [_held(held) for held in _ends(estimate.memory)],
    }


def _ends(holders: tuple[DeviceMemory, ...]) -> list[DeviceMemory]:
    """The fullest device of each kind and stage; of many stages the fullest and the emptiest."""
    fullest: dict[tuple[str, int], DeviceMemory] = {}
    for held in holders:
        key = (held.kind.name, held.stage)
        if key not in fullest or held.free_bytes < fullest[key].free_bytes:
            fullest[key] = held
    ordered = sorted(fullest.values(), key=lambda held: held.free_bytes)
    return ordered if len(ordered) <= 4 else [*ordered[:2], *ordered[-2:]]


def _held(held: DeviceMemory) -> dict[str, Any]:
    return {
        "kind": held.kind.name,
        "stage": held.stage,
        "devices": held.devices,
        "bytes": held.total_bytes,
        "of_bytes": held.kind.memory_bytes,
        "parts": dict(held.parts),
    }


def _cluster(cluster: ClusterSpec) -> dict[str, Any]:
    return {
        "text": parse_cluster.format_cluster(cluster),
        "devices": cluster.devices,
        "nodes": cluster.nodes,
        "groups": [
            {"nodes": group.nodes, "per_node": group.per_node, "kind": group.kind.name} for group in cluster.groups
        ],
        "between_bits_per_s": cluster.between_bits_per_s,
    }


def saving_of(plan: Plan, failures: FailureModel, experience: ObservedFailures | None = None) -> dict[str, Any]:
    """How often to save, by Young and Daly, unless that is held fixed, and what failures leave. `experience`: the run
    that has shown what `failures` say of a recovery and a checkpoint. Raises ConfigError where they leave nothing.

    Where steps are kept in memory, only a lost node goes back to a checkpoint. A run keeps every step; `commit_steps`
    would be enough."""
    estimate = plan.estimate
    saving, commit_s = failures.checkpoint_costs(estimate, plan.devices), estimate.terms["commit"]
    goodput, commits = failures.goodput(estimate, plan.devices), estimate.recovers_from != "checkpoints"
    check_goodput(goodput, saving)
    enough = best_intervals(replace(saving, step_s=saving.step_s - commit_s, commit_s=commit_s)).commit_steps
    return {
        "mtbf_s": saving.mtbf_s,
        "mtbf_assumed": failures.mtbf_s is None,
        "recovery_s": saving.recovery_s,
        # The run that has shown it; None: assumed, or reckoned.
        "recovery_from": experience.run if experience is not None and experience.recovery_s is not None else None,
        "checkpoint_s": saving.checkpoint_s,
        "checkpoint_from": experience.run if experience is not None and experience.checkpoint_s is not None else None,
        "checkpoint_steps": failures.checkpoint_interval(saving),
        "kept": estimate.recovers_from,  # what outlives a failure beside checkpoints
        "commit_s": commit_s if commits else None,  # of the step; None: nothing is committed in memory
        "commit_steps": enough if commits else None,
        "replicas": None if estimate.replicas is None else asdict(estimate.replicas),
        "goodput": goodput,
    }


def goal_record(plan: Plan, tokens: float, price: float | None, good: float) -> dict[str, Any]:
    """Days to so many tokens, failures included, and the cost at a price per device hour."""
    days = tokens / (plan.estimate.tokens_per_s * good) / DAY_S
    money = None if price is None else days * 24 * plan.devices * price
    return {"tokens": tokens, "days": days, "price": price, "money": money}


def short_record(question: PlanQuery, cluster: ClusterSpec, short: Shortfall) -> dict[str, Any]:
    """The record of a plan where nothing fits."""
    return {
        "version": VERSION,
        "fits": False,
        "cluster": _cluster(cluster),
        "kind": short.kind.name,
        "stage": short.stage,
        "needed_bytes": short.needed_bytes,
        "missing_bytes": short.missing_bytes,
        "parts": dict(short.parts),
        "ways_out": advice.suggest_fixes(question, cluster),
    }


def as_overrides(keys: Mapping[str, Any]) -> list[str]:
    """Keys as words of a command line; those that are auto are left out."""
    words = []
    for key, value in keys.items():
        if value == "auto":
            continue
        text = str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")
        words.append(f"{key}={text}")
    return words
