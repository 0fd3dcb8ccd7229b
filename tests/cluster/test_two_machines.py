"""`phalanx train` on two "machines" with networks of their own: the curve of one machine, whatever happens."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.links import enter
from phalanx.config import load, resolve
from phalanx.core.errors import ConfigError
from phalanx.core.json_lines import read_lines
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.health.findings import DeviceInfo
from phalanx.launch import node_session, prepare
from phalanx.layout import hardware
from tests.cluster import networks
from tests.cluster.networks import Networks
from tests.cluster.test_nodes import Started
from tests.cluster.warm_nodes import WarmNodes
from tests.dist import command
from tests.helpers import run_ranks, wait_until

STEPS = 24
RECIPE = """
model: {hidden: 16, layers: 1, heads: 2, intermediate: 32, dropout: 0.1}
data: {source: text.jsonl, tokenizer_vocab: 280, seq_len: 8, held_out: 0.3, cache: cache}
train: {steps: STEPS, global_batch: 6, micro_batch: 2, eval_sequences: 4, dtype: fp64}
optim: {lr: 1e-2}
balance: {batch: even}
checkpoint: {every: 6}
comm: {timeout_s: 60}
report: {tensorboard: false}
""".replace("STEPS", str(STEPS))
SECRET = "the secret of two machines"


@pytest.fixture(scope="module")
def wired() -> Iterator[Networks]:
    if (reason := networks.why_not()) is not None:
        pytest.skip(reason)
    with networks.two() as made:
        yield made


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a recipe, and the run of three ranks on one machine."""
    folder = command.write_place(tmp_path_factory.mktemp("machines"))
    (folder / "recipe.yaml").write_text(RECIPE)
    code, _, err = command.phalanx(folder, "train", "recipe.yaml", "--run-dir", "one", "--ranks", "3")
    assert code == 0, err
    return folder


def machine(
    placement: Placement, names: list[str], folder: str, commands: list[list[str]], stopped: int | None = None
) -> Any:
    """One rank of the harness is one machine. On the `stopped` one the command gets a SIGTERM once the two have met."""
    enter(names[placement.rank])
    os.environ["PHALANX_SECRET"] = SECRET
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # this process is a rank of the harness
        os.environ.pop(name, None)
    sender = 0
    if stopped == placement.rank:
        sender = os.fork()
        if sender == 0:
            _stop(os.getppid())
    result = command.call(placement, folder, [commands[placement.rank]])[0]
    if sender:
        assert os.waitpid(sender, 0)[1] == 0, "there was nobody to stop"
    return result


def _stop(pid: int) -> None:
    """A connection between the machines is in state 01, as the kernel counts."""
    try:
        wait_until(lambda: " 01 " in Path("/proc/net/tcp").read_text(), timeout_s=180)
        time.sleep(0.5)  # for the greeting
        os.kill(pid, signal.SIGTERM)
        os._exit(0)
    finally:
        os._exit(1)


def train(wired: Networks, place: Path, run: str, meet: str, ranks: tuple[int, int], *more: str) -> list[Any]:
    """[exit code, output, errors] of each machine."""
    return both(wired, place, ["train", "recipe.yaml", "--run-dir", run, *more], meet, ranks)


def both(wired: Networks, place: Path, command: list[str], meet: str, ranks: tuple[int, int]) -> list[Any]:
    commands = [
        [*command, "--ranks", str(ranks[node]), "--nodes", "2", "--node-rank", str(node), "--rendezvous", meet,
         "--rendezvous-timeout", "60"]
        for node in range(2)
    ]  # fmt: skip
    return run_ranks(machine, 2, timeout_s=240, names=list(wired.names), folder=str(place), commands=commands)


def curve(run: Path) -> list[float]:
    """Loss and norm of each step. Where ranks are on machines decides in which order their gradients are added up, so
    curves of unlike machines are the same to rounding (of float64)."""
    return [record[key] for record in read_steps(RunPaths(run).metrics) for key in ("loss", "grad_norm")]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(RunPaths(run).events) if event["kind"] == kind]


def test_two_machines_that_meet_in_a_folder_walk_the_curve_of_one(wired: Networks, place: Path) -> None:
    """In a layout that node 0 has chosen for all devices, though a rank of the other machine is killed."""
    asked = ["parallel.layout=auto", "--inject", "kill:rank=2,step=23"]
    ended = train(wired, place, "by-file", f"file://{place}/meet", (2, 1), *asked)
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert len(curve(place / "by-file")) == 2 * STEPS
    assert curve(place / "by-file") == pytest.approx(curve(place / "one"), rel=1e-12)
    assert "node 1 of 2: attempt 1 started: rank 2 of 3 here" in ended[1][1]
    assert "node 1 of 2: the run is done" in ended[1][1]
    assert not (place / "meet").exists()
    assert not (place / "by-file" / ".sign").exists()
    (died,) = events(place / "by-file", EventKind.WORKER_DIED)
    assert (died["rank"], died["signal"]) == (2, "SIGKILL")
    (resumed,) = events(place / "by-file", EventKind.RESUMED)
    assert resumed["step"] in (21, 22)  # the newest that all had committed
    started = events(place / "by-file", EventKind.RUN_STARTED)[0]
    assert (started["world"], len(started["hosts"])) == (3, 2)
    (planned,) = events(place / "by-file", EventKind.LAYOUT_CHOSEN)
    assert planned["keys"]["parallel.tensor"] == planned["keys"]["parallel.pipeline"] == 1
    kept = json.loads(RunPaths(place / "by-file").plan.read_text())
    assert [len(node) for node in kept["for"]["nodes"]] == [2, 1]
    assert events(place / "by-file", EventKind.PREDICTION_CHECKED)[0]["predicted_s"] == pytest.approx(
        kept["expected"]["step_s"]
    )


def test_one_command_on_each_machine_measures_all_devices(wired: Networks, place: Path) -> None:
    """Node 0 has the file, which a run on the same machines then takes as it is."""
    measure = ["hardware", "recipe.yaml", "--out", "both.json", "--json"]
    (code, out, err), other = both(wired, place, measure, f"file://{place}/meet", (1, 2))
    assert (code, other[0]) == (0, 0), (err, other)
    assert json.loads(out)["shares"] and other[1] == ""
    known = hardware.read_hardware(place / "both.json")
    assert [(device.rank, device.node, device.local_rank) for device in known.devices] == [
        (0, 0, 0),
        (1, 1, 0),
        (2, 1, 1),
    ]
    assert known.link is not None
    run = ["train", "recipe.yaml", "--run-dir", "measured", "balance.hardware=both.json", "balance.batch=measured-once"]
    ended = both(wired, place, [*run, "train.steps=2"], f"tcp://{wired.addresses[0]}:29511", (1, 2))
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert not events(place / "measured", EventKind.MEASURING)
    assert SECRET not in json.dumps(ended)
    assert not [path for path in (place / "measured").rglob("*") if path.is_file() and SECRET in _text(path)]


def test_nodes_of_unlike_commands_do_not_fit(wired: Networks, place: Path) -> None:
    commands = [
        [*name, "recipe.yaml", "--ranks", "1", "--nodes", "2", "--node-rank", str(node), "--rendezvous",
         f"file://{place}/meet", "--rendezvous-timeout", "3"]
        for node, name in enumerate((["hardware"], ["train", "--run-dir", "unlike"]))
    ]  # fmt: skip
    ended = run_ranks(machine, 2, timeout_s=180, names=list(wired.names), folder=str(place), commands=commands)
    assert "the command is 'phalanx train' on node 1" in ended[1][2]
    assert "node 1 of 2 did not arrive within 3 s" in ended[0][2]
    assert [code for code, _, _ in ended] == [ExitCode.FAILED, ExitCode.CONFIG]


def _text(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")


def resolved(placement: Placement, folder: str, bf16: list[bool]) -> list[Any]:
    """What node 0 resolves when other nodes have ranks on devices that compute in bf16, or not."""
    os.chdir(folder)
    here = DeviceInfo("cpu", "here", True)
    elsewhere = [DeviceInfo("cpu", f"other {number}", each) for number, each in enumerate(bf16)]
    wanted = load.load_recipe(Path("recipe.yaml"), ["train.dtype=auto"])
    paths = RunPaths(Path(f"resolved-{len(bf16)}"))
    paths.root.mkdir()
    config = prepare.prepare_run(wanted, paths, [here], 1 + len(bf16), 1, writes=True, elsewhere=elsewhere).config
    return [config.train.dtype, config.parallel.engine]


def test_what_depends_on_the_devices_depends_on_those_of_all_nodes(place: Path) -> None:
    assert run_ranks(resolved, 1, folder=str(place), bf16=[True, False]) == [["mixed", "sharded"]]
    assert run_ranks(resolved, 1, folder=str(place), bf16=[True]) == [["fp32", "sharded"]]


def known_by(placement: Placement, folder: str, seeds: list[int]) -> list[Any]:
    """What nodes find that have different weights at the same place."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    os.chdir(folder)
    tree = load.load_recipe(Path("recipe.yaml"), ["data.tokenizer=train"]).model_dump(mode="json")
    wanted = load.build_config({**tree, "model": {"from_hf": "hf"}}, "the test's")
    text = load.to_yaml(resolve.resolve_autos(wanted, device="cpu", world=2, bf16=True, differ=False)[0])
    answers = []
    for seed in seeds:
        torch.manual_seed(seed)
        shape = LlamaConfig(vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                            num_attention_heads=2)  # fmt: skip
        LlamaForCausalLM(shape).save_pretrained("hf")
        answers.append(prepare.resolve_text(text, ["cpu"], 2, 1, False))
    return answers


def test_nodes_that_would_begin_with_different_weights_are_refused(place: Path) -> None:
    ((mine, same, other),) = run_ranks(known_by, 1, folder=str(place), seeds=[1, 1, 2])
    theirs = {**mine["data"], node_session.WEIGHTS: mine["weights"]}
    node_session.check_data(same, theirs)
    with pytest.raises(ConfigError, match=r"model\.from_hf differs between this node and node 0"):
        node_session.check_data(other, theirs)


@pytest.mark.parametrize(
    ("run", "meet", "expected"),
    [
        ("{place}/elsewhere-{node}", "file://{place}/meet", "differs from node 0's; set --run-dir to a folder on a"),
        ("{place}/one", "file://{place}/meet", "the run is complete already"),
    ],
)
def test_what_is_wrong_is_said_on_both_machines(
    wired: Networks, place: Path, run: str, meet: str, expected: str
) -> None:
    commands = [
        ["train", "recipe.yaml", "--run-dir", run.format(place=place, node=node), "--ranks", str(2 - node), "--nodes",
         "2", "--node-rank", str(node), "--rendezvous", meet.format(place=place), "--rendezvous-timeout", "60"]
        for node in range(2)
    ]  # fmt: skip
    ended = run_ranks(machine, 2, timeout_s=180, names=list(wired.names), folder=str(place), commands=commands)
    code = 0 if "complete" in expected else 2
    assert [code for code, _, _ in ended] == [code, code], ended
    assert expected in " ".join((ended[1][1] + ended[1][2]).split())
    assert ("this run is complete" if code == 0 else expected) in " ".join((ended[0][1] + ended[0][2]).split())


@pytest.mark.parametrize("asked", [0, 1])
def test_a_stop_before_all_have_met_stops_who_is_there(wired: Networks, place: Path, asked: int) -> None:
    commands = [
        ["train", "recipe.yaml", "--run-dir", "stopped", "--ranks", "1", "--nodes", "3", "--node-rank", str(node),
         "--rendezvous", f"file://{place}/meet"]
        for node in range(2)
    ]  # fmt: skip
    ended = run_ranks(
        machine, 2, timeout_s=180, names=list(wired.names), folder=str(place), commands=commands, stopped=asked
    )
    assert [code for code, _, _ in ended] == [10, 10], ended
    assert all("stopped by SIGTERM before " in out for _, out, _ in ended), ended
    assert not (place / "stopped").exists()
    assert not (place / "meet").exists()


def test_of_a_network_that_falls_apart_one_half_goes_on(wired: Networks, warm_nodes: WarmNodes, tmp_path: Path) -> None:
    """The one that creates the epoch's file; when the network heals, nobody comes back to life."""
    options: dict[str, Any] = {"nodes": 2, "meet": f"file://{tmp_path}/meet", "max_restarts": 1}
    started = [
        Started(warm_nodes, tmp_path, "second_time", 1, {}, network=name, node=node, **options)
        for node, name in enumerate(wired.names)
    ]
    wait_until(lambda: len(list(tmp_path.glob("ready-1-*.json"))) == 2, timeout_s=180)
    wired.cut()
    begun = time.monotonic()
    try:
        ended = [node.finish() for node in started]
    finally:
        wired.cut(up=True)
    print(f"the network fell apart, and all was over, in {time.monotonic() - begun:.1f} s")
    assert sorted(code for code, _, _ in ended) == [0, 1], ended
    (winner,) = [node for node in range(2) if ended[node][0] == 0]
    (lost,) = [event for event in ended[winner][2] if event["kind"] == EventKind.NODE_LOST]
    assert (lost["node"], lost["reason"]) == (1 - winner, "no heartbeat arrived for 3 s")
    assert "another group of nodes took over the run" in ended[1 - winner][1]
    assert [event["attempt"] for event in ended[1 - winner][2] if event["kind"] == "attempt_started"] == [1]
    assert len(list((tmp_path / "run" / "epochs").iterdir())) == 2
