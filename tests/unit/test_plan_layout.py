"""Layouts that runs leave to the planner, predictions of their own layouts, and what their steps teach."""

import copy
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import load, resolve
from phalanx.config.schema import Config, get_knob
from phalanx.core.errors import ConfigError
from phalanx.core.json_lines import append_line
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.layout import hardware
from phalanx.layout.hardware import Calibration, Hardware, MeasuredDevice, MeasuredLink
from phalanx.layout.pipeline_stages import STAGES_PER_RANK
from phalanx.planner import (
    calibrate,
    choose_layout,
    failures,
    measured_cluster,
    parse_cluster,
    predict,
    present_cluster,
)
from phalanx.planner.advice import PlanQuery
from phalanx.planner.choose_layout import LayoutRequest
from phalanx.planner.predict import predict_recipe_step
from phalanx.planner.present_cluster import NodeDevice
from phalanx.planner.recipe_keys import apply_plan, free_layout, keys_of
from phalanx.report import event_text
from tests.helpers import ROOT, some

LLAMA = ROOT / "recipes" / "llama-3-8b.yaml"
A100 = NodeDevice("NVIDIA A100-SXM4-80GB", 79 * 2**30)
V100 = NodeDevice("Tesla V100-SXM2-32GB", 32 * 2**30)
CPU = NodeDevice("cpu", 16 * 2**30, 1.0)
SMALL = {"hidden": 256, "layers": 8, "heads": 8, "intermediate": 704, "vocab_size": 4096}


def small(**sections: Any) -> Config:
    tree: dict[str, Any] = {"model": SMALL, "train": {"global_batch": 64}, "data": {"seq_len": 256}}
    for name, keys in sections.items():
        tree[name] = {**tree.get(name, {}), **keys}
    return load.build_config(tree, "the test's recipe")


def asked(config: Config, *nodes: tuple[NodeDevice, ...], known: Hardware | None = None) -> LayoutRequest:
    return LayoutRequest(config, load.find_explicit_keys(config), tuple(nodes), known)


# ---------------------------------------------------------------------------------------------------------- predictions


@pytest.mark.parametrize(
    "text",
    some(
        ["8xA100-80GB", "4x(8xA100-80GB), 200Gb/s", "8xA100-80GB, 8xV100-32GB, 100Gb/s", "2x(8xA100-40GB), 25Gb/s"],
        2,
        3,
    ),
)
def test_a_layout_is_foretold_as_it_was_planned(text: str) -> None:
    """What a plan writes into a recipe is read back as the same layout, with the same step and memory."""
    there = parse_cluster.parse_cluster(text)
    config = free_layout(load.load_recipe(LLAMA), ())
    for plan in PlanQuery(config, None, ()).search(there).plans:
        again = predict_recipe_step(apply_plan(config, plan), replace(plan.cluster, groups=plan.cluster.groups))
        if plan.devices == plan.cluster.devices and again.work.precision == "bf16" == config.train.dtype:
            assert again.choice == replace(plan.choice, devices=plan.devices)
        if plan.devices == plan.cluster.devices:
            assert again.estimate.step_s == pytest.approx(plan.estimate.step_s, rel=1e-9)
            assert again.estimate.memory[0].total_bytes == pytest.approx(plan.estimate.memory[0].total_bytes)


@pytest.mark.parametrize("stages", ["auto", "listed"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero_bubble"])
def test_every_schedule_is_foretold(schedule: str, stages: str) -> None:
    listed = [1, 2, 2, 3] if STAGES_PER_RANK[schedule] == 2 else [3, 5]
    keys = {"pipeline": 2, "schedule": schedule, "layers_per_stage": listed if stages == "listed" else "auto"}
    config = small(train={"micro_batch": 4}, parallel=keys)
    found = predict_recipe_step(config, parse_cluster.parse_cluster("4xA100-80GB"))
    assert found.choice.virtual == STAGES_PER_RANK[schedule]
    if stages == "listed":
        by_rank = {"interleaved": (3, 5), "zero_bubble": (4, 4)}  # ranks 0 and 1, and 0, 1, 1, 0
        assert found.choice.layers_of(8) == by_rank.get(schedule, (3, 5))
    else:
        # The head is worth 1.3 of a block, and with folded stages it is the first rank's.
        assert found.choice.layers_of(8) == {"interleaved": (4, 4), "zero_bubble": (3, 5)}.get(schedule, (5, 3))
    plain = predict_recipe_step(
        small(train={"micro_batch": 4}, parallel={"pipeline": 2}), parse_cluster.parse_cluster("4xA100-80GB")
    ).estimate
    terms = found.estimate.terms
    if schedule in ("interleaved", "zero_bubble"):
        assert terms["bubble"] < plain.terms["bubble"]
    held, usual = (max(each.parts["activations"] for each in of.memory) for of in (found.estimate, plain))
    assert held > 2 * usual if schedule == "gpipe" else held < 2 * usual  # 8 micro-batches


def test_a_window_and_a_horizon_are_reckoned_with() -> None:
    there = parse_cluster.parse_cluster("A100-80GB")
    shapes = {"architecture": "mistral", "sliding_window": 64}
    whole, narrow = (small(model=more, train={"micro_batch": 4}) for more in ({}, shapes))
    whole_s, narrow_s = (predict_recipe_step(config, there).estimate.terms["compute"] for config in (whole, narrow))
    assert predict_recipe_step(narrow, there).work.window == 64 and narrow_s < whole_s
    kept = [
        predict_recipe_step(
            small(memory={"activations": "offload", "offload_prefetch_blocks": blocks}, train={"micro_batch": 4}), there
        ).estimate.memory[0].parts["activations"]
        for blocks in (1, 4)
    ]  # fmt: skip
    assert kept[1] - kept[0] == pytest.approx(3 * 4 * 256 * 256 * 2)


def test_unequal_parts_of_the_state_are_among_the_keys() -> None:
    config = free_layout(load.load_recipe(ROOT / "recipes" / "llama-3.2-1b.yaml"), ())
    plan = PlanQuery(config, None, ()).search(parse_cluster.parse_cluster("2xH200, 2xA10G, 400Gb/s")).best
    parts = keys_of(plan, config)["balance.optimizer_state"]
    assert sum(parts) == pytest.approx(1) and parts[0] == parts[1] > 0.25 > parts[2] == parts[3]
    again = predict_recipe_step(apply_plan(config, plan), plan.cluster)
    assert again.choice.state == pytest.approx(parts) and again.estimate.fits
    evenly = predict_recipe_step(
        load.update_config(apply_plan(config, plan), {"balance.optimizer_state": "even"}), plan.cluster
    )
    assert not evenly.estimate.fits


def test_a_run_divides_the_state_by_itself_but_for_slices() -> None:
    nodes = ((NodeDevice("NVIDIA H200", 139 * 2**30),) * 2, (NodeDevice("NVIDIA A10G", 22 * 2**30),) * 2)
    config = load.load_recipe(ROOT / "recipes" / "llama-3.2-1b.yaml")
    for tensor in (1, 2):
        held = {"parallel.tensor": tensor, "parallel.pipeline": 1, "parallel.zero": 1}
        told = choose_layout.choose_layout(
            LayoutRequest(load.update_config(config, held), frozenset(held), nodes), None
        )
        assert ("balance.optimizer_state" in told["keys"]) == (tensor > 1)


def test_an_open_micro_batch_is_the_largest_that_fits() -> None:
    there = parse_cluster.parse_cluster("8xA100-40GB")
    found = predict_recipe_step(load.load_recipe(LLAMA, ["train.micro_batch=auto", "parallel.zero=3"]), there)
    assert found.estimate.fits
    size = found.choice.micro_batch
    assert not predict_recipe_step(
        load.load_recipe(LLAMA, [f"train.micro_batch={2 * size}", "parallel.zero=3"]), there
    ).estimate.fits


# -------------------------------------------------------------------------------------------------------------- written


def test_what_a_recipe_writes_is_told_from_what_it_leaves_out() -> None:
    config = small(parallel={"tensor": 1, "layout": "auto"}, memory={"activations": "auto"})
    named = {"parallel.tensor", "parallel.layout", "memory.activations", "train.global_batch", "data.seq_len"}
    assert load.find_explicit_keys(config) == named | {f"model.{key}" for key in SMALL}
    later = load.update_config(config, {"train.steps": 3, "model.rope_scaling": {"factor": 2}})
    assert load.find_explicit_keys(later) - load.find_explicit_keys(config) == {
        "train.steps",
        "model.rope_scaling.factor",
    }
    assert load.build_config(load.parse_yaml(load.to_yaml(later), "it"), "it") == later


# --------------------------------------------------------------------------------------------------------------- chosen


def test_keys_that_a_recipe_writes_restrict_the_choice() -> None:
    nodes = ((A100,) * 8,)
    config = load.load_recipe(LLAMA, ["parallel.layout=auto"])
    bare = load.update_config(config, {})
    free_keys = choose_layout.choose_layout(LayoutRequest(bare, frozenset(), nodes), None)["keys"]
    wanted = {"parallel.tensor": 4, "memory.activations": "full", "train.micro_batch": 1, "optim.double_buffer": False}
    assert any(free_keys[key] != value for key, value in wanted.items())
    held = load.update_config(config, wanted)
    told = choose_layout.choose_layout(LayoutRequest(held, frozenset(wanted), nodes), None)
    assert {key: told["keys"][key] for key in wanted} == wanted
    assert (
        told["expected"]["step_s"]
        > choose_layout.choose_layout(LayoutRequest(bare, frozenset(), nodes), None)["expected"]["step_s"]
    )


def test_a_run_leaves_no_device_idle_and_turns_no_order_round() -> None:
    """With one slow node a plan may do without it; a run has it, and gives it what it can do."""
    nodes = ((A100,) * 4, (V100,) * 4)
    config = small(train={"dtype": "fp16"})
    told = choose_layout.choose_layout(asked(config, *nodes), None)
    laid = load.update_config(config, told["keys"])
    devices = present_cluster.cluster_from_nodes(nodes)
    assert [group.kind.name for group in devices.groups] == ["A100-80GB", "V100-32GB"]
    assert 8 % (laid.parallel.tensor * laid.parallel.pipeline) == 0
    assert predict_recipe_step(laid, devices).estimate.step_s == pytest.approx(told["expected"]["step_s"], rel=0.02)
    assert not {"parallel.engine", "balance.batch", "parallel.layers_per_stage"} & set(told["keys"])


def test_the_same_devices_get_the_same_layout_again_without_another_search() -> None:
    config = small(parallel={"layout": "auto"})
    first = choose_layout.choose_layout(asked(config, (CPU, CPU)), None)
    assert first["again"] is False
    kept = json.loads(json.dumps(first)) | {"why": "as it was"}
    again = choose_layout.choose_layout(asked(config, (CPU, CPU)), kept)
    assert (again["again"], again["why"], again["keys"]) == (True, "as it was", first["keys"])
    fewer = choose_layout.choose_layout(asked(config, (CPU,)), kept)
    assert fewer["again"] is False and fewer["why"] != "as it was"
    otherwise = small(parallel={"layout": "auto"}, train={"micro_batch": 1})
    assert choose_layout.choose_layout(asked(otherwise, (CPU, CPU)), kept)["keys"]["train.micro_batch"] == 1
    # The data may have settled the vocabulary since: no reason to walk in another layout.
    larger = load.update_config(config, {"model.vocab_size": 4100})
    assert (
        choose_layout.choose_layout(LayoutRequest(larger, load.find_explicit_keys(config), ((CPU, CPU),)), kept)[
            "again"
        ]
        is True
    )


def test_nothing_that_fits_is_a_sentence_with_a_way_out() -> None:
    with pytest.raises(
        ConfigError, match=r"parallel\.layout auto finds no layout .* more than it has; what would do: "
    ):
        choose_layout.choose_layout(asked(load.load_recipe(LLAMA), (V100, V100)), None)
    with pytest.raises(ConfigError, match="on all 3 ranks, with at least one of the 2 sequences"):
        choose_layout.choose_layout(
            asked(small(train={"global_batch": 2}, parallel={"tensor": 1, "pipeline": 1}), (CPU,) * 3), None
        )


@pytest.mark.parametrize(
    ("section", "keys", "named"),
    [
        ("parallel", {"engine": "fsdp2"}, "parallel.engine fsdp2"),
        ("balance", {"batch": [32, 32]}, "balance.batch"),
        ("balance", {"optimizer_state": [1, 2]}, "balance.optimizer_state"),
    ],
)
def test_what_belongs_to_a_layout_of_ones_own_is_refused(section: str, keys: dict[str, Any], named: str) -> None:
    tree = {"parallel": {"layout": "auto"}}
    tree[section] = tree.get(section, {}) | keys
    with pytest.raises(ConfigError, match=f"{named} requires parallel.layout given"):
        small(**tree)
    tree["parallel"].pop("layout")
    small(**tree)


def test_a_device_that_nobody_knows_is_no_data_sheet() -> None:
    told = choose_layout.choose_layout(asked(small(), (NodeDevice("Gaudi", 90 * 2**30),) * 2), None)
    basis = "the data-sheet of an A100-40GB, since none of Gaudi is known (`phalanx hardware` measures it)"
    assert told["basis"] == basis and told["why"].endswith(f"; this is from {basis}")
    known = choose_layout.choose_layout(asked(small(), (A100,) * 2), None)
    assert known["basis"] == "data-sheets" and "; this is" not in known["why"]


def test_nodes_of_unlike_memory_are_told_apart() -> None:
    nodes = ((CPU,), (replace(CPU, memory_bytes=2**30),), (replace(CPU, memory_bytes=16 * 2**30 + 2**20),))
    there = present_cluster.cluster_from_nodes(nodes)
    assert [group.kind.memory_bytes for group in there.groups] == [16 * 2**30, 2**30, 16 * 2**30]
    assert len({group.kind.name for group in there.groups}) == 2
    two = present_cluster.cluster_from_nodes(((CPU, CPU), (CPU, CPU)))
    assert [(group.nodes, group.per_node) for group in two.groups] == [(2, 2)]
    half = present_cluster.cluster_from_nodes(((replace(CPU, cores=0.5),), (CPU,)))
    assert half.groups[1].kind.peak_flop_per_s("fp32") == pytest.approx(2 * half.groups[0].kind.peak_flop_per_s("fp32"))


def test_unlike_devices_of_one_node_have_no_other_node() -> None:
    """Neither a network between them, nor anybody who keeps their steps."""
    nodes = ((A100, V100),)
    there = present_cluster.cluster_from_nodes(nodes)
    assert [(group.nodes, group.shares_node) for group in there.groups] == [(1, False), (1, True)]
    assert there.nodes == 1 and parse_cluster.format_cluster(there) == "1xA100-80GB + 1xV100-32GB"
    estimate = predict_recipe_step(small(), there).estimate
    assert (estimate.recovers_from, estimate.replicas) == ("memory", None)
    two = present_cluster.cluster_from_nodes((*nodes, *nodes))
    assert two.nodes == 2
    assert predict_recipe_step(small(), two).estimate.recovers_from == "copies"
    slower = predict_recipe_step(small(), replace(there, between_bits_per_s=1e6)).estimate
    assert slower.step_s == estimate.step_s


# ------------------------------------------------------------------------------------------------------------- compared

EXPECTED = {
    "step_s": 1.0,
    "allocated_bytes": 100.0,
    "terms": {"compute": 0.6, "communication": 0.2, "bubble": 0.0, "imbalance": 0.0, "optimizer": 0.11,
              "commit": 0.04, "offload": 0.0, "other": 0.05},
}  # fmt: skip


def record(step: int, **more: Any) -> dict[str, Any]:
    """A step on two CPU ranks that goes as EXPECTED has it: the update is waited for, beside the data's preparation."""
    told = {"step": step, "attempt": 1, "step_s": 1.0, "wait_s": 0.35, "data_s": 0.05, "update_s": 0.15,
            "busy_s": [0.65, 0.65], "memory_bytes": 100, "time": 10.0 + step, "shares": [4, 4], "parts": 1}  # fmt: skip
    return told | more


def test_steps_as_they_were_foretold() -> None:
    slow_start = [record(step, step_s=30.0, busy_s=[29.0, 29.0]) for step in range(1, 6)]
    assert predict.compare_steps(EXPECTED, [*slow_start, *map(record, range(6, 20))], True, "data-sheets") is None
    told = predict.compare_steps(EXPECTED, [*slow_start, *map(record, range(6, 21))], True, "data-sheets")
    assert told is not None
    assert (told["predicted_s"], told["measured_s"], told["steps"], told["off"]) == (1.0, 1.0, 15, None)
    for row in told["terms"]:
        assert row["measured_s"] == pytest.approx(row["predicted_s"]), row
    assert sum(row["measured_s"] for row in told["terms"]) == pytest.approx(1.0)
    said = event_text.describe_event({"kind": EventKind.PREDICTION_CHECKED, **told})
    assert said == "a step takes 1.0 s, as much as 1.0 s predicted from data-sheets; memory 100 B, as much as 100 B"


@pytest.mark.parametrize(
    ("more", "off"),
    [
        ({"step_s": 1.4, "busy_s": [1.05, 1.05]}, "computing"),
        ({"step_s": 1.4, "busy_s": [1.05, 0.65, 0.65]}, "waiting for slower devices or larger stages"),
        ({"step_s": 1.4}, "communication that nothing hides"),
        ({"step_s": 1.4, "update_s": 0.55}, "the update and keeping the step in memory"),
        ({"step_s": 0.7, "busy_s": [0.35, 0.35]}, "computing"),
        ({"step_s": 1.1}, None),
    ],
)
def test_the_part_that_is_off_is_named(more: dict[str, Any], off: str | None) -> None:
    told = predict.compare_steps(EXPECTED, [record(step, **more) for step in range(1, 21)], True, "measurements")
    assert told is not None
    assert told["off"] == off
    assert (
        f"; largest difference in {off}: " in event_text.describe_event({"kind": EventKind.PREDICTION_CHECKED, **told})
    ) == (off is not None)


def test_an_accelerator_tells_passes_and_the_rest() -> None:
    rows = [record(step, update_s=None, wait_s=None, busy_s=[0.6, 0.6]) for step in range(1, 21)]
    assert predict.split_measured_step(rows, True) == {
        ("compute", "offload"): 0.6,
        ("imbalance",): 0.0,
        ("communication", "bubble", "optimizer", "commit", "other"): 0.4,
    }
    alone = [row | {"busy_s": None} for row in rows]
    assert predict.split_measured_step(alone, False) == {predict.ALL: 1.0}


# ------------------------------------------------------------------------------------------------------------- learning


def as_walked(config: Config, nodes: tuple[tuple[NodeDevice, ...], ...], truth: Hardware) -> list[dict[str, Any]]:
    """The records of a run whose every step goes as the planner has it on `truth`."""
    constants = measured_cluster.constants_from_hardware(truth)
    there = measured_cluster.cluster_from_hardware(truth, constants)
    found = predict_recipe_step(config, there, None, constants)
    terms, copies = found.estimate.terms, there.devices // (found.choice.tensor * found.choice.pipeline)
    busy = terms["compute"] + terms["imbalance"] + terms["other"]
    shares = list(found.choice.shares) or [config.train.global_batch // copies] * copies
    each = [busy] * copies
    return [
        record(step, step_s=found.estimate.step_s, busy_s=each if copies > 1 else None, wait_s=0.0,
               data_s=terms["other"], update_s=terms["optimizer"] + terms["commit"],
               shares=shares, parts=-(-max(shares) // found.choice.micro_batch))
        for step in range(1, 31)
    ]  # fmt: skip


def hardware_of(
    nodes: tuple[tuple[NodeDevice, ...], ...], slower: float, link: MeasuredLink | None, **learnt: Any
) -> Hardware:
    """What a file would say of devices that are so many times slower than their data-sheet."""
    config, _ = resolve.resolve_autos(small(), device="cpu", world=sum(map(len, nodes)))
    walked = calibrate.MeasuredRun("truth", config, nodes, None, [])
    there = present_cluster.cluster_from_nodes(nodes)
    before = predict_recipe_step(load.update_config(config, {"train.micro_batch": 4}), there)
    found = calibrate._file(
        walked, before, there, [1 / slower] * there.devices, Calibration("truth", 1), measured_cluster.DEFAULT_CONSTANTS
    )
    return replace(found, link=link or found.link, learnt=Calibration("truth", 1, **learnt))


@pytest.mark.parametrize("sizes", [(1,), (2,), (1, 1), (4,)])
@pytest.mark.parametrize("micro_batch", [2, 4])
def test_a_run_is_foretold_as_it_went_once_it_was_learnt_from(sizes: tuple[int, ...], micro_batch: int) -> None:
    nodes = tuple((CPU,) * size for size in sizes)
    config = small(train={"micro_batch": micro_batch}, balance={"batch": "even"})
    config, _ = resolve.resolve_autos(config, device="cpu", world=sum(sizes))
    config = load.update_config(
        config, {} if sum(sizes) == 1 else {"parallel.zero": 1, "parallel.grad_reduce": "per_step"}
    )
    link = None if sum(sizes) == 1 else MeasuredLink(2e8, 2e-4)
    truth = hardware_of(nodes, 3.0, link, host_s=2e-3, update=0.3)
    steps = as_walked(config, nodes, truth)
    lesson = calibrate.calibrate_run(calibrate.MeasuredRun("it", config, nodes, None, steps))
    assert lesson.measured_s == steps[-1]["step_s"]
    assert abs(lesson.before_s / lesson.measured_s - 1) > 0.3
    assert lesson.after_s == pytest.approx(lesson.measured_s, rel=0.05)
    learnt = lesson.hardware.learnt
    assert learnt is not None and learnt.run == "it" and learnt.steps == 25
    if sum(sizes) == 1:
        assert learnt.update == pytest.approx(0.3, rel=0.05)
    assert hardware.from_json(json.loads(json.dumps(hardware.to_json(lesson.hardware)))) == lesson.hardware
    again = calibrate.calibrate_run(calibrate.MeasuredRun("it", config, nodes, lesson.hardware, steps))
    assert again.after_s == pytest.approx(again.before_s, rel=0.03)
    assert any("devices:" in said for said in lesson.findings)


def test_what_is_not_plausible_is_not_learnt() -> None:
    config, _ = resolve.resolve_autos(small(train={"micro_batch": 4, "dtype": "bf16"}), device="gpu", world=1)
    nodes = ((A100,),)
    thought = predict_recipe_step(config, present_cluster.cluster_from_nodes(nodes)).estimate.step_s
    rows = [record(step, step_s=thought / 100, busy_s=None, update_s=None, shares=[64]) for step in range(1, 31)]
    lesson = calibrate.calibrate_run(calibrate.MeasuredRun("it", config, nodes, None, rows))
    assert any("is not plausible: 1.25 is taken" in said for said in lesson.findings)
    assert lesson.after_s > 10 * lesson.measured_s


def test_steps_of_other_ranks_and_damaged_records_teach_nothing(tmp_path: Path) -> None:
    """As where the newest start, on fewer ranks, has done no steps; and a line that somebody has been at."""
    config, _ = resolve.resolve_autos(small(train={"micro_batch": 4}), device="cpu", world=1)
    rows = [record(step) for step in range(1, 31)]
    with pytest.raises(ConfigError, match="has done no steps; the earlier ones were done by 2"):
        calibrate.calibrate_run(calibrate.MeasuredRun("it", config, ((CPU,),), None, rows))
    damaged = [{key: value for key, value in row.items() if key != "step_s"} for row in rows]
    assert calibrate.last_attempt_steps([*rows[:3], *damaged]) == rows[:3]
    for row in damaged:
        append_line(RunPaths(tmp_path).metrics, row)
    with pytest.raises(ConfigError, match="nothing follows from it"):
        failures.read_observed_failures(RunPaths(tmp_path))


def test_a_short_run_teaches_nothing() -> None:
    config, _ = resolve.resolve_autos(small(train={"micro_batch": 4}), device="cpu", world=1)
    with pytest.raises(ConfigError, match="has 19 steps, and 20 are needed"):
        calibrate.calibrate_run(
            calibrate.MeasuredRun("it", config, ((CPU,),), None, [record(step) for step in range(1, 20)])
        )


def test_damaged_lessons_of_a_file_are_refused() -> None:
    row = MeasuredDevice(0, 0, 0, "h", "cpu", "cpu", 2**30, 4, ((1, 0.5),), None)
    told = hardware.to_json(Hardware({"dtype": "fp32"}, (row,), None, Calibration("a", 20, 1e-3, 0.5)))
    whole = json.loads(json.dumps(told))
    assert hardware.from_json(whole).learnt == Calibration("a", 20, 1e-3, 0.5)
    for learnt in ([], {"run": 1, "steps": 3}, {"run": "a", "steps": 0}, {"run": "a", "steps": 3, "update": -1}):
        with pytest.raises(ValueError, match="learnt"):
            hardware.from_json(copy.deepcopy(whole) | {"learnt": learnt})
    old = {key: value for key, value in whole.items() if key != "learnt"}
    assert hardware.from_json(old).learnt is None


# ----------------------------------------------------------------------------------------------------------- experience


def test_recoveries_and_checkpoints_are_read_from_records(tmp_path: Path) -> None:
    """By hand. Steps of 1 s whose lines come 0.4 s late. A checkpoint behind step 3 holds training up for 2 s, and an
    evaluation there takes 5 s. After step 5 a rank dies, and 7 s later the next step begins."""
    paths = RunPaths(tmp_path)
    ends = {1: 1.0, 2: 2.0, 3: 3.0, 4: 11.0, 5: 12.0}
    for step, end in ends.items():
        written = end if step == 3 else end + 0.4
        append_line(paths.metrics, record(step, time=100 + written))
    append_line(paths.metrics, record(6, attempt=2, time=100 + 12.5 + 7 + 2))
    for kind, more in (
        (EventKind.EVALUATED, {"step": 3, "seconds": 5.0, "attempt": 1, "time": 108.0}),
        (EventKind.CHECKPOINT_SAVED, {"step": 3, "seconds": 9.0, "attempt": 1, "time": 112.0}),
        (EventKind.WORKER_DIED, {"rank": 1, "attempt": 1, "time": 112.5}),
        (EventKind.WORKER_DIED, {"rank": 0, "attempt": 1, "time": 112.6}),
    ):
        append_line(paths.events, {"kind": str(kind), **more})
    found = failures.read_observed_failures(paths)
    assert (found.recoveries, found.checkpoints) == (1, 1)
    assert found.recovery_s == pytest.approx(7.0)
    assert found.checkpoint_s == pytest.approx(2.0)


def test_a_run_without_failures_and_checkpoints_says_nothing(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    with pytest.raises(ConfigError, match="so it is no run"):
        failures.read_observed_failures(paths)
    for step in range(1, 5):
        append_line(paths.metrics, record(step))
    with pytest.raises(ConfigError, match="nothing follows from it"):
        failures.read_observed_failures(paths)


def test_a_config_has_the_keys_that_are_told() -> None:
    told = choose_layout.predict_recipe_layout(
        asked(resolve.resolve_autos(small(train={"micro_batch": 2}), device="cpu", world=2)[0], (CPU, CPU))
    )
    assert told["keys"]["train.micro_batch"] == 2
    assert all(key.count(".") == 1 and get_knob(small(), key) is not None for key in told["keys"])
    assert asdict(CPU) == told["for"]["nodes"][0][0]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("work", ["even", "auto"])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_copies_without_a_sequence_and_shares_of_unlike_stages_are_foretold(
    batch: int, work: str, pipeline: int
) -> None:
    slow = replace(CPU, cores=0.2, memory_bytes=2**30)
    config = small(train={"global_batch": batch, "micro_batch": 1}, balance={"batch": work})
    config = load.update_config(config, {"parallel.pipeline": pipeline})
    config, _ = resolve.resolve_autos(config, device="cpu", world=4)
    assert choose_layout.predict_recipe_layout(asked(config, (CPU, CPU), (CPU, slow)))["expected"]["step_s"] > 0
