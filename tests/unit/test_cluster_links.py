"""The links between a cluster's nodes, and the switches of Slurm that follow from what is measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.elastic.membership.connectivity import ConnectionProbe
from phalanx.provision import converge, link_probe
from phalanx.provision.config import ClusterConfig
from phalanx.provision.converge import Convergence
from phalanx.provision.deep_checks import explain_unhealthy, find_broken_links
from phalanx.provision.links import forget_node, group_by_links, link_key, measure_links, record_rates
from phalanx.provision.local import LocalMachines
from phalanx.provision.slurm_files import make_node_files, make_topology_conf
from phalanx.provision.state import ClusterFolder, ClusterState, NodeRecord, Stage
from phalanx.provision.steps import plan_nodes
from tests.helpers import ROOT

NAMES = [f"w-{number + 1}" for number in range(6)]


@given(
    switch=st.lists(st.integers(0, 2), min_size=2, max_size=6),
    noise=st.lists(st.floats(0.7, 1.0), min_size=15, max_size=15),
)
def test_nodes_behind_one_switch_are_a_group_whatever_the_noise(switch: list[int], noise: list[float]) -> None:
    """Links within a switch carry five times what links between switches do, each less by up to 30 %."""
    names, draws = NAMES[: len(switch)], iter(noise)
    rates = {
        link_key(names[one], names[other]): (1e9 if switch[one] == switch[other] else 2e8) * next(draws)
        for one in range(len(names))
        for other in range(one)
    }
    pairs = len({each for each in switch if switch.count(each) > 1})
    found = group_by_links(names, rates)
    assert sorted(each for group in found for each in group) == names
    if pairs and 2 * sum(switch.count(each) > 1 for each in switch) > len(switch):  # most nodes have a near one
        want = [[name for name, at in zip(names, switch, strict=True) if at == each] for each in dict.fromkeys(switch)]
        assert found == want


def test_one_slow_node_stands_alone_and_joins_no_others() -> None:
    rates = {link_key(one, other): 1e9 for one in NAMES for other in NAMES if one < other}
    assert group_by_links(NAMES, rates) == [NAMES]
    rates |= {link_key("w-2", other): 1e8 for other in NAMES if other != "w-2"}
    assert group_by_links(NAMES, rates) == [["w-1", "w-3", "w-4", "w-5", "w-6"], ["w-2"]]
    assert group_by_links([], {}) == []


def make_state() -> ClusterState:
    groups = [{"name": "head", "role": "controller"}, {"name": "a", "count": 2}, {"name": "b", "count": 2}]
    config = ClusterConfig.model_validate({"name": "c", "groups": groups})
    state = ClusterState(config, nodes=plan_nodes(config, ()))
    for number, node in enumerate(state.nodes):
        node.address, node.stage = f"10.0.0.{number + 1}", Stage.JOINED
    return state


def test_measured_links_make_slurms_switches() -> None:
    state = make_state()
    assert (
        make_topology_conf(state)
        == "SwitchName=a Nodes=a-1,a-2\nSwitchName=b Nodes=b-1,b-2\nSwitchName=all Switches=a,b\n"
    )
    every = ["a-1", "a-2", "b-1", "b-2"]
    state.links = {link_key(one, other): 1 << 30 for one in every for other in every if one < other}
    assert make_topology_conf(state) == ""  # the groups hang on one switch
    assert b"TopologyPlugin" not in make_node_files(state, state.nodes[0], b"k", {}, 10)["/etc/slurm/slurm.conf"].data
    for pair in ("a-1 a-2", "a-1 b-2", "a-2 b-1", "b-1 b-2"):
        state.links[pair] >>= 3
    assert make_topology_conf(state).splitlines() == [
        "SwitchName=switch1 Nodes=a-1,b-1",
        "SwitchName=switch2 Nodes=a-2,b-2",
        "SwitchName=all Switches=switch1,switch2",
    ]
    state.links = forget_node(state.links, "b-2")  # it was replaced, and not measured yet
    assert "SwitchName=b Nodes=b-2" in make_topology_conf(state)


def test_groups_may_have_the_names_of_our_switches() -> None:
    state, renamed = make_state(), {"a": "all", "b": "switch1"}
    groups = [each.model_copy(update={"name": renamed.get(each.name, each.name)}) for each in state.config.groups]
    state.config = state.config.model_copy(update={"groups": tuple(groups)})
    for node in state.nodes:
        node.group = renamed.get(node.group, node.group)
    names = [line.split()[0] for line in make_topology_conf(state).splitlines()]
    assert names == ["SwitchName=all", "SwitchName=switch1", "SwitchName=all-"]
    state.links = {link_key("a-1", "a-2"): 1 << 30}
    names = [line.split()[0] for line in make_topology_conf(state).splitlines()]
    assert len(set(names)) == len(names) == 3 and "SwitchName=switch1-" in names


class ProcessMachines(LocalMachines):
    """Nodes that are processes of this machine; the one named `broken` cannot run Python."""

    def command(self, node: NodeRecord, command: list[str]) -> list[str]:
        return ["sh", "-c", "echo no python3 >&2; exit 127"] if node.name == "broken" else command

    def python(self) -> str:
        return f"env PYTHONPATH={ROOT} {sys.executable}"


def test_nodes_measure_their_links_and_a_broken_one_is_named(tmp_path: Path) -> None:
    nodes = [NodeRecord(name, "w", address="127.0.0.1") for name in ("w-1", "broken", "w-2")]
    probes = measure_links(ProcessMachines(tmp_path), nodes)
    rates = record_rates(nodes, probes)
    assert list(rates) == ["w-1 w-2"] and rates["w-1 w-2"] > 1 << 20
    broken = find_broken_links(nodes, probes)
    assert set(broken) == {"broken"}
    assert "the probe of broken did not run (no python3)" in broken["broken"]
    assert find_broken_links(nodes[:1], {0: {}}) == {}
    down = ConnectionProbe(error="no route to host")
    assert set(find_broken_links(nodes, {0: {1: down, 2: ConnectionProbe()}, 2: {1: down}})) == {"broken"}
    assert set(find_broken_links(nodes, {0: {1: down}})) == {"w-1", "broken"}  # who knows which
    slow = {0: {1: ConnectionProbe(bytes_per_s=1e6)}, 1: {0: ConnectionProbe(bytes_per_s=3e6)}}
    assert record_rates(nodes[:2], slow) == {"broken w-1": 3_000_000}


def test_links_that_are_known_stay_while_jobs_may_use_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state()
    state.links = {"a-1 a-2": 9}
    work = Convergence(ClusterFolder(tmp_path, "c"), state, LocalMachines(tmp_path), lambda node, text: None)
    monkeypatch.setattr(work, "configure_changed", lambda: None)
    slow = {0: {1: ConnectionProbe(bytes_per_s=1), 2: ConnectionProbe(bytes_per_s=2)}}
    monkeypatch.setattr(converge, "measure_links", lambda machines, nodes: slow)
    nodes = [state.node(name) for name in ("a-1", "a-2", "b-1")]
    work.measure_links(nodes, again=False)
    assert state.links == {"a-1 a-2": 9, "a-1 b-1": 2}
    work.measure_links(nodes)
    assert state.links == {"a-1 a-2": 1, "a-1 b-1": 2}


def test_a_nodes_part_runs_with_the_standard_library_alone() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {link_probe.__name__}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "pydantic", "typer", "rich", "yaml", "numpy"} & set(done.stdout.split())


def test_what_a_deep_check_found_is_said() -> None:
    lacking = "Traceback:\nModuleNotFoundError: No module named 'torch'\ncode 1\n"
    assert explain_unhealthy(lacking).startswith("its python3 has no torch; install Phalanx with torch there")
    findings = [{"severity": "ok", "sentence": "well"}, {"severity": "isolate", "sentence": "GPU 3 is wrong"}]
    assert explain_unhealthy(f"x\n{json.dumps({'findings': findings})}\ncode 3\n") == "GPU 3 is wrong"
    assert explain_unhealthy("one\nIt ended so.\ncode 1\n").endswith("It ended so.")
