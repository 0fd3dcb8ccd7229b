"""plan.json: what was asked, the layout that was chosen as keys of a recipe, what is expected of it, and what
else there is to say. Written for people and programs; `table.py` shows it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from phalanx.plan import advice, parse
from phalanx.plan.advice import Question
from phalanx.plan.cluster import Cluster
from phalanx.plan.experience import Experience
from phalanx.plan.intervals import Saving, best
from phalanx.plan.memory import Held
from phalanx.plan.recipe_keys import checked, keys_of
from phalanx.plan.search import Found, Plan, Short

VERSION = 1
# Failures of one device, seconds: 419 unexpected interruptions in 54 days on 16,384 GPUs (Llama 3, Dubey et al. 2024,
# table 5), of which so many were of hardware, or may have been.
DEVICE_MTBF_S = 54 * 86400 * 16384 / 419
HARDWARE_SHARE = 0.78
RECOVERY_S = 60.0  # until a large job steps again: reading a checkpoint, compiling, the first collectives
LEAST_S = 1e-3  # of a checkpoint: nothing is free

DAY_S = 86400.0


@dataclass(frozen=True)
class Wanted:
    """What the command line asks beside the layout; None: nothing."""

    tokens: float | None = None  # to train on
    price: float | None = None  # of a device for an hour
    mtbf_s: float | None = None  # of the whole job
    explain: str | None = None  # key=value
    experience: Experience | None = None  # what a run has shown of failures and of saving


def plan_record(question: Question, cluster: Cluster, found: Found, wanted: Wanted, recipe_name: str) -> dict[str, Any]:
    """The record of a plan, JSON-able. Raises ConfigError where the recipe refuses what was found, or a wish."""
    plan = found.best
    work = question.work(plan.cluster)
    checked(question.config, plan)
    saving = saving_of(plan, wanted.mtbf_s, wanted.experience)
    record: dict[str, Any] = {
        "version": VERSION,
        "recipe": recipe_name,
        "model": {
            "parameters": work.parameters(), "layers": work.layers, "hidden": work.hidden, "seq_len": work.seq_len,
            "global_batch": work.global_batch, "precision": work.precision,
        },
        "cluster": _cluster(cluster),
        "used": {**_cluster(plan.cluster), "devices": plan.devices, "copies": plan.copies},
        "keys": {**keys_of(plan), "checkpoint.every": saving["checkpoint_steps"]},
        "expected": expected(plan),
        "saving": saving,
        "idle": advice.idle(question, cluster, plan),
        "runners_up": [
            {
                "keys": keys_of(other),
                "cluster": parse.text_of(other.cluster),
                "step_s": other.estimate.step_s,
                "why": advice.why_slower(other.estimate, plan.estimate),
            }
            for other in found.plans[1:5]
        ],
        "helps": [{"what": what, "times": times} for what, times in advice.helps(question, cluster, found)],
        "tried": found.tried,
    }  # fmt: skip
    if wanted.tokens is not None:
        record["goal"] = goal(plan, wanted.tokens, wanted.price, saving["goodput"])
    if wanted.explain is not None:
        asked = advice.explain(question, cluster, plan, wanted.explain)
        theirs = asked.pop("plan", None)
        if theirs is not None:
            asked |= {"keys": keys_of(theirs), "expected": expected(theirs)}
        record["explain"] = asked
    return record


def expected(plan: Plan) -> dict[str, Any]:
    """What a step takes, by where it goes, and what devices hold."""
    estimate = plan.estimate
    return {
        "step_s": estimate.step_s,
        "terms": dict(estimate.terms),
        "tokens_per_s": estimate.tokens_per_s,
        "tokens_per_s_per_device": estimate.tokens_per_s / plan.devices,
        "mfu": estimate.mfu,
        "memory": [_held(held) for held in _ends(estimate.memory)],
    }


def _ends(holders: tuple[Held, ...]) -> list[Held]:
    """The fullest device of each kind and stage; of many stages the fullest and the emptiest."""
    fullest: dict[tuple[str, int], Held] = {}
    for held in holders:
        key = (held.kind.name, held.stage)
        if key not in fullest or held.left < fullest[key].left:
            fullest[key] = held
    ordered = sorted(fullest.values(), key=lambda held: held.left)
    return ordered if len(ordered) <= 4 else [*ordered[:2], *ordered[-2:]]


def _held(held: Held) -> dict[str, Any]:
    return {
        "kind": held.kind.name,
        "stage": held.stage,
        "devices": held.devices,
        "bytes": held.total,
        "of_bytes": held.kind.memory_bytes,
        "parts": dict(held.parts),
    }


def _cluster(cluster: Cluster) -> dict[str, Any]:
    return {
        "text": parse.text_of(cluster),
        "devices": cluster.devices,
        "nodes": cluster.nodes,
        "groups": [
            {"nodes": group.nodes, "per_node": group.per_node, "kind": group.kind.name} for group in cluster.groups
        ],
        "between_bits_per_s": cluster.between_bits_per_s,
    }


def saving_of(plan: Plan, mtbf_s: float | None, experience: Experience | None = None) -> dict[str, Any]:
    """How often to save, by Young and Daly. A checkpoint holds training up while the state leaves the device; the rest
    is written while it goes on. Both this and a recovery take what a run has shown, where one is given.

    Where steps are kept in memory, only a lost node goes back to a checkpoint. A run keeps every step, and what that
    costs is in the step's seconds; `commit_steps` would be enough."""
    estimate = plan.estimate
    holders, step_s = estimate.memory, estimate.step_s
    cost_s = max(LEAST_S, *(held.state_bytes / held.kind.host_bytes_per_s for held in holders))
    commits, commit_s = all(held.keeps.own for held in holders), estimate.terms["commit"]
    recovery_s = RECOVERY_S
    checkpoint_from = recovery_from = None
    if experience is not None and experience.checkpoint_s is not None:
        cost_s, checkpoint_from = max(LEAST_S, experience.checkpoint_s), experience.run
    if experience is not None and experience.recovery_s is not None:
        recovery_s, recovery_from = experience.recovery_s, experience.run
    mtbf = mtbf_s if mtbf_s is not None else DEVICE_MTBF_S / plan.devices
    saving = Saving(step_s, mtbf, recovery_s, cost_s, hard=HARDWARE_SHARE if commits else 1.0)
    found = best(saving)
    enough = best(replace(saving, step_s=step_s - commit_s, commit_s=commit_s)).commit_steps
    return {
        "mtbf_s": mtbf,
        "mtbf_assumed": mtbf_s is None,
        "recovery_s": recovery_s,
        "recovery_from": recovery_from,  # the run that has shown it; None: assumed
        "checkpoint_s": cost_s,
        "checkpoint_from": checkpoint_from,
        "checkpoint_steps": found.checkpoint_steps,
        "commit_s": commit_s if commits else None,  # of the step; None: nothing is committed in memory
        "commit_steps": enough if commits else None,
        "replicas": None if estimate.replicas is None else asdict(estimate.replicas),
        "goodput": found.goodput,
    }


def goal(plan: Plan, tokens: float, price: float | None, good: float) -> dict[str, Any]:
    """Days to so many tokens, failures included, and what that costs at a price of a device for an hour."""
    days = tokens / (plan.estimate.tokens_per_s * good) / DAY_S
    money = None if price is None else days * 24 * plan.devices * price
    return {"tokens": tokens, "days": days, "price": price, "money": money}


def short_record(question: Question, cluster: Cluster, short: Short) -> dict[str, Any]:
    """What is said where nothing fits."""
    return {
        "version": VERSION,
        "fits": False,
        "cluster": _cluster(cluster),
        "kind": short.kind.name,
        "stage": short.stage,
        "needed_bytes": short.needed_bytes,
        "missing_bytes": short.missing_bytes,
        "parts": dict(short.parts),
        "ways_out": advice.ways_out(question, cluster),
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
