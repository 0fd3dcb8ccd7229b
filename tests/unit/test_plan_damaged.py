"""What a plan makes of damaged files: hardware.json, and the records of a run that it is to learn from."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.plan import _read_calibration_run
from phalanx.config import load, resolve
from phalanx.core.errors import ConfigError
from phalanx.core.records import read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.layout import hardware
from phalanx.layout.hardware import Calibration, Hardware, MeasuredLink
from phalanx.planner import calibrate, choose_layout, cost, failures, measured_cluster, present_cluster
from phalanx.planner.choose_layout import LayoutRequest
from phalanx.planner.device_catalog import DEVICE_KINDS
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.present_cluster import NodeDevice
from tests.helpers import ALL, ROOT
from tests.unit.test_plan_command import SPEC, WORK, device, failing, phalanx

LLAMA_1B = ROOT / "recipes" / "llama-3.2-1b.yaml"
ODD: list[Any] = [
    None, True, "", "x", [], {}, 0, -1, 1.5, 10**19, 10**400, -(10**400), 1e-300, 1e300, float("nan"), float("inf"), [1]
]  # fmt: skip
FILE = Hardware(
    {
        **WORK,
        "sliding_window": 512,
        "full_attention_layers": [1],
        "moe_experts": 8,
        "moe_experts_per_token": 2,
        "moe_intermediate": 64,
        "moe_dense_layers": [0],
        "moe_shared": 1,
        "query_rank": 0,
        "key_rank": 12,
        "plain_dim": 4,
        "value_dim": 6,
    },
    (
        device(0, "NVIDIA A100-SXM4-40GB", 0.4),
        device(1, "a cpu", 1.0, host_to_device_bytes_per_s=None, carries_s_per_byte=1e-9),
    ),
    MeasuredLink(1e9, 1e-5),
    Calibration("a run", 20, 1e-3, 0.5),
)


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something can be damaged: every key and every number of every list."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from leaves(value, (*path, key))


def damages(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Everywhere each odd value, or Ellipsis; of these a quarter, drawn anew each time (`make test-all`: all)."""
    found = [(path, value) for path in leaves(tree) for value in (..., *ODD)]
    return found if ALL else random.sample(found, len(found) // 4)


def damaged(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """With another value there; Ellipsis: without it."""
    tree = copy.deepcopy(tree)
    parent = tree
    for part in path[:-1]:
        parent = parent[part]
    if value is ...:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return tree


def test_any_damage_of_a_hardware_file_is_a_sentence_or_a_cluster() -> None:
    whole = json.loads(json.dumps(hardware.to_json(FILE)))
    refused = 0
    for path, value in (cases := damages(whole)):
        tree = damaged(whole, path, value)
        try:
            there = measured_cluster.cluster_from_hardware(hardware.from_json(tree))
        except (ValueError, ConfigError) as error:
            said = str(error)
        else:
            work = replace(measured_cluster._work_of(WORK), global_batch=there.devices)
            assert 0 < cost.estimate_step(work, there, LayoutChoice()).step_s < 1e30, (path, value)
            continue
        refused += 1
        assert len(said) < 400, path
    assert refused > len(cases) // 3


def test_a_file_of_numbers_that_nobody_can_measure_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "hardware.json"
    whole = json.loads(json.dumps(hardware.to_json(FILE)))
    for path, value, said in (
        (("link", "bytes_per_s"), 10**400, "bytes_per_s of link is 1000"),
        (("devices", 0, "times"), [[1, 1e-300]], "the times of device 0 are not pairs"),
        (("devices", 0, "times"), [[1, 0.1], [10**30, 0.2]], "the times of device 0 are not pairs"),
        (("devices", 0, "host_to_device_bytes_per_s"), 1e300, "which nothing that is measured can be"),
        (("devices", 0, "memory_bytes"), 10**30, "more than any device has"),
        (("devices", 0, "memory_bytes"), 0, "device 0 has no memory"),
        (("work", "heads"), 0, "of the model that was measured heads cannot be what it says"),
        (("work", "full_attention_layers"), 3, "full_attention_layers cannot be what it says"),
    ):
        file.write_text(json.dumps(damaged(whole, path, value)))
        assert said in failing(LLAMA_1B, "--hardware", file), path


def test_devices_keep_their_speed_beside_one_that_could_not_be_measured() -> None:
    """As an A100 beside a T4 on which not even two blocks fit, which is then as its data-sheet says."""
    fast = [device(rank, "NVIDIA A100-SXM4-40GB", 0.004) for rank in range(2)]
    small = device(2, "Tesla T4", 1.0, times=(), memory_bytes=15 * 2**30)
    work = {**asdict(SPEC), "positions": 2048, "dtype": "fp16"}
    alone = measured_cluster.cluster_from_hardware(Hardware(work, tuple(fast), None)).groups[0].kind
    both = measured_cluster.cluster_from_hardware(Hardware(work, (*fast, small), None)).groups
    assert [group.per_node for group in both] == [2, 1]
    assert both[0].kind.peak_flop_per_s("fp16") == pytest.approx(alone.peak_flop_per_s("fp16"))
    assert both[1].kind.peak_flop_per_s("fp16") == DEVICE_KINDS["T4"].peak_flop_per_s("fp16")
    # One of them that could not be measured is as fast as the others of its model, of its own node if there are any.
    lacking = replace(fast[1], times=())
    again = measured_cluster.cluster_from_hardware(Hardware(work, (fast[0], lacking, small), None)).groups
    assert [group.per_node for group in again] == [2, 1]
    assert again[0].kind.peak_flop_per_s("fp16") == pytest.approx(alone.peak_flop_per_s("fp16"))
    slow = [device(rank, fast[0].model, 0.016, node=1) for rank in (2, 3)]
    nodes = measured_cluster.cluster_from_hardware(
        Hardware(work, (*fast, slow[0], replace(slow[1], times=())), None)
    ).groups
    assert [group.per_node for group in nodes] == [2, 2]
    assert nodes[1].kind.peak_flop_per_s("fp16") == pytest.approx(alone.peak_flop_per_s("fp16") / 4, rel=0.05)


# ----------------------------------------------------------------------------------------------------------------- runs


def a_run(folder: Path, steps: int = 30) -> RunPaths:
    """The records of a run on two nodes of a CPU each."""
    paths = RunPaths(folder)
    folder.mkdir()
    shapes = {"hidden": 256, "layers": 8, "heads": 8, "intermediate": 704, "vocab_size": 4096}
    tree = {"model": shapes, "train": {"global_batch": 8, "micro_batch": 4}, "data": {"seq_len": 256}}
    config, _ = resolve.resolve_autos(load.build_config(tree, "it"), device="cpu", world=2)
    paths.config.write_text(load.to_yaml(config))
    nodes = ((NodeDevice("cpu", 2**34, 1.0),), (NodeDevice("cpu", 2**34, 1.0),))
    paths.plan.write_text(json.dumps(choose_layout.predict_recipe_layout(LayoutRequest(config, frozenset(), nodes))))
    rows = [
        {"step": step, "attempt": 1, "step_s": 1.0, "wait_s": 0.35, "data_s": 0.05, "update_s": 0.15,
         "time": 9.0 + step, "busy_s": [0.65, 0.6], "memory_bytes": 100, "shares": [4, 4], "parts": 1}
        for step in range(1, steps + 1)
    ]  # fmt: skip
    paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    event = {"kind": "checkpoint_saved", "step": 5, "time": 15.0, "attempt": 1}
    paths.events.write_text(json.dumps(event) + "\n")
    return paths


def refusal(call: Callable[[], object]) -> str | None:
    """What is said against it; None: nothing."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return None


def learnt(paths: RunPaths, out: Path) -> str | None:
    """What `--calibrate` refuses; None where it learns."""
    done = phalanx("plan", "--calibrate", paths.root, "--hardware", out)
    if done.exit_code == 0:
        hardware.read_hardware(out)
        return None
    assert isinstance(done.exception, ConfigError), done.output
    return str(done.exception)


def test_any_damage_of_a_runs_records_is_a_sentence_or_left_out(tmp_path: Path) -> None:
    paths = a_run(tmp_path / "run")
    run = _read_calibration_run(paths)
    rows, event = list(run.steps), json.loads(paths.events.read_text())
    assert calibrate.calibrate_run(run).measured_s == 1.0
    for path, value in damages(rows[-1]):
        paths.metrics.write_text("\n".join(json.dumps(row) for row in (*rows[:-1], damaged(rows[-1], path, value))))
        steps = calibrate.last_attempt_steps(read_steps(paths.metrics))
        if steps != rows[:-1]:
            # A step or an attempt that takes back those before it leaves too few; shares of others are of others.
            said = refusal(partial(calibrate.calibrate_run, replace(run, steps=steps)))
            assert said is None or "are needed" in said or "has done no steps" in said, (path, value)
        if path[0] not in ("step", "attempt"):
            assert failures.read_observed_failures(paths).checkpoints == 1
    for path, value in damages(event):
        paths.events.write_text(json.dumps(damaged(event, path, value)))
        said = refusal(partial(failures.read_observed_failures, paths))
        assert said is None or "nothing follows" in said


def test_any_damage_of_what_says_where_a_run_was_is_a_sentence(tmp_path: Path) -> None:
    paths, out = a_run(tmp_path / "run"), tmp_path / "hardware.json"
    told = json.loads(paths.plan.read_text())["for"]
    for path in leaves(told):
        for value in (..., *ODD):
            tree = damaged(told, path, value)
            try:
                nodes = present_cluster.parse_node_devices(tree["nodes"]) if "nodes" in tree else ()
            except ValueError:
                continue
            assert all(isinstance(each.model, str) and each.memory_bytes >= 0 for node in nodes for each in node)
    for nodes in ([], [[]], None, "ab", [[{"model": "cpu", "memory_bytes": "x"}]]):
        paths.plan.write_text(json.dumps({"for": {"nodes": nodes}}))
        assert "has no plan.json with the devices" in str(learnt(paths, out))


def test_empty_half_written_and_foreign_folders_teach_nothing(tmp_path: Path) -> None:
    out = tmp_path / "hardware.json"
    (tmp_path / "empty").mkdir()
    assert "has no plan.json" in str(learnt(RunPaths(tmp_path / "empty"), out))
    assert "has no plan.json" in str(learnt(RunPaths(tmp_path / "nowhere"), out))
    (tmp_path / "file").write_text("x")
    assert "has no plan.json" in str(learnt(RunPaths(tmp_path / "file"), out))
    begun = a_run(tmp_path / "begun", steps=0)
    assert "has 0 steps, and 20 are needed" in str(learnt(begun, out))
    begun.metrics.unlink()
    assert "has 0 steps, and 20 are needed" in str(learnt(begun, out))
    stopped = a_run(tmp_path / "stopped", steps=40)
    stopped.metrics.write_text(stopped.metrics.read_text()[:-30])  # killed within a line
    assert learnt(stopped, out) is None
    stopped.config.unlink()
    assert "has no config.yaml with the configuration" in str(learnt(stopped, out))
    planned = a_run(tmp_path / "planned")
    planned.plan.write_text(
        json.dumps({"version": 1, "recipe": "demo.yaml", "keys": {}})
    )  # as `phalanx plan` writes it
    assert "has no plan.json" in str(learnt(planned, out))
    planned.plan.write_text(planned.plan.read_text()[:-5])
    assert "has no plan.json" in str(learnt(planned, out))


@pytest.mark.parametrize("option", ["--out", "--hardware"])
def test_what_is_no_file_is_said_to_be_none(option: str) -> None:
    words = [LLAMA_1B, option]
    more = ["--cluster", "8xA100-80GB"] if option == "--out" else []
    assert f"{option} . is a folder; give a file in it" in failing(*words, ".", *more)
    nobody = "~nobody-at-all/x.json"
    assert f"{option} {nobody} is in the home of an unknown user" in failing(*words, nobody, *more)


def test_a_device_of_a_node_that_has_not_said_what_it_holds_is_the_smallest() -> None:
    assert measured_cluster.match_device_name("NVIDIA A100-SXM4-40GB", False, 0).name == "A100-40GB"
