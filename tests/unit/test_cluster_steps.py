"""What is left to do for a cluster, and Slurm's files for its nodes."""

from hypothesis import given
from hypothesis import strategies as st

from phalanx.provision.config import ClusterConfig, GroupConfig, NodeRole
from phalanx.provision.slurm_control import parse_sinfo
from phalanx.provision.slurm_files import digest_files, make_gres_conf, make_node_files, make_slurm_conf
from phalanx.provision.state import ClusterState, NodeRecord, Stage
from phalanx.provision.steps import StepKind, mark_lost, plan_nodes, plan_steps

GROUPS = (GroupConfig(name="head", role=NodeRole.CONTROLLER), GroupConfig(name="w", count=3, partition="dev"))
CONFIG = ClusterConfig(name="c", groups=GROUPS)
STAGES = {
    StepKind.LAUNCH: Stage.LAUNCHED,
    StepKind.CONFIGURE: Stage.CONFIGURED,
    StepKind.PROVISION: Stage.PROVISIONED,
    StepKind.JOIN: Stage.JOINED,
}


@given(
    stages=st.lists(st.sampled_from(list(Stage)), min_size=4, max_size=4),
    lost=st.sets(st.sampled_from(["head-1", "w-1", "w-2", "w-3"])),
    interrupted=st.lists(st.integers(0, 5), max_size=6),
)
def test_whatever_was_interrupted_the_steps_that_are_left_lead_to_the_same_end(
    stages: list[Stage], lost: set[str], interrupted: list[int]
) -> None:
    """Nodes at any stage, some of them lost meanwhile; each run carries out so many steps before it is interrupted."""
    nodes = plan_nodes(CONFIG, ())
    for node, stage in zip(nodes, stages, strict=True):
        node.stage = stage
    old = NodeRecord("w-4", "w", Stage.JOINED)
    present = [*nodes, old]
    for most in [*interrupted, 99]:
        for node in mark_lost(present, {node.name for node in present} - lost):
            assert node.name in lost
        lost = set()
        wanted = plan_nodes(CONFIG, present)
        for step in plan_steps(wanted, present)[:most]:
            for name in step.nodes:
                if step.kind == StepKind.TERMINATE:
                    present.remove(old)
                else:
                    node = next(each for each in wanted if each.name == name)
                    order = list(Stage)
                    assert order.index(node.stage) == order.index(STAGES[step.kind]) - 1  # in order, each once
                    node.stage = STAGES[step.kind]
    assert [node.name for node in present] == ["head-1", "w-1", "w-2", "w-3"]
    assert {node.stage for node in present} == {Stage.JOINED}
    assert plan_steps(present, present) == []


def make_state() -> ClusterState:
    state = ClusterState(CONFIG, nodes=plan_nodes(CONFIG, ()))
    for number, node in enumerate(state.nodes):
        node.address, node.stage = f"10.0.0.{number + 1}", Stage.LAUNCHED
        node.facts = {"cpus": 4, "memory_mib": 1000, "gpus": 8 if number > 1 else 0}
    return state


def test_slurms_files_say_what_was_measured() -> None:
    state = make_state()
    conf = make_slurm_conf(state, 10)
    assert "SlurmctldHost=head-1(10.0.0.1)" in conf
    assert "NodeName=w-1 NodeAddr=10.0.0.2 CPUs=4 RealMemory=1000 State=UNKNOWN" in conf
    assert "NodeName=w-3 NodeAddr=10.0.0.4 CPUs=4 RealMemory=1000 Gres=gpu:8 State=UNKNOWN" in conf
    assert "PartitionName=dev Nodes=w-1,w-2,w-3 Default=YES" in conf
    whole = make_node_files(state, state.nodes[1], b"k", {}, 10)["/etc/slurm/slurm.conf"].data
    assert whole.endswith(b"\ninclude /etc/slurm/site.conf\n")  # what the administrator sets there holds
    assert make_gres_conf(state).splitlines()[0] == "NodeName=w-2 Name=gpu File=/dev/nvidia[0-7]"
    state.nodes[3].stage = Stage.ABSENT  # a node that could not be made: Slurm is not told of it
    assert "w-3" not in make_slurm_conf(state, 10)


def test_daemons_are_restarted_for_slurms_files_and_not_for_scripts() -> None:
    state = make_state()
    first = digest_files(make_node_files(state, state.nodes[1], b"k", {"a.sh": b"1"}, 10))
    assert first == digest_files(make_node_files(state, state.nodes[1], b"k", {"a.sh": b"2"}, 10))
    assert first != digest_files(make_node_files(state, state.nodes[1], b"other", {"a.sh": b"1"}, 10))
    state.nodes[2].address = "10.0.0.99"
    assert first != digest_files(make_node_files(state, state.nodes[1], b"k", {"a.sh": b"1"}, 10))


def test_sinfo_is_read() -> None:
    views = parse_sinfo("w-1|idle|none\nw-2|down*|Not responding\nw-3|drained|phalanx reboot: Xid | 79\n\n")
    assert (views["w-1"].usable, views["w-2"].silent, views["w-2"].word) == (True, True, "down")
    assert (views["w-3"].reason, views["w-3"].busy) == ("phalanx reboot: Xid | 79", False)
