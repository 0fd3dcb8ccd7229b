"""Choose the layout of a run (`parallel.layout: auto`) on its devices, and predict the step of any run; written to
plan.json.

A plan for a run must use all devices in their order. Keys in the recipe are fixed. What the ranks measure themselves
(batch split, state shares, layers per stage) is left to them.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.config import load
from phalanx.config.schema import Config, get_knob
from phalanx.core.errors import ConfigError
from phalanx.layout.hardware import Hardware
from phalanx.layout.model_shape import ModelSpec
from phalanx.planner import advice, measured_cluster, parse_cluster, plan_file, present_cluster
from phalanx.planner.advice import PlanQuery
from phalanx.planner.cluster import ClusterSpec
from phalanx.planner.device_catalog import CostConstants
from phalanx.planner.plan import Plan, SearchResult
from phalanx.planner.predict import allocator_bytes, predict_recipe_step
from phalanx.planner.present_cluster import NodeDevice
from phalanx.planner.recipe_keys import AUTO_LAYOUT, keys_of, pins_of
from phalanx.report.formats import format_bytes, format_seconds

VERSION = 1
# Keys that the ranks of a run determine themselves, or that follow from their number.
RESOLVED_BY_RUN = ("parallel.engine", "parallel.layers_per_stage", "balance.batch", "balance.optimizer_state")
RESOLVED_LATER = ("vocabulary", "lora")
ALIKE = 5e-4  # relative difference of two steps below which neither is the faster
FROM_DATA_SHEETS, FROM_MEASUREMENTS = "data-sheets", "measurements"


@dataclass(frozen=True)
class LayoutRequest:
    """Inputs of a layout choice. `config`: the recipe, resolved except for its layout; `pinned_keys`: the keys that it,
    or the command line, sets; `nodes`: devices of each node, in order of rank; `known`: measurements, if any;
    `folder_spec`: the shapes of `model.from_hf`."""

    config: Config
    pinned_keys: frozenset[str]
    nodes: tuple[tuple[NodeDevice, ...], ...]
    known: Hardware | None = None
    folder_spec: ModelSpec | None = None

    def cluster(self) -> tuple[ClusterSpec, CostConstants, str]:
        """The devices, the constants for them, and what both rest on."""
        there, constants, is_measured = present_cluster.resolve_cluster(self.nodes, self.known)
        return there, constants, FROM_MEASUREMENTS if is_measured else self._sheets()

    def _sheets(self) -> str:
        """The note on figures from data sheets, and on devices without one."""
        there = [device for node in self.nodes for device in node if not device.cores]
        strange = dict.fromkeys(device.model for device in there if not measured_cluster.has_data_sheet(device.model))
        if not strange:
            return FROM_DATA_SHEETS
        names = " and ".join(strange)
        like = measured_cluster.FALLBACK_KIND
        return f"the data-sheet of an {like}, since none of {names} is known (`phalanx hardware` measures it)"


def choose_layout(asked: LayoutRequest, before: Mapping[str, Any] | None) -> dict[str, Any]:
    """The record of the best layout: `keys` for the recipe, `layout` and `why` in words, the step `expected`, and the
    inputs that it was chosen `for`. `before` is such a record of an earlier start, which is reused if none of its
    inputs has changed. Raises ConfigError for a recipe that cannot be planned, and if nothing fits."""
    free = {key: value for key, value in AUTO_LAYOUT.items() if key not in asked.pinned_keys}
    # Measured shares and layers are results, not requests: a model may be split only without them.
    config = load.update_config(asked.config, free | {"balance.hardware": None, "parallel.layout": "given"})
    cluster, constants, basis = asked.cluster()
    pins = pins_of(config, [f"{key}=" for key in sorted(asked.pinned_keys)])
    question = PlanQuery(config, asked.folder_spec, (), constants, pins, use_all_devices=True)
    chosen_for = {
        "nodes": _plain(asked.nodes),
        # Data and adapters decide on the others, once a run has begun.
        "work": {name: value for name, value in asdict(question.work(cluster)).items() if name not in RESOLVED_LATER},
        "pins": pins,
    }
    if before is not None and before.get("for") == chosen_for and "layout" in before:
        return {**before, "again": True}
    found = question.search(cluster)
    if not found.plans:
        raise ConfigError(_explain_no_layout(question, cluster, found))
    plan = found.best
    keys = {key: value for key, value in keys_of(plan, config).items() if key not in RESOLVED_BY_RUN}
    if plan.choice.state and plan.choice.tensor > 1:  # a run divides by memory only among ranks that hold a whole model
        keys["balance.optimizer_state"] = list(plan.choice.state)
    if plan.choice.tensor * plan.choice.pipeline > 1 and asked.config.balance.hardware is not None:
        keys["balance.hardware"] = None  # it rests on measuring the whole model on each device
    told = {
        "version": VERSION,
        "for": chosen_for,
        "cluster": parse_cluster.format_cluster(cluster),
        "basis": basis,
        "keys": keys,
        "layout": describe_layout(plan),
        "why": _why(found) + ("" if basis in (FROM_DATA_SHEETS, FROM_MEASUREMENTS) else f"; this is from {basis}"),
        "expected": prediction_with_memory(plan),
        "runners_up": [
            {
                "layout": describe_layout(other),
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


def predict_recipe_layout(asked: LayoutRequest) -> dict[str, Any]:
    """The record of a resolved recipe's layout and its prediction. Raises ConfigError as `predict`."""
    cluster, constants, basis = asked.cluster()
    found = predict_recipe_step(asked.config, cluster, asked.folder_spec, constants)
    plan = Plan(found.choice, found.estimate, cluster)
    return {
        "version": VERSION,
        "for": {"nodes": _plain(asked.nodes)},
        "cluster": parse_cluster.format_cluster(cluster),
        "basis": basis,
        "keys": {key: get_knob(asked.config, key) for key in keys_of(plan, asked.config)},
        "expected": prediction_with_memory(plan),
    }


def _plain(nodes: tuple[tuple[NodeDevice, ...], ...]) -> list[list[dict[str, Any]]]:
    return [[asdict(device) for device in node] for node in nodes]


def prediction_with_memory(plan: Plan) -> dict[str, Any]:
    """The prediction in the form of `phalanx plan`, and the bytes to compare with a run's records."""
    return {**plan_file.prediction_record(plan), "allocated_bytes": max(map(allocator_bytes, plan.estimate.memory))}


def describe_layout(plan: Plan) -> str:
    """Describe a layout in words."""
    choice = plan.choice
    words = [f"{plan.copies} cop{'y' if plan.copies == 1 else 'ies'} of the model"]
    words += [f"{choice.pipeline} stages{' of two parts' * (choice.virtual > 1)}"] if choice.pipeline > 1 else []
    words += [f"{choice.tensor} slices"] if choice.tensor > 1 else []
    words += [f"rows shared by {choice.context} ranks"] if choice.context > 1 else []
    words += [f"experts divided over {choice.expert_ranks} ranks"] if choice.expert > 1 else []
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


def _why(found: SearchResult) -> str:
    """Explain the predicted step, and why the next best layout is slower."""
    best = found.best.estimate
    name = max(best.terms, key=lambda term: best.terms[term])
    said = f"a step should take {format_seconds(best.step_s)}, {100 * best.terms[name] / best.step_s:.0f} % of it "
    said += advice.TERM_NAMES[name]
    if len(found.plans) > 1:
        other = found.plans[1]
        said += f"; next best of {found.tried} layouts: {describe_layout(other)}, "
        longer = other.effective_step_s / found.best.effective_step_s - 1
        if longer < ALIKE:
            return said + "as fast"
        said += f"{100 * longer:.1f} % longer, since {advice.why_slower(other, found.best)}"
    return said


def _explain_no_layout(question: PlanQuery, cluster: ClusterSpec, found: SearchResult) -> str:
    """Why there is no layout, and what to do."""
    begun = f"parallel.layout auto finds no layout of this recipe on {parse_cluster.format_cluster(cluster)}"
    if found.shortfall is None:
        batch = question.config.train.global_batch
        return (
            f"{begun}: no degrees that it may choose make whole copies of the model on all {cluster.devices} ranks, "
            f"with at least one of the {batch} sequences of a step for each; start fewer ranks, or remove keys that "
            "the recipe sets"
        )
    short = found.shortfall
    lacks = f"the one that needs the least takes {format_bytes(short.needed_bytes)} on a {short.kind.name}, "
    lacks += f"{format_bytes(short.missing_bytes)} more than it has"
    ways = advice.suggest_fixes(question, cluster)
    return f"{begun}: {lacks}" + (f"; what would do: {'; or '.join(ways)}" if ways else "; use more or larger devices")
