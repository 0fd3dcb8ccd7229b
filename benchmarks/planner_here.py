"""How far `phalanx plan` is from what this project's own engine does on this machine.

    sudo python3 benchmarks/planner_here.py [--quick] [--part time|memory] [--json FILE]

*Time.* Three nodes (lab.py) of two devices each have 1 : 2 : 4 parts of a core and cables of 400 Mbit/s. `phalanx
hardware` measures them three times, of which the medians count; layouts of a small LLaMA are planned with that, one
with nothing held fixed and the others with a key or two, and each runs as its plan says, by `phalanx train`, in turns.
Compared are the seconds of a step. No row is fitted to: what the plan knows of the devices is what was measured.

*Memory.* Layouts of models of several shapes, drawn by a seed, run on ranks of one node. What the process of the
fullest rank holds in a step (`memory_bytes` of its record) is compared with the plan's bytes, and those that a process
has whose model is next to nothing. Then each runs again, and every rank may hold only so much that the plan says by a
hair that it fits: none may be killed.

Needs root. It counts on a machine that does nothing else; docs/planner.md says what was found.
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks.harness import Check, Row
from benchmarks.lab import Ended, Lab, Node, lab, return_memory, steps_s, why_not, write_text
from phalanx.config import load
from phalanx.config.schema import Config
from phalanx.core.records import read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.layout import hardware
from phalanx.layout.hardware import Hardware, MeasuredLink
from phalanx.planner import measured_cluster
from phalanx.planner.advice import PlanQuery
from phalanx.planner.cluster import ClusterSpec, NodeGroup
from phalanx.planner.cost import CostModel
from phalanx.planner.device_catalog import DEVICE_KINDS, DeviceKind
from phalanx.planner.memory import CHECKPOINT_COPY, DeviceMemory
from phalanx.planner.plan import Plan
from phalanx.planner.plan_file import as_overrides
from phalanx.planner.recipe_keys import free_layout, keys_of, pins_of, space_of
from phalanx.planner.search import search_layouts

RECIPE = """
model: {{hidden: {hidden}, layers: {layers}, heads: {heads}, intermediate: {intermediate}, vocab_size: {vocabulary}}}
data: {{source: text.jsonl, tokenizer_vocab: 300, seq_len: {seq_len}, held_out: 0.02, cache: cache}}
train: {{steps: {steps}, global_batch: {global_batch}, micro_batch: 4, dtype: fp32, compile: false, eval_sequences: 0}}
optim: {{decay_steps: 1000}}
checkpoint: {{every: 0}}
comm: {{timeout_s: 300}}
resilience: {{in_memory_checkpoints: false, replicate_every: "off", health: "off", hang_timeout_s: "off",
  max_restarts: 0}}
report: {{tensorboard: false}}
"""
NAME = "recipe.yaml"
PLAIN = ("parallel.tensor=1", "parallel.pipeline=1")
EVEN = "even shares"
PICKED = "as it is planned"
# What of a layout is held fixed; the rest of it is planned.
LAYOUTS: dict[str, tuple[str, ...]] = {
    PICKED: (),
    "zero 1": (*PLAIN, "parallel.zero=1"),
    "zero 2": (*PLAIN, "parallel.zero=2"),
    "zero 3": (*PLAIN, "parallel.zero=3"),
    "two slots": (*PLAIN, "parallel.zero=1", "optim.double_buffer=true"),
    "state on 2 ranks": (*PLAIN, "parallel.zero=2", "parallel.shard_degree=2"),
    "tensor 2": ("parallel.tensor=2", "parallel.pipeline=1"),
    "pipeline 3": ("parallel.tensor=1", "parallel.pipeline=3"),
    "tensor 2 x pipeline 3": ("parallel.tensor=2", "parallel.pipeline=3"),
    "computed again": (*PLAIN, "memory.activations=full"),
    "micro-batches of 1": (*PLAIN, "train.micro_batch=1"),
    EVEN: (*PLAIN, "parallel.zero=1", "train.micro_batch=4"),
}  # fmt: skip
ACCURACY, PICK, MEMORY = 0.15, 1.05, 0.03  # what is asked


@dataclass(frozen=True)
class Size:
    """What is run and for how long: `warm` steps of `steps` do not count, in each of `turns`."""

    cores: tuple[float, ...] = (0.1, 0.2, 0.4)  # of each of a node's two devices
    mbit: float = 400.0
    model: Mapping[str, int] = field(
        default_factory=lambda: {
            "hidden": 384, "layers": 6, "heads": 6, "intermediate": 1152, "vocabulary": 512, "seq_len": 128,
            "global_batch": 84,
        }
    )  # fmt: skip
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    surveys: int = 3
    turns: int = 2
    warm: int = 2
    steps: int = 5
    configurations: int = 50
    largest: int = 5  # of the lists of shapes below, how many are drawn from


QUICK = Size(
    model={"hidden": 96, "layers": 3, "heads": 4, "intermediate": 256, "vocabulary": 300, "seq_len": 32,
           "global_batch": 28},
    layouts=(PICKED, "zero 3", "pipeline 3"), surveys=1, turns=1, steps=3, configurations=3, largest=1,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- layouts


def question_of(file: Path, words: Sequence[str]) -> PlanQuery:
    """What `phalanx plan` asks for such a command line."""
    return PlanQuery(free_layout(load.load_recipe(file, list(words)), list(words)), None, tuple(words))


def keys(plan: Plan, config: Config) -> list[str]:
    """The words of a command line that make a run of a plan; all ranks as they are planned, and nothing found anew."""
    chosen = keys_of(plan, config)
    chosen |= {key: "even" for key in ("balance.batch", "balance.optimizer_state") if chosen[key] == "auto"}
    return as_overrides(chosen)


def ranks_of(plan: Plan, cluster: ClusterSpec, nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """(node of the lab, how many of its devices) in the plan's order of ranks. Groups are told apart by what was
    measured of them; of those alike the first come first."""
    where = [node for node, each in enumerate(nodes) for _ in each.cores]
    free_spans = [(group.kind.name, begin, behind) for begin, behind, group in _one_by_one(cluster).spans]
    found: dict[int, int] = {}
    left = plan.devices
    for group in _one_by_one(plan.cluster).groups:
        span = next(each for each in free_spans if each[0] == group.kind.name)
        free_spans.remove(span)
        for device in range(span[1], min(span[2], span[1] + left)):
            found[where[device]] = found.get(where[device], 0) + 1
        left -= group.per_node
    return list(found.items())


def _one_by_one(cluster: ClusterSpec) -> ClusterSpec:
    """The same with a group for each node."""
    return replace(cluster, groups=tuple(replace(g, nodes=1) for g in cluster.groups for _ in range(g.nodes)))


# ---------------------------------------------------------------------------------------------------------------- time


def middle(found: Sequence[Hardware]) -> Hardware:
    """Of several measurements of the same devices the median of each, and of a node's devices, which are made alike,
    that of all: what disturbs one of them counts for nothing."""
    by_node: dict[int, list[dict[int, float]]] = {}
    carries: dict[int, list[float]] = {}
    for device in (device for each in found for device in each.devices):
        by_node.setdefault(device.node, []).append(dict(device.times))
        if device.carries_s_per_byte is not None:
            carries.setdefault(device.node, []).append(device.carries_s_per_byte)
    devices = []
    for device in found[0].devices:
        times = by_node[device.node]
        sizes = sorted(set.intersection(*map(set, times)))
        median = tuple((size, statistics.median(each[size] for each in times)) for size in sizes)
        carried = statistics.median(carries[device.node]) if device.node in carries else None
        devices.append(replace(device, times=median, carries_s_per_byte=carried))
    links = [each.link for each in found if each.link is not None]
    link = None
    if links:
        rate, latency = (
            statistics.median(getattr(each, name) for each in links) for name in ("bytes_per_s", "latency_s")
        )
        busy = [each.busy_latency_s for each in links if each.busy_latency_s is not None]
        link = MeasuredLink(rate, latency, statistics.median(busy) if busy else None)
    return replace(found[0], devices=tuple(devices), link=link)


def plans(file: Path, cluster: ClusterSpec, names: Sequence[str]) -> dict[str, Plan]:
    """Of each name what `phalanx plan` says; of the even one what it would say of equal shares."""
    found = {}
    for name in names:
        question = question_of(file, LAYOUTS[name])
        plan = question.search(cluster).best
        if name != PICKED and plan.devices < cluster.devices:
            plan = on_all(question, cluster) or plan
        if name == EVEN:
            choice = replace(plan.choice, shares=(), state=(), devices=0)
            plan = Plan(choice, CostModel(question.work(cluster), cluster).estimate(choice), cluster)
        found[name] = plan
    return found


def times(size: Size, folder: Path) -> tuple[list[Row], list[Check]]:
    """Predicted and measured steps of every layout."""
    nodes = [Node((part, part), size.mbit) for part in size.cores]
    file = prepare(folder, {**size.model, "steps": size.steps})
    with lab(nodes, folder) as place:
        # Some passes first, since a machine that was idle is faster for a moment.
        place.train(NAME, "first", *PLAIN, "parallel.engine=sharded", "balance.batch=even", "train.steps=1")
        surveys = [hardware.read_hardware(place.hardware(NAME, "train.micro_batch=8")) for _ in range(size.surveys)]
        cluster = measured_cluster.cluster_from_hardware(middle(surveys))
        planned = plans(file, cluster, size.layouts)
        taken: dict[str, list[float]] = {name: [] for name in planned}
        config = load.load_recipe(file)
        for turn in range(size.turns):
            for number, (name, plan) in enumerate(planned.items()):
                paths, ended = place.train(
                    NAME, f"time-{turn}-{number}", *keys(plan, config), ranks=ranks_of(plan, cluster, nodes)
                )
                assert ended.well, f"{name} ended with {ended.codes}:\n{''.join(ended.said)[-3000:]}"
                taken[name] += steps_s(paths, size.warm)
    rows, checks = compare_times(planned, {name: statistics.median(each) for name, each in taken.items()})
    return [*(_device(first, group) for first, _, group in cluster.spans), *rows], checks


def _device(first: int, group: NodeGroup) -> Row:
    return {"device": first, "alike": group.devices, "as it was measured": group.kind.name,
            "GFLOP/s": group.kind.peak_flop_per_s("fp32") / 1e9, "a call, us": 1e6 * group.kind.call_s,
            "to carry a MB, ms": 1e9 * (group.kind.carries_s_per_byte or 0.0)}  # fmt: skip


def on_all(question: PlanQuery, cluster: ClusterSpec) -> Plan | None:
    """The best plan that leaves no device idle, if any was found."""
    work = question.work(cluster)
    space = space_of(question.config, None, work, cluster, pins_of(question.config, question.overrides))
    found = search_layouts(work, cluster, space, keep=64).plans
    return next((plan for plan in found if plan.devices == cluster.devices), None)


def compare_times(planned: Mapping[str, Plan], taken: Mapping[str, float]) -> tuple[list[Row], list[Check]]:
    rows: list[Row] = []
    off = {}
    for name, plan in planned.items():
        said = plan.estimate
        off[name] = said.step_s / taken[name] - 1.0
        rows.append({
            "layout": name, "devices": plan.devices, "planned": " ".join(_short(plan)), "predicted, s": said.step_s,
            "measured, s": taken[name], "off %": 100 * off[name],
            "computing %": 100 * said.terms["compute"] / said.step_s,
            "communication %": 100 * said.terms["communication"] / said.step_s,
            "bubble and imbalance %": 100 * (said.terms["bubble"] + said.terms["imbalance"]) / said.step_s,
            "updating and keeping %": 100 * (said.terms["optimizer"] + said.terms["commit"]) / said.step_s,
        })  # fmt: skip
    checks = [harness.at_most("steps: mean error", statistics.mean(map(abs, off.values())), ACCURACY)]
    if PICKED in taken:
        best = min(taken.values())
        checks.append(harness.at_most("the planned layout over the best that was measured", taken[PICKED] / best, PICK))
    return rows, checks


def _short(plan: Plan) -> list[str]:
    choice = plan.choice
    names = {"zero": 1, "shard_degree": 0, "tensor": 1, "pipeline": 1, "slots": 1, "recompute": "none"}
    said = [f"{name}={getattr(choice, name)}" for name, usual in names.items() if getattr(choice, name) != usual]
    said += [f"micro={choice.micro_batch}"]
    if choice.shares:
        said.append("shares=" + "+".join(map(str, choice.shares)))
    if choice.pipeline > 1 and choice.stages:
        said.append("stages=" + "+".join(map(str, choice.stages)))
    return said


# -------------------------------------------------------------------------------------------------------------- memory

HUGE = 1 << 50
SHAPES = (
    {"hidden": 384, "layers": 4, "heads": 6, "intermediate": 1024, "vocabulary": 2048, "seq_len": 256},
    {"hidden": 512, "layers": 6, "heads": 8, "intermediate": 1408, "vocabulary": 1024, "seq_len": 256},
    {"hidden": 768, "layers": 4, "heads": 12, "intermediate": 2048, "vocabulary": 512, "seq_len": 128},
    {"hidden": 512, "layers": 8, "heads": 8, "intermediate": 1408, "vocabulary": 2048, "seq_len": 128},
    {"hidden": 640, "layers": 6, "heads": 10, "intermediate": 1728, "vocabulary": 512, "seq_len": 256},
)
NOTHING = {"hidden": 16, "layers": 4, "heads": 2, "intermediate": 32, "vocabulary": 300, "seq_len": 16}
SHARDED = (
    ("parallel.zero=1", "parallel.grad_reduce=per_step"),
    ("parallel.zero=1", "parallel.grad_reduce=per_step", "optim.double_buffer=true"),
    ("parallel.zero=2", "parallel.grad_reduce=per_micro_batch"),
    ("parallel.zero=3", "parallel.grad_reduce=per_micro_batch"),
    ("parallel.zero=3", "parallel.grad_reduce=per_step"), ("parallel.zero=2", "parallel.shard_degree=2"),
)  # fmt: skip
CUT = (("parallel.tensor=2",), ("parallel.pipeline=2",), ("parallel.tensor=2", "parallel.pipeline=2"))
AGAIN = ("none", "selective", "full")
MICRO, ACCUMULATED = (1, 2, 4, 8), (1, 2, 4)


@dataclass(frozen=True)
class Configuration:
    """A layout of a model on ranks of one node."""

    shape: Mapping[str, int]
    world: int
    words: tuple[str, ...]

    @property
    def layout(self) -> tuple[str, ...]:
        """What its process holds besides the model depends on this alone."""
        return tuple(word for word in self.words if not word.startswith(("train.micro_batch", "memory.")))


def drawn(count: int, largest: int) -> list[Configuration]:
    """So many unlike ones, always the same."""
    draw = random.Random(7)
    found: list[Configuration] = []
    while len(found) < count:
        shape, world = draw.choice(SHAPES[:largest]), draw.choice((2, 4))
        words: tuple[str, ...] = draw.choice(SHARDED)
        if draw.random() < 0.3:
            words = draw.choice(CUT if world == 4 else CUT[:2])
        words = tuple({**_pairs(("parallel.tensor=1", "parallel.pipeline=1")), **_pairs(words)}.values())
        micro, again = draw.choice(MICRO), draw.choice(AGAIN)
        model = 1
        for word in words:
            if word.startswith(("parallel.tensor", "parallel.pipeline")):
                model *= int(word.partition("=")[2])
        batch = micro * draw.choice(ACCUMULATED) * max(1, world // model)
        config = Configuration(
            {**shape, "global_batch": batch}, world,
            (*words, f"train.micro_batch={micro}", f"memory.activations={again}"),
        )  # fmt: skip
        if config not in found and not (world // model == 2 and "parallel.shard_degree=2" in words):
            found.append(config)
    return found


def _pairs(words: Sequence[str]) -> dict[str, str]:
    return {word.partition("=")[0]: word for word in words}


def cpus(count: int) -> ClusterSpec:
    """A node of CPU ranks with memory without end."""
    return ClusterSpec((NodeGroup(1, count, replace(DEVICE_KINDS["CPU"], memory_bytes=HUGE)),))


def plan_of(folder: Path, config: Configuration) -> tuple[Plan, Config]:
    """The layout as it is planned: all of it is held fixed."""
    file = prepare(folder, {**config.shape, "steps": 2})
    question = replace(
        question_of(file, config.words), use_all_devices=True
    )  # or one rank would do for what is that small
    found = [plan for plan in question.search(cpus(config.world)).plans if plan.devices == config.world]
    assert found, f"{config.words} is not planned on all {config.world} ranks"
    return found[0], question.config


def held_by(plan: Plan, rank: int) -> DeviceMemory:
    """What a rank of a plan on one kind of device holds."""
    stage = rank // (plan.copies * plan.choice.tensor)
    return next(held for held in plan.estimate.memory if held.stage == stage)


def used(held: DeviceMemory) -> float:
    """Bytes that the plan counts in a step, without what it keeps free."""
    return held.total_bytes - held.parts["reserved"] - held.parts[CHECKPOINT_COPY]


def least(held: DeviceMemory) -> int:
    """The least memory of a device with which the plan still says that this fits."""
    kind: DeviceKind = held.kind
    slack = (held.parts["reserved"] - kind.reserved_bytes) / kind.memory_bytes
    return round((used(held) + held.parts[CHECKPOINT_COPY] + kind.reserved_bytes) / (1.0 - slack)) + 1


def memories(size: Size, folder: Path) -> tuple[list[Row], list[Check]]:
    """What ranks hold beside what is predicted, and whether they live within the least that is said to fit."""
    configurations = drawn(size.configurations, size.largest)
    worlds = sorted({config.world for config in configurations})
    rows: list[Row] = []
    for world in worlds:
        with lab([Node((1.0,) * world)], folder) as place:
            bases: dict[tuple[str, ...], float] = {}
            for number, config in enumerate(configurations):
                if config.world != world:
                    continue
                if config.layout not in bases:
                    bare = Configuration(
                        {**NOTHING, "global_batch": 2 * world}, world,
                        (*config.layout, "train.micro_batch=1", "memory.activations=none"),
                    )  # fmt: skip
                    plan, paths, _ = _run(place, folder, bare, f"base-{number}")
                    bases[config.layout] = held_bytes(paths) - fullest(plan)
                rows.append(_memory_row(place, folder, config, number, bases[config.layout]))
    off = [abs(row["off %"]) / 100 for row in rows]
    killed = sum(not row["fits"] for row in rows)
    checks = [
        harness.at_most("memory: mean error", statistics.mean(off), MEMORY),
        harness.at_most("memory: layouts that were said to fit and did not", killed, 0),
    ]
    return rows, checks


def held_bytes(paths: RunPaths) -> int:
    """The most that the process of a rank was seen to hold in a step, on the rank that held most."""
    return max(int(step["memory_bytes"]) for step in read_steps(paths.metrics))


def fullest(plan: Plan) -> float:
    """Bytes that the plan counts on the device that holds most, without what it keeps free."""
    return max(used(held) for held in plan.estimate.memory)


def _memory_row(place: Lab, folder: Path, config: Configuration, number: int, base: float) -> Row:
    plan, paths, _ = _run(place, folder, config, f"memory-{number}")
    said, seen = fullest(plan) + base, held_bytes(paths)
    limits = {rank: least(held_by(plan, rank)) for rank in range(config.world)}
    place.memory = limits
    try:
        _, _, again = _run(place, folder, config, f"limited-{number}", must_end_well=False)
    finally:
        place.memory = {}
    shape = config.shape
    return {
        "model": f"{shape['layers']} x {shape['hidden']}, {shape['seq_len']} tokens", "ranks": config.world,
        "layout": " ".join(_short(plan)), "batch": shape["global_batch"], "without a model, MiB": base / 2**20,
        "predicted, MiB": said / 2**20,
        "held, MiB": seen / 2**20, "off %": 100 * (said / seen - 1.0),
        "limit, MiB": max(limits.values()) / 2**20, "fits": again.well,
    }  # fmt: skip


def _run(
    place: Lab, folder: Path, config: Configuration, name: str, must_end_well: bool = True
) -> tuple[Plan, RunPaths, Ended]:
    plan, asked = plan_of(folder, config)
    paths, ended = place.train(NAME, name, *keys(plan, asked))
    assert ended.well or not must_end_well, f"{config} ended with {ended.codes}:\n{''.join(ended.said)[-3000:]}"
    return plan, paths, ended


# ----------------------------------------------------------------------------------------------------------------- all


def prepare(folder: Path, values: Mapping[str, Any]) -> Path:
    """The recipe, and something to learn."""
    file, text = folder / NAME, folder / "text.jsonl"
    if not text.exists():
        write_text(text)
    file.write_text(RECIPE.format(**values))
    return file


def measure(size: Size, parts: Sequence[str]) -> tuple[list[Row], list[Check]]:
    rows: list[Row] = []
    checks: list[Check] = []
    for part, way in (("time", times), ("memory", memories)):
        if part in parts:
            with tempfile.TemporaryDirectory(prefix=f"phalanx-{part}-") as folder:
                if part == "memory":
                    return_memory()
                some_rows, some_checks = way(size, Path(folder))
            rows += some_rows
            checks += some_checks
    return rows, checks


def main() -> None:
    parser = harness.options(__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("time", "memory"), help="only this half")
    arguments: argparse.Namespace = parser.parse_args()
    if (reason := why_not()) is not None:
        print(f"planner_here: not measured; {reason}")
        return
    parts = [arguments.part] if arguments.part else ["time", "memory"]
    rows, checks = measure(QUICK if arguments.quick else Size(), parts)
    harness.report(harness.result("planner here", harness.machine(None, 1), rows, checks), arguments.json)


if __name__ == "__main__":
    main()
