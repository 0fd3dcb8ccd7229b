"""Advice about a plan: comparison with another layout (--explain), upgrades that help most, and remedies where nothing
fits. Every answer is another search or prediction."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.config import load
from phalanx.config.optimizers import find_optimizer
from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import ModelSpec
from phalanx.planner import parse_cluster
from phalanx.planner.cluster import ClusterSpec, NodeGroup
from phalanx.planner.cost import RecoverySource
from phalanx.planner.device_catalog import DEFAULT_CONSTANTS, DEVICE_KINDS, CostConstants, DeviceKind
from phalanx.planner.failures import FailureModel
from phalanx.planner.plan import Plan, SearchResult
from phalanx.planner.recipe_keys import CHOICE_FIELDS, free_layout, pins_of, shape_of, space_of, work_of
from phalanx.planner.search import search_layouts
from phalanx.planner.search_space import limit_degrees
from phalanx.planner.work import StepWork

TERM_NAMES = {
    "compute": "computing",
    "communication": "communication that nothing hides",
    "bubble": "waiting for other stages",
    "imbalance": "waiting for slower devices or larger stages",
    "optimizer": "the update",
    "commit": "keeping the step in memory",
    "offload": "the way to the host's memory",
    "other": "everything else",
}
RECOVERY_SOURCES: tuple[RecoverySource, ...] = ("checkpoints", "memory", "copies")
MISSING_RECOVERY = {"checkpoints": "it keeps no step in memory", "memory": "it keeps no step on another node"}
EXTRA_RECOVERY = {"memory": "it keeps steps in memory", "copies": "it keeps steps on other nodes, too"}
MEMORY = 1.5  # how much more memory is asked about
MOST_NODES = 4096  # that are looked through for enough memory
FAMILIES = 6  # of layouts, as a search keeps them


@dataclass(frozen=True)
class PlanQuery:
    """A planning request: `config` without a layout, `overrides` that fix some keys,
    `folder_spec` the shapes of `model.from_hf` where there is one. `pins`: further fixed fields of a Choice;
    `use_all_devices`: use all devices, in their order. `failures`: their known rates, except for overridden checkpoint
    keys."""

    config: Config
    folder_spec: ModelSpec | None
    overrides: tuple[str, ...]
    constants: CostConstants = DEFAULT_CONSTANTS
    pins: Mapping[str, Any] = field(default_factory=dict)
    use_all_devices: bool = False
    failures: FailureModel = field(default_factory=FailureModel)

    def failure_model(self) -> FailureModel:
        """With the interval of checkpoints, where that is held fixed: at the end there is one anyway."""
        if "checkpoint.every" not in {word.partition("=")[0] for word in self.overrides}:
            return self.failures
        steps = self.config.checkpoint.every or self.config.train.steps
        return replace(self.failures, checkpoint_steps=max(1, steps))

    def work(self, cluster: ClusterSpec) -> StepWork:
        """A step there."""
        return work_of(self.config, shape_of(self.config, self.folder_spec), cluster)

    def search(self, cluster: ClusterSpec, near: SearchResult | None = None) -> SearchResult:
        """Search the best layouts on a cluster; `near` limits degrees to those of an earlier result. Raises
        ConfigError if the recipe itself is invalid."""
        found, work = self._search(cluster, near), self.work(cluster)
        # Without some devices the others may compute in another type, and are judged by that.
        plans = [plan for plan in found.plans if self.work(plan.cluster) == work]
        tried = found.tried
        for part in () if self.use_all_devices else _of_types(cluster):
            alone = self.work(part)
            if alone != work:
                try:
                    more = self._search(part, near)
                except ConfigError:  # the fixed keys do not divide on this cluster either
                    continue
                plans += [plan for plan in more.plans if self.work(plan.cluster) == alone]
                tried += more.tried
        plans.sort(key=lambda plan: plan.effective_step_s)
        return SearchResult(tuple(plans[:FAMILIES]), None if plans else found.shortfall, tried)

    def _search(self, cluster: ClusterSpec, near: SearchResult | None) -> SearchResult:
        work = self.work(cluster)
        pins = {**self.pins, **pins_of(self.config, self.overrides)}
        space = replace(
            space_of(self.config, self.folder_spec, work, cluster, pins), use_all_devices=self.use_all_devices
        )
        if near is not None:
            space = limit_degrees(space, [plan.choice for plan in near.plans])
        return search_layouts(work, cluster, space, self.constants, failures=self.failure_model())

    def same_as(self, other: "PlanQuery", cluster: ClusterSpec) -> bool:
        """Whether a plan is the same for both recipes, although other keys differ."""
        return self._planning_inputs(cluster) == other._planning_inputs(cluster)

    def _planning_inputs(self, cluster: ClusterSpec) -> tuple[object, ...]:
        pins = {**self.pins, **pins_of(self.config, self.overrides)}
        work = self.work(cluster)
        return work, space_of(self.config, self.folder_spec, work, cluster, pins), self.failure_model()

    def with_keys(self, *words: str) -> "PlanQuery":
        """The same with further keys. Raises ConfigError for keys or values that no recipe has."""
        tree = load.apply_overrides(self.config.model_dump(mode="json"), words)
        config = load.build_config(tree, f"the recipe with {' '.join(words)}")
        keys = {word.partition("=")[0] for word in words}
        kept = tuple(word for word in self.overrides if word.partition("=")[0] not in keys)
        return replace(self, config=config, overrides=(*kept, *words))


def _of_types(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    """The cluster without the devices that force the others to a wider compute type."""
    wanted: tuple[Callable[[DeviceKind], bool], ...] = (
        lambda kind: not kind.on_host,
        lambda kind: not kind.on_host and "bf16" in kind.flop_per_s,
        lambda kind: not kind.on_host and "bf16" not in kind.flop_per_s,
    )
    seen = [tuple(range(len(cluster.groups)))]
    for fits in wanted:
        numbers = tuple(number for number, group in enumerate(cluster.groups) if fits(group.kind))
        if numbers and numbers not in seen:
            seen.append(numbers)
            yield cluster.select_groups(numbers)


# ------------------------------------------------------------------------------------------------------- other layouts


def why_slower(other: Plan, best: Plan, faster: bool = False) -> str:
    """The part of a step in which a layout loses most against the best one, or wins, where it is `faster`; scaled to
    the same number of tokens."""
    scale = token_ratio(other, best)
    gains = {name: scale * value - best.estimate.terms[name] for name, value in other.estimate.terms.items()}
    lost = scale * (other.effective_step_s - other.estimate.step_s) - (best.effective_step_s - best.estimate.step_s)
    sign = -1 if faster else 1
    name = max(gains, key=lambda term: sign * gains[term])
    # Where its steps are no worse it can only be failures, whatever the parts of a step are.
    if sign * lost > sign * gains[name] or sign * sum(gains.values()) < 0 < sign * lost:
        kept, ours = other.estimate.recovers_from, best.estimate.recovers_from
        words = ""
        if kept != ours:
            less = RECOVERY_SOURCES.index(kept) < RECOVERY_SOURCES.index(ours)
            words = f"{MISSING_RECOVERY[kept] if less else EXTRA_RECOVERY[kept]}: "
        words += f"failures take {_percent(1 - other.goodput)} of the time"
        return f"{words} instead of {_percent(1 - best.goodput)}"
    theirs_s, ours_s = scale * other.estimate.terms[name], best.estimate.terms[name]
    return f"{TERM_NAMES[name]} takes {_seconds(theirs_s)} instead of {_seconds(ours_s)}"


def token_ratio(other: Plan, best: Plan) -> float:
    """The factor that scales a step of `other` to the tokens of a step of `best`."""
    tokens = [plan.estimate.tokens_per_s * plan.estimate.step_s for plan in (other, best)]
    return tokens[1] / tokens[0]


def explain_key(question: PlanQuery, cluster: ClusterSpec, best: Plan, setting: str) -> dict[str, Any]:
    """Explain `key=value`: compare its step with the best one, term by term. Raises ConfigError for an invalid
    setting."""
    if "=" not in setting:
        raise ConfigError(f"--explain {setting} has no value; write it as key=value, such as parallel.tensor=4")
    asked = question.with_keys(setting)
    if asked.config.model.from_hf != question.config.model.from_hf:
        raise ConfigError(
            f"--explain {setting} changes the shapes of the model; remove --explain and plan with {setting}"
        )
    if asked.same_as(question, cluster):
        return {"wish": setting, "fits": True, "counts": False}
    found = asked.search(cluster)
    if not found.plans:
        if found.shortfall is None:
            raise ConfigError(explain_no_layout(asked, cluster))
        lacking = found.shortfall.missing_bytes
        return {
            "wish": setting,
            "fits": False,
            "counts": True,
            "missing_bytes": lacking,
            "kind": found.shortfall.kind.name,
        }
    theirs = found.best
    slower = best.effective_tokens_per_s / theirs.effective_tokens_per_s - 1
    return {
        "wish": setting,
        "fits": True,
        "counts": True,
        "plan": theirs,
        "tokens_per_s": theirs.estimate.tokens_per_s,
        "goodput": theirs.goodput,
        "slower": slower,
        "why": why_slower(theirs, best, faster=slower < 0),
    }


# --------------------------------------------------------------------------------------------------- what would help


def suggest_purchases(question: PlanQuery, cluster: ClusterSpec, near: SearchResult) -> list[tuple[str, float]]:
    """Upgrades of the cluster: (change, factor of goodput in tokens per second), the most effective first."""
    ideas: list[tuple[str, ClusterSpec]] = []
    if cluster.nodes > 1:
        faster = replace(cluster, between_bits_per_s=2 * cluster.between_bits_per_s)
        ideas.append((f"a network of {2 * cluster.between_bits_per_s / 1e9:g} Gb/s", faster))
    elif cluster.devices > 1:
        linked = tuple(replace(group, kind=_linked(group.kind)) for group in cluster.groups)
        ideas.append(("twice as fast links between the devices", replace(cluster, groups=linked)))
    roomier = replace(cluster, groups=tuple(replace(group, kind=_roomier(group.kind)) for group in cluster.groups))
    ideas.append((f"devices with {MEMORY:g} times the memory", roomier))
    for number, group in enumerate(cluster.groups):
        node = f"one more node of {group.per_node} {group.kind.name}"
        ideas.append((node, parse_cluster.add_nodes(cluster, number, 1)))
    gains = []
    for words, other in ideas:
        found = question.search(other, near)
        if found.plans:
            gains.append((words, found.best.effective_tokens_per_s / near.best.effective_tokens_per_s))
    return sorted(gains, key=lambda gain: -gain[1])


def _roomier(kind: DeviceKind) -> DeviceKind:
    return replace(kind, memory_bytes=int(kind.memory_bytes * MEMORY))


def _linked(kind: DeviceKind) -> DeviceKind:
    return replace(kind, link_bytes_per_s=2 * kind.link_bytes_per_s)


def explain_idle_devices(question: PlanQuery, cluster: ClusterSpec, best: Plan) -> str | None:
    """Why devices are idle; None where all are used."""
    over = cluster.devices - best.devices
    if not over:
        return None
    batch, together = question.config.train.global_batch, best.choice.group_devices
    groups = best.devices // together
    unused = [
        group for group in cluster.groups if all(group.kind.name != used.kind.name for used in best.cluster.groups)
    ]
    if unused:
        names = " and ".join(group.kind.name for group in unused)
        why = f"with the {names} a step would take longer: what they compute is less than what waiting for them costs"
    elif over < together:
        why = f"a copy of the model takes {together} devices, and these are too few for another"
        if best.choice.context > 1:
            why = f"{together} devices take rows together, and these are too few for another such group"
    elif -(-batch // groups) == -(-batch // min(batch, cluster.devices // together)):
        why = f"a step has {batch} sequences, and more copies of the model would not make the largest share less"
    else:
        why = "with more of them a step would take longer: what they compute is less than what their exchanges cost"
    return f"{over} of {cluster.devices} devices {'is' if over == 1 else 'are'} idle: {why}"


# ------------------------------------------------------------------------------------------------- where nothing fits


def explain_no_layout(question: PlanQuery, cluster: ClusterSpec) -> str:
    """Why there is no valid layout, apart from memory."""
    fixed = [word for word in question.overrides if word.partition("=")[0] in CHOICE_FIELDS]
    return (
        f"{' '.join(fixed) or 'the recipe'} fits no number of devices of {parse_cluster.format_cluster(cluster)}; "
        "choose degrees whose product divides the devices of a node, or of all nodes, or remove them"
    )


def suggest_fixes(question: PlanQuery, cluster: ClusterSpec) -> list[str]:
    """Suggest the three cheapest changes with which the model fits, each verified: settings first, then devices."""
    ways: list[str] = []
    for way in (_settings, _shorter, _more_nodes, _larger_devices):
        ways += way(question, cluster)
    return ways[:3]


def _fits(question: PlanQuery, cluster: ClusterSpec, *words: str) -> bool:
    """Whether there is a layout with the further overrides `words`; False where the recipe refuses them."""
    try:
        return bool((question.with_keys(*words) if words else question).search(cluster).plans)
    except ConfigError:
        return False


def _settings(question: PlanQuery, cluster: ClusterSpec) -> list[str]:
    """Settings that take less memory, first those that do not change the curve."""
    found = []
    freed = replace(question, config=free_layout(question.config, ()), overrides=())
    if question.overrides and _fits(freed, cluster):
        found.append("leave out what the command line holds fixed: without it there is a layout that fits")
    resilience = question.config.resilience
    if resilience.in_memory_checkpoints is not False and any(
        kind.on_host for kind in cluster.kinds
    ):  # where steps are kept, too
        words = "resilience.in_memory_checkpoints=false"
        off = () if resilience.replicate_every in ("auto", "off") else ("resilience.replicate_every=off",)
        if _fits(question, cluster, words, *off):
            found.append(f"{' '.join((words, *off))}: no steps in memory, so that failures go back to a checkpoint")
    if smaller := find_optimizer(question.config.optim.name).smaller:
        words = f"optim.name={smaller}"
        if _fits(question, cluster, words):
            found.append(f"{words}: moments in 8 bits (another curve)")
    return found


def _shorter(question: PlanQuery, cluster: ClusterSpec) -> list[str]:
    """The longest sequence that fits, found by halving, with the same tokens per step."""
    length, batch = question.config.data.seq_len, question.config.train.global_batch
    while length > 128:
        length, batch = length // 2, batch * 2
        words = (f"data.seq_len={length}", f"train.global_batch={batch}")
        if _fits(question, cluster, *words):
            return [f"{' '.join(words)}: shorter sequences, as many tokens a step (another curve)"]
    return []


def _more_nodes(question: PlanQuery, cluster: ClusterSpec) -> list[str]:
    """The fewest additional nodes of the kind with the most memory."""
    number = max(range(len(cluster.groups)), key=lambda index: cluster.groups[index].kind.memory_bytes)
    group = cluster.groups[number]

    def enough(more: int) -> bool:
        return _fits(question, parse_cluster.add_nodes(cluster, number, more))

    return _least(enough, lambda more: f"{more} more node{'s' * (more > 1)} of {group.per_node} {group.kind.name}")


def _least(enough: Callable[[int], bool], words: Callable[[int], str]) -> list[str]:
    most = 1
    while not enough(most):
        most *= 2
        if most > MOST_NODES:
            return []
    few = most // 2
    while most - few > 1:
        middle = (few + most) // 2
        few, most = (few, middle) if enough(middle) else (middle, most)
    return [words(most)]


def _larger_devices(question: PlanQuery, cluster: ClusterSpec) -> list[str]:
    """The two smallest kinds of device that are sufficient in place of the present ones."""
    found: list[str] = []
    least = min(group.kind.memory_bytes for group in cluster.groups)
    roomier = sorted(
        (kind for kind in DEVICE_KINDS.values() if kind.memory_bytes > least), key=lambda kind: kind.memory_bytes
    )
    for kind in roomier:
        groups = tuple(
            replace(group, kind=kind) if group.kind.memory_bytes < kind.memory_bytes else group
            for group in cluster.groups
        )
        larger = not found or kind.memory_bytes > DEVICE_KINDS[found[-1].split()[0]].memory_bytes
        if larger and not kind.on_host and _fits(question, replace(cluster, groups=groups)):
            found.append(f"{kind.name} in place of {_names(cluster.groups, kind)}")
        if len(found) == 2:
            break
    return found


def _names(groups: Sequence[NodeGroup], than: DeviceKind) -> str:
    return " and ".join(
        dict.fromkeys(group.kind.name for group in groups if group.kind.memory_bytes < than.memory_bytes)
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
