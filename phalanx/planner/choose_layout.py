"""The layout of a run that leaves it to the planner, on the devices that it has been given: what a run folder's
plan.json holds, and what a run without such a wish is expected to take.

Seen from a run, a plan may leave no device idle and may not turn their order round: the ranks are there. Keys that the
recipe writes are held fixed. What the ranks measure by themselves (shares of work and of the state, layers of stages
that differ) is left to them.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.config import load
from phalanx.config.schema import Config, get
from phalanx.core.errors import ConfigError
from phalanx.layout.hardware import Hardware
from phalanx.layout.model_shape import ModelSpec
from phalanx.planner import advice, measured_cluster, parse_cluster, plan_file, present_cluster
from phalanx.planner.advice import Question
from phalanx.planner.cluster import Cluster
from phalanx.planner.constants import Constants
from phalanx.planner.predict import allocated_bytes, predict
from phalanx.planner.present_cluster import Present
from phalanx.planner.recipe_keys import FREE, keys_of, pins_of
from phalanx.planner.search import Found, Plan
from phalanx.report.event_text import seconds, size

VERSION = 1
# What the ranks of a run find out by themselves, and what follows from their number.
LEFT_TO_THE_RUN = ("parallel.data", "parallel.stages", "balance.work", "balance.state")
FOUND_LATER = ("vocabulary", "trained")
ALIKE = 5e-4  # relative difference of two steps below which neither is the faster
SHEETS, MEASURED = "data-sheets", "measurements"


@dataclass(frozen=True)
class Asked:
    """`config`: the recipe, with what is auto resolved but for its layout; `written`: the keys that it, or the command
    line, has a value for; `nodes`: devices of each node, in order of rank; `known`: what was measured, if anything;
    `folder_spec`: the shapes of `model.from_hf`."""

    config: Config
    written: frozenset[str]
    nodes: tuple[tuple[Present, ...], ...]
    known: Hardware | None = None
    folder_spec: ModelSpec | None = None

    def cluster(self) -> tuple[Cluster, Constants, str]:
        """The devices, the constants for them, and what both rest on."""
        there, constants, is_measured = present_cluster.known_as(self.nodes, self.known)
        return there, constants, MEASURED if is_measured else self._sheets()

    def _sheets(self) -> str:
        """What is said of figures of data-sheets; of devices that have none here they are another one's."""
        there = [device for node in self.nodes for device in node if not device.cores]
        strange = dict.fromkeys(device.model for device in there if not measured_cluster.is_known(device.model))
        if not strange:
            return SHEETS
        names = " and ".join(strange)
        like = measured_cluster.LIKE
        return f"the data-sheet of an {like}, since none of {names} is known (`phalanx hardware` measures it)"


def choose(asked: Asked, before: Mapping[str, Any] | None) -> dict[str, Any]:
    """The record of the best layout: `keys` for the recipe, `layout` and `why` in words, `expected` of a step, and what
    it was chosen `for`. `before` is such a record of an earlier start, which is taken again where nothing that it was
    chosen for has changed. Raises ConfigError for a recipe that cannot be planned, and where nothing fits."""
    free = {key: value for key, value in FREE.items() if key not in asked.written}
    # What was measured is an answer here, not a wish: only without it a model may be cut.
    config = load.update(asked.config, free | {"balance.hardware": None, "parallel.layout": "given"})
    cluster, constants, basis = asked.cluster()
    pins = pins_of(config, [f"{key}=" for key in sorted(asked.written)])
    question = Question(config, asked.folder_spec, (), constants, pins, whole=True)
    chosen_for = {
        "nodes": _plain(asked.nodes),
        # Data and adapters decide on the others, once a run has begun.
        "work": {name: value for name, value in asdict(question.work(cluster)).items() if name not in FOUND_LATER},
        "pins": pins,
    }
    if before is not None and before.get("for") == chosen_for and "layout" in before:
        return {**before, "again": True}
    found = question.on(cluster)
    if not found.plans:
        raise ConfigError(_nothing(question, cluster, found))
    plan = found.best
    keys = {key: value for key, value in keys_of(plan, config).items() if key not in LEFT_TO_THE_RUN}
    if plan.choice.state and plan.choice.tensor > 1:  # a run divides by memory only among ranks that hold a whole model
        keys["balance.state"] = list(plan.choice.state)
    if plan.choice.tensor * plan.choice.pipeline > 1 and asked.config.balance.hardware is not None:
        keys["balance.hardware"] = None  # it rests on measuring the whole model on each device
    told = {
        "version": VERSION,
        "for": chosen_for,
        "cluster": parse_cluster.text_of(cluster),
        "basis": basis,
        "keys": keys,
        "layout": in_words(plan),
        "why": _why(found) + ("" if basis in (SHEETS, MEASURED) else f"; this is from {basis}"),
        "expected": expected(plan),
        "runners_up": [
            {
                "layout": in_words(other),
                "keys": keys_of(other, config),
                "step_s": other.estimate.step_s,
                "goodput": other.goodput,
                "why": advice.why_slower(other, plan),
            }
            for other in found.plans[1:5]
        ],
        "tried": found.tried,
    }
    return {**told, "again": False}


def foretold(asked: Asked) -> dict[str, Any]:
    """The record of what the layout of a resolved recipe is expected to take. Raises ConfigError as `predict`."""
    cluster, constants, basis = asked.cluster()
    found = predict(asked.config, cluster, asked.folder_spec, constants)
    plan = Plan(found.choice, found.estimate, cluster)
    return {
        "version": VERSION,
        "for": {"nodes": _plain(asked.nodes)},
        "cluster": parse_cluster.text_of(cluster),
        "basis": basis,
        "keys": {key: get(asked.config, key) for key in keys_of(plan, asked.config)},
        "expected": expected(plan),
    }


def _plain(nodes: tuple[tuple[Present, ...], ...]) -> list[list[dict[str, Any]]]:
    return [[asdict(device) for device in node] for node in nodes]


def expected(plan: Plan) -> dict[str, Any]:
    """As `phalanx plan` says it, and the bytes that the records of a run are to be compared with."""
    return {**plan_file.expected(plan), "allocated_bytes": max(map(allocated_bytes, plan.estimate.memory))}


def in_words(plan: Plan) -> str:
    """A layout as a person says it."""
    choice = plan.choice
    words = [f"{plan.copies} cop{'y' if plan.copies == 1 else 'ies'} of the model"]
    words += [f"{choice.pipeline} stages{' of two parts' * (choice.virtual > 1)}"] if choice.pipeline > 1 else []
    words += [f"{choice.tensor} slices"] if choice.tensor > 1 else []
    if plan.copies > 1:
        words.append(f"zero {choice.zero}")
        if choice.shard_degree:
            words.append(f"a copy of the state for {choice.shard_degree} ranks")
        if choice.reduce == "per_micro_batch":
            words.append("gradients reduced for each micro-batch")
    words.append(f"micro-batches of {choice.micro_batch}")
    words += ["two slots"] if choice.slots > 1 else []
    if choice.offload:
        words.append("blocks' inputs in the host's memory")
    elif choice.recompute != "none":
        words.append(f"{choice.recompute} recomputation")
    return ", ".join(words)


def _why(found: Found) -> str:
    """What the step goes into, and what the next best layout would lose by."""
    best = found.best.estimate
    name = max(best.terms, key=lambda term: best.terms[term])
    said = f"a step should take {seconds(best.step_s)}, {100 * best.terms[name] / best.step_s:.0f} % of it "
    said += advice.WORDS[name]
    if len(found.plans) > 1:
        other = found.plans[1]
        said += f"; next best of {found.tried} that were looked at: {in_words(other)}, "
        longer = other.lasting_s / found.best.lasting_s - 1
        if longer < ALIKE:
            return said + "as fast"
        said += f"{100 * longer:.1f} % longer, since {advice.why_slower(other, found.best)}"
    return said


def _nothing(question: Question, cluster: Cluster, found: Found) -> str:
    """Why there is no layout, and what to do."""
    begun = f"parallel.layout auto finds no layout of this recipe on {parse_cluster.text_of(cluster)}"
    if found.short is None:
        batch = question.config.train.global_batch
        return (
            f"{begun}: no degrees that it may choose make whole copies of the model on all {cluster.devices} ranks, "
            f"with a sequence of the {batch} of a step for each at least; start fewer ranks, or leave out keys that "
            "the recipe writes"
        )
    short = found.short
    lacks = f"the one that needs the least takes {size(short.needed_bytes)} on a {short.kind.name}, "
    lacks += f"{size(short.missing_bytes)} more than it has"
    ways = advice.ways_out(question, cluster)
    return f"{begun}: {lacks}" + (f"; what would do: {'; or '.join(ways)}" if ways else "; use more or larger devices")
