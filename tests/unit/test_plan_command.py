"""`phalanx plan`: what it writes, says and refuses, and that a run takes the keys that it gives."""

import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner, Result

from phalanx.cli.root import app
from phalanx.config import load
from phalanx.config.validation import find_problems_for_world
from phalanx.core.errors import ConfigError
from phalanx.layout import hardware
from phalanx.layout.hardware import Hardware, MeasuredDevice, MeasuredLink
from phalanx.models.families.catalog import PRESETS, parameter_count
from phalanx.planner import advice, cost, failures, large_jobs, measured_cluster, parse_cluster, tables
from phalanx.planner.advice import PlanQuery
from phalanx.planner.checkpoint_interval import daly_s
from phalanx.planner.cluster import ClusterSpec, NodeGroup
from phalanx.planner.device_catalog import DEFAULT_CONSTANTS, DEVICE_KINDS
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.predict import predict_recipe_step
from phalanx.planner.recipe_keys import apply_plan, free_layout, work_of
from phalanx.planner.work import find_trained_share
from tests.helpers import ROOT

LLAMA = ROOT / "recipes" / "llama-3-8b.yaml"
NODES = "2x(8xA100-80GB), 200Gb/s"


def phalanx(*words: object) -> Result:
    return CliRunner(env={"COLUMNS": "100", "TERM": "dumb"}).invoke(app, [str(word) for word in words])


def planned(out: Path, *words: object) -> dict[str, Any]:
    done = phalanx("plan", *words, "--out", out, "--json")
    assert done.exit_code == 0, done.output
    told: dict[str, Any] = json.loads(done.output)
    assert told == json.loads(out.read_text())
    return told


def failing(*words: object) -> str:
    done = phalanx("plan", *words)
    assert done.exit_code != 0
    assert isinstance(done.exception, ConfigError), done.output
    return str(done.exception)


def rendered(table: RenderableType) -> str:
    console = Console(width=100, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_keys_make_a_recipe_that_starts(tmp_path: Path) -> None:
    told = planned(tmp_path / "plan.json", LLAMA, "--cluster", NODES)
    chosen = load.load_recipe(LLAMA, [f"{key}={json.dumps(value)}" for key, value in told["keys"].items()])
    assert find_problems_for_world(chosen, told["used"]["devices"]) == []
    assert chosen.train.micro_batch == told["keys"]["train.micro_batch"]
    expected = told["expected"]
    assert sum(expected["terms"].values()) == pytest.approx(expected["step_s"])
    tokens = told["model"]["seq_len"] * told["model"]["global_batch"]
    assert expected["tokens_per_s"] == pytest.approx(tokens / expected["step_s"])
    assert all(held["bytes"] <= held["of_bytes"] for held in expected["memory"])
    assert told["model"]["parameters"] == pytest.approx(parameter_count(PRESETS["llama-3-8b"]), rel=1e-4)
    assert told["runners_up"] == sorted(told["runners_up"], key=lambda other: other["step_s"])
    assert told["runners_up"][0]["step_s"] >= expected["step_s"]
    assert {help_["what"].split()[0] for help_ in told["helps"]} == {"a", "devices", "one"}
    assert all(help_["times"] > 0.999 for help_ in told["helps"])


@pytest.mark.parametrize(
    ("name", "cluster", "held"),
    [
        ("llama-3-8b", "7xL40S", "parallel.sequence_parallel=false"),  # stages, and blocks' inputs moved to the host
        ("llama-3.2-1b", "2x(8xH200), 4x(4xB200), 400Gb/s", "optim.double_buffer=true"),  # zero 3, which has one
        ("llama-3.2-1b", "1xH100, 1xT4", "parallel.engine=fsdp2"),  # parts of the state by room
    ],
)
def test_all_that_is_proposed_is_what_a_start_accepts(name: str, cluster: str, held: str) -> None:
    config = free_layout(load.load_recipe(ROOT / "recipes" / f"{name}.yaml", [held]), [held])
    found = PlanQuery(config, None, (held,)).search(parse_cluster.parse_cluster(cluster))
    assert found.plans
    for plan in found.plans:
        chosen = apply_plan(config, plan)
        if plan.devices == plan.cluster.devices:
            assert predict_recipe_step(chosen, plan.cluster).estimate.step_s == pytest.approx(plan.estimate.step_s)


def test_the_table_reads_in_a_hundred_columns(tmp_path: Path) -> None:
    done = phalanx(
        "plan", LLAMA, "--cluster", NODES, "--tokens", "300B", "--price", 2, "--explain", "parallel.tensor=8",
        "--out", tmp_path / "plan.json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 100
    for words in (
        "a step",
        "MFU",
        "where a step goes",
        "memory of the fullest",
        "runners-up",
        "what would help",
        "goal",
    ):
        assert words in done.output
    assert re.search(r"parallel\.tensor=8 takes [\d.]+ % longer", done.output)
    told = json.loads((tmp_path / "plan.json").read_text())
    # By hand: 300e9 tokens at so many a second, and 16 devices for as long.
    days = 300e9 / told["expected"]["tokens_per_s"] / 86400 / told["saving"]["goodput"]
    assert told["goal"]["days"] == pytest.approx(days)
    assert told["goal"]["money"] == pytest.approx(days * 24 * told["used"]["devices"] * 2)


def test_a_wish_that_is_faster_says_what_it_saves(tmp_path: Path) -> None:
    small = (ROOT / "recipes" / "demo.yaml", "--cluster", "2xCPU", "--out", tmp_path / "plan.json")
    shown = " ".join(phalanx("plan", *small, "--explain", "resilience.in_memory_checkpoints=false").output.split())
    assert re.search(
        r"resilience\.in_memory_checkpoints=false takes [\d.]+ % less for a token: keeping the step in memory", shown
    )


def test_what_the_command_line_says_stays(tmp_path: Path) -> None:
    told = planned(tmp_path / "plan.json", LLAMA, "parallel.tensor=4", "memory.activations=full", "--cluster", NODES)
    assert told["keys"]["parallel.tensor"] == 4
    assert told["keys"]["memory.activations"] == "full"


@pytest.mark.parametrize("stages", [5, 7, 11])
def test_any_number_of_stages_may_be_asked_for(stages: int, tmp_path: Path) -> None:
    words = ("--cluster", f"{stages}x(2xA100-80GB)", f"parallel.pipeline={stages}")
    told = planned(tmp_path / "plan.json", LLAMA, *words)
    assert told["keys"]["parallel.pipeline"] == stages
    chosen = load.load_recipe(LLAMA, [f"{key}={json.dumps(value)}" for key, value in told["keys"].items()])
    assert find_problems_for_world(chosen, told["used"]["devices"]) == []


def test_a_recipe_whose_layout_a_run_would_choose_is_planned_as_any(tmp_path: Path) -> None:
    words = ("--cluster", "8xA100-80GB", "parallel.pipeline=2")
    told = planned(tmp_path / "plan.json", LLAMA, *words, "parallel.layout=auto")
    assert told["keys"] == planned(tmp_path / "plan.json", LLAMA, *words)["keys"]


def test_a_wish_that_fits_nowhere(tmp_path: Path) -> None:
    told = planned(
        tmp_path / "plan.json", LLAMA, "parallel.tensor=1", "parallel.pipeline=1", "--cluster", "8xA100-40GB",
        "--explain", "parallel.zero=1",
    )  # fmt: skip
    assert told["explain"]["fits"] is False
    assert told["explain"]["missing_bytes"] > 0
    assert {help_["what"].split()[0] for help_ in told["helps"]} == {"twice", "devices", "one"}  # links of one node


def test_a_model_that_fits_nowhere_says_how_much_is_short_and_three_ways_out(tmp_path: Path) -> None:
    done = phalanx("plan", LLAMA, "--cluster", "2xT4", "--json", "--out", tmp_path / "plan.json")
    assert done.exit_code == 2
    told = json.loads(done.output)
    assert told["missing_bytes"] > 0
    assert len(told["ways_out"]) == 3
    assert not (tmp_path / "plan.json").exists()
    shown = rendered(tables.render_shortfall(told))
    assert "nothing fits" in shown
    assert "T4" in shown
    # The way out by devices is true: as many more nodes as it says make it fit.
    more = next(int(way.split()[0]) for way in told["ways_out"] if "more node" in way)
    enough = planned(tmp_path / "plan.json", LLAMA, "--cluster", f"{1 + more}x(2xT4)")
    assert enough["used"]["devices"] > 2


def test_a_way_out_that_the_recipe_would_refuse_is_not_tried(tmp_path: Path) -> None:
    """Shares of 512 sequences are no shares of twice as many that are half as long."""
    done = phalanx("plan", LLAMA, "--cluster", "2xT4", "balance.batch=[256,256]", "--json")
    assert done.exit_code == 2
    assert json.loads(done.output)["ways_out"]


def test_on_a_cpu_the_cheapest_way_out_is_to_keep_no_steps(tmp_path: Path) -> None:
    words = (ROOT / "recipes" / "llama-3.2-1b.yaml", "--cluster", "CPU")
    told = json.loads(phalanx("plan", *words, "--json").output)
    assert told["ways_out"][0].startswith("resilience.in_memory_checkpoints=false:")
    planned(tmp_path / "plan.json", *words, "resilience.in_memory_checkpoints=false")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no recipe"),
        ([LLAMA], "--cluster"),
        ([LLAMA, "--cluster", NODES, "--hardware", "x.json"], "one cluster"),
        ([LLAMA, "--cluster", "2x(8xA1000)"], "character 6"),
        ([LLAMA, "--cluster", NODES, "--tokens", "many"], "--tokens"),
        ([LLAMA, "--cluster", NODES, "--price", "2"], "--tokens"),
        ([LLAMA, "--cluster", NODES, "--tokens", "1B", "--price", "inf"], "--price inf is not a price"),
        ([LLAMA, "--cluster", NODES, "--tokens", "1B", "--price", "1e300"], "--price 1e+300 is not a price"),
        ([LLAMA, "--cluster", NODES, "--tokens", "1e300"], "digit too many"),
        (["--simulate", "--gpus", "9" * 400], "is no multiple of"),
        ([LLAMA, "--cluster", NODES, "--explain", "faster"], "key=value"),
        ([LLAMA, "--cluster", NODES, "--explain", "parallel.tensr=2"], "tensr"),
        ([LLAMA, "--cluster", NODES, "parallel.tensor=5"], "parallel.tensor"),
        ([LLAMA, "--cluster", NODES, "parallel.tensor=16"], "come out even"),
        ([LLAMA, "--cluster", NODES, "parallel.shard_degree=64"], "parallel.shard_degree=64 fits no number of devices"),
        ([LLAMA, "--cluster", NODES, "--explain", "parallel.shard_degree=64"], "fits no number of devices"),
        ([LLAMA, "--cluster", NODES, "--keep", "memory", "--days", "3"], "--days and --keep have no effect"),
        ([LLAMA, "--cluster", NODES, "--simulate", "--per-node", "4"], "--per-node has no effect for the devices"),
        (["--simulate", "--gpus", "8", "--cluster", NODES], "--cluster has no effect without a recipe"),
        (["--simulate", "--gpus", "8", "--out", "x.json"], "--out has no effect with --simulate"),
        (["--calibrate", "run", "--tokens", "3B"], "--tokens has no effect with --calibrate"),
        ([LLAMA, "--calibrate", "run"], "--calibrate takes no recipe"),
        ([LLAMA, "train.dtype=bf16", "--cluster", "8xV100-32GB"], "no bf16"),
        ([LLAMA, "--hardware", "nowhere.json"], "nowhere.json"),
        ([LLAMA, "model.code=mine.py", "--cluster", NODES], "model.code"),
        (["--simulate"], "--gpus"),
        ([LLAMA, "model.layers=2", "memory.activations=offload", "--cluster", NODES], "offload would move nothing"),
        ([LLAMA, "--cluster", NODES, "--simulate", "--copies-every", "4"], "--copies-every has no effect with a"),
        (["--simulate", "--gpus", "8", "--copies-every", "4"], "without --keep copies"),
        (["--simulate", "--gpus", "8", "--commit-time", "1s"], "without --keep memory or copies"),
        (["--simulate", "--gpus", "12"], "is no multiple of"),
        (["--simulate", "--gpus", "8", "--spares", "1000000"], "--spares 1000000 are nodes of more than 131,072"),
        (["--simulate", "--gpus", "8", "--keep", "copies"], "--keep copies needs a second node"),
        (["--simulate", "--gpus", "8", "--mtbf", "often"], "--mtbf"),
        ([LLAMA, "--cluster", NODES, "--simulate", "--gpus", "8"], "two clusters"),
    ],
)
def test_mistakes_are_sentences(words: list[object], said: str) -> None:
    assert said in failing(*words)


def test_a_bert_and_unlike_types() -> None:
    cluster = parse_cluster.parse_cluster("2xA100-40GB, 2xV100-16GB")
    config = load.load_recipe(ROOT / "recipes" / "bert-base-pretrain.yaml")
    from phalanx.planner.recipe_keys import shape_of

    spec = shape_of(config)
    work = work_of(config, spec, cluster)
    assert (work.gated, work.biases, work.precision, work.gather_bytes) == (False, True, "fp16", 4)
    assert work.parameters() == pytest.approx(parameter_count(spec), rel=0.02)
    mixed = load.update_config(config, {"train.dtype": "mixed"})
    alike = work_of(mixed, spec, parse_cluster.parse_cluster("4xA100-40GB"))
    assert (alike.precision, alike.gather_bytes) == ("bf16", 4)  # each makes its own type of fp32, alike or not
    assert work_of(mixed, spec, parse_cluster.parse_cluster("4xCPU")).precision == "fp32"


def test_what_is_used_computes_in_its_own_type(tmp_path: Path) -> None:
    told = planned(tmp_path / "plan.json", LLAMA, "--cluster", "8xH100-80GB, 1xT4, 1Gb/s")
    assert told["used"]["text"] == "8xH100-80GB"
    assert told["model"]["precision"] == "bf16"
    assert told["idle"].startswith("1 of 9 devices is idle: with the T4")


def test_idle_devices_have_a_reason_that_is_true(tmp_path: Path) -> None:
    few = ("train.global_batch=6", "parallel.tensor=1", "parallel.pipeline=1")
    small = (ROOT / "recipes" / "llama-3.2-1b.yaml", *few)
    told = planned(tmp_path / "plan.json", *small, "--cluster", "8xH100-80GB")
    less = "a step has 6 sequences, and more copies of the model would not make the largest share less"
    assert told["idle"] == f"2 of 8 devices are idle: {less}"
    told = planned(tmp_path / "plan.json", *small, "--cluster", "6x(1xH100-80GB), 0.1Gb/s")
    assert told["used"]["devices"] == 1
    assert told["idle"].endswith("what they compute is less than what their exchanges cost")
    told = planned(
        tmp_path / "plan.json",
        small[0],
        "parallel.tensor=2",
        "parallel.pipeline=1",
        "--cluster",
        "2xH100-80GB, 1xH100-80GB",
    )
    assert (
        told["idle"] == "1 of 3 devices is idle: a copy of the model takes 2 devices, and these are too few for another"
    )


def test_no_kind_is_better_off_without_the_others() -> None:
    """A100s compute in bf16 where they are alone, and gather half as many bytes as beside V100s in fp16."""
    question = PlanQuery(free_layout(load.load_recipe(LLAMA, ["train.global_batch=64"]), []), None, ())
    both, alone = (
        parse_cluster.parse_cluster(f"{text}, 5Gb/s") for text in ("2x(4xA100-80GB), 1xV100-32GB", "2x(4xA100-80GB)")
    )
    best, ours = question.search(both).best, question.search(alone).best
    assert best.estimate.tokens_per_s >= ours.estimate.tokens_per_s
    assert best.cluster.groups == alone.groups and question.work(best.cluster).precision == "bf16"


def test_adapters_that_are_left_open_are_adapters() -> None:
    said = ["model.preset=null", "model.from_hf=folder", "model.lora.dropout=0.0"]
    config = free_layout(load.load_recipe(LLAMA, said), [])
    there = parse_cluster.parse_cluster("2xRTX-4090")
    question = PlanQuery(config, PRESETS["llama-3-8b"], ())
    assert 0.001 < find_trained_share(question.work(there)) < 0.02
    found = question.search(there)  # all weights would not fit there, and slices have no adapters
    assert found.plans and all(plan.choice.tensor * plan.choice.pipeline == 1 for plan in found.plans)


def test_a_folders_bert_is_not_cut() -> None:
    config = free_layout(load.load_recipe(ROOT / "recipes" / "bert-ner.yaml"), [])
    question, there = PlanQuery(config, PRESETS["bert-base-uncased"], ()), parse_cluster.parse_cluster("4xA100-40GB")
    assert {plan.choice.tensor * plan.choice.pipeline for plan in question.search(there).plans} == {1}
    with pytest.raises(ConfigError, match="tensor=2 cuts models of the Llama family"):
        question.with_keys("parallel.tensor=2").search(there)
    with pytest.raises(ConfigError, match=r"model\.from_hf=another changes the shapes of the model"):
        advice.explain_key(question, there, question.search(there).best, "model.from_hf=another")


def test_a_bert_that_drops_scores_holds_them() -> None:
    config = load.load_recipe(ROOT / "recipes" / "bert-base-pretrain.yaml", ["train.micro_batch=4"])
    there = parse_cluster.parse_cluster("2xA100-40GB")
    held, less = (
        predict_recipe_step(load.update_config(config, {"model.attention_dropout": p}), there)
        .estimate.memory[0]
        .parts["activations"]
        for p in (0.1, 0.0)
    )
    assert held - less == pytest.approx(4 * 12 * 12 * 512**2 * 7)  # sequences, layers, heads, pairs, bytes


# ------------------------------------------------------------------------------------------------------------- measured


def device(rank: int, model: str, seconds: float, node: int = 0, **more: Any) -> MeasuredDevice:
    told: dict[str, Any] = {
        "rank": rank, "node": node, "local_rank": rank, "host": "h", "name": "gpu", "model": model,
        "memory_bytes": 40 * 2**30, "most": 4, "times": ((1, seconds), (4, 4 * seconds)),
        "host_to_device_bytes_per_s": 2e10,
    }  # fmt: skip
    return MeasuredDevice(**{**told, **more})


SPEC = PRESETS["llama-3.2-1b"]
WORK = {**asdict(SPEC), "positions": 2048, "dtype": "bf16", "parameters": 1}


def test_devices_of_a_file_are_as_fast_as_they_were_measured() -> None:
    slow = device(2, "NVIDIA A100-SXM4-40GB", 0.8)
    names = [device(rank, "NVIDIA A100-SXM4-40GB", 0.4) for rank in range(2)]
    found = measured_cluster.cluster_from_hardware(Hardware(WORK, (*names, slow), MeasuredLink(1e10, 1e-4)))
    fast, slower = (group.kind for group in found.groups)
    assert [group.per_node for group in found.groups] == [2, 1]
    assert fast.peak_flop_per_s("bf16") == pytest.approx(2 * slower.peak_flop_per_s("bf16"), rel=0.02)
    assert fast.memory_bytes == 40 * 2**30
    assert fast.host_bytes_per_s == 2e10


def test_what_was_computed_again_while_a_device_was_measured_does_not_make_it_slower() -> None:
    alone = ClusterSpec((NodeGroup(1, 1, DEVICE_KINDS["A100-40GB"]),))
    for activations, recompute in (("none", "none"), ("selective", "selective"), ("full", "full"), ("offload", "full")):
        work = {**WORK, "activations": activations}
        choice = LayoutChoice(micro_batch=4, recompute=recompute)  # type: ignore[arg-type]
        took = cost.estimate_step(replace(measured_cluster._work_of(work), global_batch=4), alone, choice).terms[
            "compute"
        ]
        rows = (device(0, "NVIDIA A100-SXM4-40GB", 1.0, times=((4, took),)),)
        assert measured_cluster.cluster_from_hardware(Hardware(work, rows, None)).groups[0].kind.speed == pytest.approx(
            1.0
        ), activations


def test_noise_between_neighbours_is_no_difference_and_a_cpu_takes_time_to_be_called() -> None:
    work = {**WORK, "dtype": "fp32"}

    def cpu(rank: int, node: int, faster: float) -> MeasuredDevice:
        times = ((1, 1.5 / faster), (5, 5.5 / faster))  # half a second besides one for each sequence
        return device(rank, "cpu", 1.0, node=node, times=times, host_to_device_bytes_per_s=None, memory_bytes=rank + 5)

    devices = (cpu(0, 0, 1.0), cpu(1, 0, 1.04), cpu(2, 1, 2.0), cpu(3, 1, 2.05))
    found = measured_cluster.cluster_from_hardware(Hardware(work, devices, None))
    assert [(group.nodes, group.per_node) for group in found.groups] == [(1, 2), (1, 2)]
    slow, fast = (group.kind for group in found.groups)
    assert fast.peak_flop_per_s("fp32") == pytest.approx(2 * slow.peak_flop_per_s("fp32"), rel=0.03)
    assert (slow.memory_bytes, fast.memory_bytes) == (5, 7)
    asked = replace(measured_cluster._work_of(work), global_batch=1)
    for sequences, seconds in ((1, 1.5), (3, 3.5), (5, 5.5)):
        alone = ClusterSpec((NodeGroup(1, 1, slow),))
        said = cost.estimate_step(
            replace(asked, global_batch=sequences), alone, LayoutChoice(micro_batch=sequences)
        ).terms["compute"]
        assert said == pytest.approx(seconds / 1.02, rel=0.03)


def test_noise_within_a_node_leaves_its_devices_one_group() -> None:
    """Else no two of them could be slices of a model; a half is no noise, and nor are other models or nodes."""

    def groups(*seconds: float, models: str = "xxxxxx", nodes: str = "000000") -> list[tuple[int, int]]:
        devices = tuple(
            device(rank, models[rank], each, node=int(nodes[rank]), host_to_device_bytes_per_s=None)
            for rank, each in enumerate(seconds)
        )
        found = measured_cluster.cluster_from_hardware(Hardware({**WORK, "dtype": "fp32"}, devices, None))
        return [(group.nodes, group.per_node) for group in found.groups]

    assert groups(1.0, 1.22, 1.1, 1.24) == [(1, 4)]
    assert groups(1.0, 1.2, 2.0, 2.3) == [(1, 2), (1, 2)]
    assert groups(1.0, 1.1, 1.2, 1.4) == [(1, 3), (1, 1)]  # the fourth is within a quarter of the third alone
    assert groups(1.0, 1.2, 1.0, 1.2, nodes="0011") == [(2, 2)]
    assert groups(1.0, 1.2, models="xy") == [(1, 1), (1, 1)]
    two = tuple(device(rank, "xy"[rank], 1.0, host_to_device_bytes_per_s=None) for rank in range(2))
    found = measured_cluster.cluster_from_hardware(Hardware({**WORK, "dtype": "fp32"}, two, MeasuredLink(3e8, 4e-5)))
    assert found.nodes == 1  # and the link is that between its devices
    assert {group.kind.link_bytes_per_s for group in found.groups} == {3e8 / DEFAULT_CONSTANTS.near_share}
    assert found.busy_hop_s == 0.0
    busy = measured_cluster.cluster_from_hardware(
        Hardware({**WORK, "dtype": "fp32"}, two, MeasuredLink(3e8, 4e-5, 1e-3 + 4e-5))
    )
    assert busy.busy_hop_s == pytest.approx(5e-4)  # there and back


@pytest.mark.parametrize(("nodes", "per_node"), [(4, 1), (2, 4), (4, 8), (1, 4)])
def test_an_all_reduce_takes_what_it_was_measured_to_take(nodes: int, per_node: int) -> None:
    from phalanx.planner import calibrate, link_cost

    ranks = nodes * per_node
    rows = tuple(device(rank, "NVIDIA A100-SXM4-40GB", 0.4, node=rank // per_node) for rank in range(ranks))
    found = measured_cluster.cluster_from_hardware(Hardware(WORK, rows, MeasuredLink(1e9, 1e-5)))
    assert (found.nodes, found.devices) == (nodes, ranks)
    ring = link_cost.ring_of(0, ranks, 1, found)
    assert link_cost.all_reduce_s(1e9, ring, found, DEFAULT_CONSTANTS) == pytest.approx(1.0, rel=0.05)
    again = calibrate._link_of(found, DEFAULT_CONSTANTS)
    assert (again.bytes_per_s, again.latency_s) == pytest.approx((1e9, 1e-5))
    assert again.busy_latency_s is None
    busy = measured_cluster.cluster_from_hardware(Hardware(WORK, rows, MeasuredLink(1e9, 1e-5, 1e-3)))
    assert calibrate._link_of(busy, DEFAULT_CONSTANTS).busy_latency_s == pytest.approx(1e-3)


def test_a_mixed_type_is_computed_in_fp32_by_cpus() -> None:
    took = {}
    for dtype in ("fp32", "mixed"):
        row = device(0, "a cpu", 4.0, times=((1, 1.0), (4, 4.0)), host_to_device_bytes_per_s=None)
        found = measured_cluster.cluster_from_hardware(Hardware({**WORK, "dtype": dtype}, (row,), None))
        asked = replace(measured_cluster._work_of({**WORK, "dtype": "fp32"}), global_batch=4)
        took[dtype] = cost.estimate_step(asked, found, LayoutChoice(micro_batch=4)).terms["compute"]
    assert took["mixed"] == pytest.approx(took["fp32"]) and took["fp32"] == pytest.approx(4.0, rel=0.03)


def test_a_cpu_an_unknown_accelerator_and_one_of_two_memories() -> None:
    cpu = device(0, "a cpu", 3.0, host_to_device_bytes_per_s=None)
    assert measured_cluster.match_device(cpu).name == "CPU"
    assert measured_cluster.match_device(device(0, "Gaudi", 1.0)).name == measured_cluster.FALLBACK_KIND
    assert measured_cluster.match_device(device(0, "NVIDIA H100 80GB HBM3", 1.0)).name == "H100-80GB"
    assert (
        measured_cluster.match_device(device(0, "NVIDIA A100-SXM4-80GB", 1.0, memory_bytes=79 * 2**30)).name
        == "A100-80GB"
    )
    assert measured_cluster.match_device(device(0, "NVIDIA GeForce RTX 4090", 1.0)).name == "RTX-4090"


def test_a_plan_for_a_file(tmp_path: Path) -> None:
    file = tmp_path / "hardware.json"
    names = tuple(device(rank, "NVIDIA A100-SXM4-40GB", 0.4) for rank in range(4))
    hardware.write_hardware(file, Hardware(WORK, names, MeasuredLink(1e11, 1e-5)))
    told = planned(tmp_path / "plan.json", ROOT / "recipes" / "llama-3.2-1b.yaml", "--hardware", file)
    assert told["used"]["devices"] == 4


def test_a_file_of_a_network_of_ones_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="--cluster"):
        measured_cluster.cluster_from_hardware(Hardware({"parameters": 5}, (device(0, "x", 1.0),), None))


# ------------------------------------------------------------------------------------------------------------ simulated


def test_ten_days_of_a_thousand_devices() -> None:
    done = phalanx("plan", "--simulate", "--gpus", 1024, "--mtbf", "3h", "--days", 10, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert sum(told["seconds"].values()) == pytest.approx(10 * 86400)
    assert 0.85 < told["goodput"] < told["closed_form"]
    assert told["hard"] + told["soft"] == pytest.approx(80, abs=30)  # 240 h / 3 h
    assert [row["devices"] for row in told["scaling"]][-1] == 16384
    rates = [row["goodput"] for row in told["scaling"]]
    assert rates == sorted(rates, reverse=True)
    again = phalanx("plan", "--simulate", "--gpus", 1024, "--mtbf", "3h", "--days", 10, "--json")
    assert again.output == done.output


def test_a_simulated_plan_has_the_plans_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_jobs, "SIZES", (8, 32, 128))
    words = ("plan", LLAMA, "--cluster", NODES, "--simulate", "--mtbf", "1d", "--days", 10)
    told = json.loads(phalanx(*words, "--json").output)
    assert told["job"]["step_assumed"] is False
    assert told["job"]["nodes"] == 2
    assert told["scaling"][2]["tokens_per_s"] > 2 * told["scaling"][1]["tokens_per_s"]
    shown = rendered(tables.render_simulation(told))
    assert max(map(len, shown.splitlines())) <= 100
    assert "goodput" in shown


def test_llama_3s_failures_by_what_is_kept() -> None:
    words = (
        "plan",
        "--simulate",
        "--gpus",
        256,
        "--mtbf",
        f"{54 * 24 / 419:.4f}h",
        "--days",
        54,
        "--spares",
        32,
        "--seed",
        1,
    )
    found = {}
    for keep in ("checkpoints", "memory", "copies"):
        told = json.loads(phalanx(*words, "--keep", keep, "--json").output)
        assert told["ended"] is None
        assert told["goodput"] == pytest.approx(told["closed_form"], rel=0.01)
        found[keep] = told["goodput"]
    assert found["checkpoints"] < found["memory"] < found["copies"]


def test_saving_is_by_the_rate_of_failures_of_so_many_devices() -> None:
    assert pytest.approx(54 * 86400 / 419) == failures.DEVICE_MTBF_S / 16384


def test_a_job_that_no_failure_takes_back_to_a_checkpoint_needs_none() -> None:
    words = ("plan", "--simulate", "--gpus", 16, "--mtbf", "3h", "--days", 1, "--keep", "copies")
    done = phalanx(*words)
    assert done.exit_code == 0, done.output
    assert "never" in done.output
    one, *more = json.loads(phalanx(*words, "--json").output)["scaling"]
    assert one["checkpoint_every_s"] > 0  # of one node, which has no other one that keeps anything
    assert {row["checkpoint_every_s"] for row in more} == {None}


def test_one_node_is_not_said_to_have_copies_and_more_spares_are_a_remedy_for_lost_nodes() -> None:
    words = ("plan", "--simulate", "--gpus", 8, "--mtbf", "3h", "--days", 9)
    told = json.loads(phalanx(*words, "--json").output)
    assert set(told["if_kept"]) == {"checkpoints", "memory"}
    assert told["ended"][1].startswith("nodes were lost")
    shown = " ".join(phalanx(*words).output.split())
    assert "without them; have more --spares" in shown
    shown = " ".join(phalanx(*words, "--mtbf", "1s").output.split())
    assert "raise resilience.max_restarts" in shown


def test_some_devices_of_one_node_are_lost_together() -> None:
    words = ("train.global_batch=5", "parallel.tensor=1", "parallel.pipeline=1", "--cluster", "8xH100-80GB")
    done = phalanx("plan", ROOT / "recipes" / "llama-3.2-1b.yaml", *words, "--simulate", "--days", 1, "--json")
    job = json.loads(done.output)["job"]
    assert (job["devices"], job["nodes"]) == (5, 1)


def test_sizes_that_are_too_small_for_what_is_held_fixed_are_told_of() -> None:
    words = ("parallel.pipeline=16", "--cluster", "2x(8xA100-80GB), 200Gb/s", "--simulate", "--days", 1)
    told = json.loads(phalanx("plan", LLAMA, *words, "--json").output)
    assert [row["tokens_per_s"] is None for row in told["scaling"][:3]] == [True, False, False]


def test_commits_and_checkpoints_have_the_intervals_of_their_costs(tmp_path: Path) -> None:
    """By hand, of 1.24B parameters in fp32 on two CPUs, with half of the state each: 12 bytes a parameter are written
    elsewhere at 0.9 of 50 GB/s in three passes; Daly of that and failures each 3 h, of which 22 % leave memory as it
    is."""
    small = ROOT / "recipes" / "llama-3.2-1b.yaml"
    told = planned(
        tmp_path / "plan.json", small, "--cluster", "2xCPU", "--mtbf", "3h", "parallel.tensor=1", "parallel.pipeline=1"
    )
    saving, step_s = told["saving"], told["expected"]["step_s"]
    state = 12 * told["model"]["parameters"] / 2
    assert saving["commit_s"] == pytest.approx(3 * state / 45e9, rel=1e-3) == told["expected"]["terms"]["commit"]
    assert saving["checkpoint_s"] == pytest.approx(state / 50e9, rel=1e-3)
    enough_s = daly_s(saving["commit_s"], 3 * 3600 / 0.22)
    assert saving["commit_steps"] == max(1, round(enough_s / (step_s - saving["commit_s"])))
    assert saving["checkpoint_steps"] == max(1, round(daly_s(saving["checkpoint_s"], 3 * 3600 / 0.78) / step_s))
    without = planned(
        tmp_path / "plan.json", small, "--cluster", "2xCPU", "--mtbf", "3h", "resilience.in_memory_checkpoints=false"
    )
    assert (without["saving"]["commit_s"], without["saving"]["commit_steps"]) == (None, None)
    on_gpus = planned(tmp_path / "plan.json", small, "--cluster", "2xA100-80GB")["saving"]
    assert on_gpus["commit_s"] == 0.0  # copied while the next step computes
    assert saving["replicas"] is on_gpus["replicas"] is None


def test_nodes_send_each_other_what_they_keep(tmp_path: Path) -> None:
    few = ("--cluster", "2x(4xA100-80GB), 1Gb/s", "parallel.tensor=1", "parallel.pipeline=1", "parallel.shard_degree=8")
    told = planned(tmp_path / "plan.json", LLAMA, *few, "resilience.replicate_every=100")
    replicas, parameters = told["saving"]["replicas"], told["model"]["parameters"]
    assert (replicas["every"], replicas["node_bytes"]) == (100, pytest.approx(12 * parameters / 2, rel=1e-3))
    shown = rendered(tables.render_plan({**told, "out": "plan.json"}))
    assert "of each 100th step a node sends" in " ".join(shown.split())


def test_a_simulation_keeps_what_the_recipe_keeps_or_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_jobs, "SIZES", (8,))
    few = ("parallel.tensor=1", "parallel.pipeline=1", "--cluster", NODES)
    words = ("plan", LLAMA, *few, "--simulate", "--mtbf", "1d", "--days", 5, "--json")

    def job(*more: object) -> dict[str, Any]:
        done = phalanx(*words, *more)
        assert done.exit_code == 0, done.output
        told: dict[str, Any] = json.loads(done.output)
        assert told["goodput"] == pytest.approx(told["closed_form"], rel=0.03)
        return dict(told["job"])

    assert job()["keep"] == "copies"
    fewer = job("resilience.replicate_every=50")
    assert (fewer["keep"], fewer["copies_every"], fewer["checkpoint_steps"]) == ("copies", 50, None)
    assert job("resilience.replicate_every=off")["keep"] == "memory"
    assert (
        job("--keep", "checkpoints")["keep"] == job("resilience.in_memory_checkpoints=false")["keep"] == "checkpoints"
    )


def test_unlike_nodes_are_scaled_in_their_mix() -> None:
    cluster = parse_cluster.parse_cluster("4x(8xA100-80GB), 2x(8xV100-32GB)")

    def nodes(devices: int) -> dict[str, int]:
        return {group.kind.name: group.nodes for group in large_jobs.resize_cluster(cluster, devices).groups}

    assert large_jobs.resize_cluster(cluster, 48) == cluster
    assert nodes(8) == {"A100-80GB": 1}
    assert nodes(24) == {"A100-80GB": 2, "V100-32GB": 1}
    assert nodes(480) == {"A100-80GB": 40, "V100-32GB": 20}


def test_from_python_the_plan_is_that_of_the_command() -> None:
    import phalanx

    found = phalanx.plan(LLAMA, "2x(4xA100-80GB), 100Gb/s", "train.global_batch=64", "optim.double_buffer=false")
    assert found.devices == 8 and found.choice.slots == 1
    question = PlanQuery(free_layout(load.load_recipe(LLAMA, ["train.global_batch=64"]), []), None, ())
    best = question.search(parse_cluster.parse_cluster("2x(4xA100-80GB), 100Gb/s")).best
    assert found.estimate.step_s == pytest.approx(best.estimate.step_s, rel=0.05)
    with pytest.raises(ConfigError, match=r"s3://bucket/model cannot be listed"):
        phalanx.plan(LLAMA, "8xA100-80GB", "model.preset=null", "model.from_hf=s3://bucket/model")
