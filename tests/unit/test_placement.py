"""Which rank a process is: torchrun's and Slurm's variables, sensible or not."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement, StoreAddress
from phalanx.system.torchrun_env import device_of, first_host, from_environment, strip_job_variables

USERS = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "lab"}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu-[007-008]",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "3",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "138412033",
    "MASTER_ADDR": "10.0.0.1",
}
GPUS = [f"gpu:{index}" for index in range(4)]


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


def test_torchrun() -> None:
    assert from_environment(TORCHRUN, GPUS) == Placement(
        rank=5,
        world=8,
        local_rank=1,
        local_world=4,
        node=1,
        device="gpu:1",
        store=StoreAddress("10.0.0.1", 29500),
        attempt=3,
    )


def test_variables_of_torchrun_without_its_agent() -> None:
    """What other launchers set: five variables, and rank 0 keeps the store."""
    bare = without(
        TORCHRUN, "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"
    )
    found = from_environment(bare, [])
    assert found is not None
    assert (found.local_world, found.node, found.device, found.attempt) == (8, 0, "cpu", 1)
    assert found.store == StoreAddress("10.0.0.1", 29500, serve=False)
    first = from_environment(bare | {"RANK": "0"}, [])
    assert first is not None
    assert first.store == StoreAddress("10.0.0.1", 29500, serve=True)


def test_srun() -> None:
    found = from_environment(SLURM, GPUS)
    assert found == Placement(
        rank=5,
        world=7,
        local_rank=1,
        local_world=3,
        node=1,
        device="gpu:1",
        store=StoreAddress("gpu-007", 10000 + (1234 * 64 + 3) % 50000, serve=False),
        attempt=1,
    )
    first = SLURM | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_RESTART_COUNT": "4"}
    found = from_environment(first, [])
    assert found is not None
    assert found.store is not None
    assert (found.store.serve, found.attempt, found.local_world, found.device) == (True, 5, 4, "cpu")


def test_mpirun() -> None:
    """It does not say where rank 0 is; of what it starts on one machine that is known. As a task of srun it counts."""
    found = from_environment(SLURM | MPIRUN, GPUS)
    assert found is not None and found.store is not None
    assert found == Placement(5, 8, 1, 4, 1, "gpu:1", StoreAddress("10.0.0.1", found.store.port))
    given = from_environment(MPIRUN | {"MASTER_PORT": "29500", "OMPI_COMM_WORLD_RANK": "0"}, [])
    assert given is not None and given.store == StoreAddress("10.0.0.1", 29500, serve=True)
    here = without(MPIRUN, "MASTER_ADDR") | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
    alone, other = from_environment(here, []), from_environment(here | {"PMIX_NAMESPACE": "prterun-1@1"}, [])
    assert alone is not None and alone.store is not None and other is not None and other.store is not None
    assert alone.store.host == "127.0.0.1" and alone.store.port != other.store.port
    assert strip_job_variables(MPIRUN) == {"PMIX_NAMESPACE": "138412033"}


def test_two_steps_of_a_job_do_not_meet() -> None:
    ports = set()
    for step in range(60):
        found = from_environment(SLURM | {"SLURM_STEP_ID": str(step)}, [])
        assert found is not None
        assert found.store is not None
        ports.add(found.store.port)
    assert len(ports) == 60
    assert all(10000 <= port < 60000 for port in ports)


def test_torchrun_inside_an_allocation_counts() -> None:
    found = from_environment(SLURM | TORCHRUN, GPUS)
    assert found is not None
    assert found.world == 8


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0"},
        {"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"},  # in an allocation, but no step
        without(SLURM, "SLURM_STEP_NUM_TASKS"),  # a batch script
        SLURM | {"SLURM_STEP_NUM_TASKS": "1"},
        without(TORCHRUN, "MASTER_PORT"),
    ],
)
def test_neither(environment: dict[str, str]) -> None:
    assert from_environment(environment, GPUS) is None


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (
            TORCHRUN | {"RANK": "-1"},
            "the environment variable RANK is '-1', not a number; let torchrun, mpirun or srun set it",
        ),
        (TORCHRUN | {"RANK": "five"}, "RANK is 'five', not a number"),
        (TORCHRUN | {"RANK": ""}, "RANK is '', not a number"),
        (TORCHRUN | {"RANK": "٣"}, "RANK is '٣', not a number"),
        (
            TORCHRUN | {"RANK": "8"},
            "the environment has RANK 8 of WORLD_SIZE 8, which is not possible; let torchrun set",
        ),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "RANK 5 of WORLD_SIZE 0"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "0"}, "LOCAL_RANK 1 of LOCAL_WORLD_SIZE 0"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK 4 of LOCAL_WORLD_SIZE 4"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT is 'http', not a number"),
        (TORCHRUN | {"MASTER_PORT": "9" * 5000}, "MASTER_PORT is"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT is 0, which is not a port; give a free port between"),
        (TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT is 65536, which is not a port"),
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT is 'x'"),
        (
            without(MPIRUN, "MASTER_ADDR"),
            "mpirun started 8 ranks, 4 of them here, but does not say where rank 0 is",
        ),
        (MPIRUN | {"MASTER_PORT": "0"}, "MASTER_PORT is 0, which is not a port"),
        (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_RANK": "4"}, "OMPI_COMM_WORLD_LOCAL_RANK 4 of OMPI_COMM_WORLD_LOCAL_SIZE 4"),
        (SLURM | {"SLURM_PROCID": "x"}, "SLURM_PROCID is 'x'"),
        (SLURM | {"SLURM_PROCID": "7"}, "SLURM_PROCID 7 of SLURM_STEP_NUM_TASKS 7, which is not possible; let srun"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS is 'many'"),
        (SLURM | {"SLURM_STEP_ID": "batch"}, "SLURM_STEP_ID is 'batch'"),
        (SLURM | {"SLURM_RESTART_COUNT": "x"}, "SLURM_RESTART_COUNT is 'x'"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x"}, "SLURM_STEP_TASKS_PER_NODE has '4(x', which is not a count"),
        (SLURM | {"SLURM_STEP_NODELIST": "[1-2]"}, "SLURM_STEP_NODELIST is '[1-2]', which is not a list of nodes"),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is ''"),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu-[1"}, "SLURM_STEP_NODELIST is 'gpu-[1'"),
    ],
)
def test_variables_that_make_no_sense_are_named(environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        from_environment(environment, GPUS)


def test_a_rank_gets_its_own_accelerator() -> None:
    assert [device_of([], rank, 99) for rank in (0, 98)] == ["cpu", "cpu"]
    assert [device_of(GPUS, rank, 4) for rank in range(4)] == GPUS
    assert device_of(GPUS[:1], 0, 1) == "gpu:0"


@pytest.mark.parametrize(
    ("seen", "per_task", "devices"),
    [
        (4, None, GPUS),
        (1, None, GPUS[:1] * 4),  # --gpu-bind, or CUDA_VISIBLE_DEVICES for each rank
        (1, "1", GPUS[:1] * 4),
        (2, "a100:2", GPUS[:1] * 4),
        (4, "1", GPUS),  # asked for by the job, not bound by the step
    ],
)
def test_a_rank_that_sees_its_own_accelerators_alone_takes_the_first(
    seen: int, per_task: str | None, devices: list[str]
) -> None:
    def placed(rank: int) -> str:
        started = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NODEID": "0"}
        started |= {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        started |= {} if per_task is None else {"SLURM_GPUS_PER_TASK": per_task}
        found = from_environment(started, GPUS[:seen])
        assert found is not None
        return found.device

    assert [placed(rank) for rank in range(4)] == devices
    if per_task is None:
        under_torchrun = from_environment(TORCHRUN, GPUS[:seen])
        assert under_torchrun is not None and under_torchrun.device == devices[1]


@pytest.mark.parametrize(
    ("seen", "sentence"),
    [
        (1, r"this node has 5 ranks but sees one accelerator; .* \(--ranks 1\)"),
        (4, r"this node has 5 ranks but sees 4 accelerators; start one rank per accelerator \(--ranks 4\)"),
    ],
)
def test_more_ranks_than_accelerators_are_refused(seen: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        [device_of(GPUS[:seen], rank, 5) for rank in range(5)]


NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)
COUNTS = st.lists(st.from_regex(r"[0-9]{1,4}(-[0-9]{1,4})?", fullmatch=True), min_size=1, max_size=3)
PARTS = st.lists(st.tuples(NAMES, COUNTS), min_size=1, max_size=3)


@given(PARTS, NAMES | st.just(""), st.lists(NAMES, max_size=2))
def test_the_first_host_of_any_node_list(parts: list[tuple[str, list[str]]], end: str, others: list[str]) -> None:
    listed = "".join(f"{name}[{','.join(counts)}]" for name, counts in parts) + end
    first = "".join(name + counts[0].partition("-")[0] for name, counts in parts) + end
    assert first_host(",".join([listed, *others])) == first


@given(NAMES, st.lists(NAMES, max_size=3))
def test_a_plain_list_begins_with_its_first_host(first: str, others: list[str]) -> None:
    assert first_host(",".join([first, *others])) == first


@given(st.text(max_size=20))
def test_any_text_is_a_host_or_a_sentence(nodes: str) -> None:
    try:
        host = first_host(nodes)
    except ConfigError as error:
        host = str(error)
        assert "SLURM_STEP_NODELIST" in host
    assert host
    assert "[" not in host or "SLURM_STEP_NODELIST" in host


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 3)), min_size=1, max_size=4), st.data())
def test_tasks_of_a_node_are_found_in_any_spelling(groups: list[tuple[int, int]], data: st.DataObject) -> None:
    counts = [count for count, times in groups for _ in range(times)]
    node = data.draw(st.integers(0, len(counts) - 1))
    spelled = ",".join(f"{count}(x{times})" if times > 1 else f"{count}" for count, times in groups)
    variables = SLURM | {
        "SLURM_STEP_TASKS_PER_NODE": spelled,
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(sum(counts[:node])),
        "SLURM_STEP_NUM_TASKS": str(max(2, sum(counts))),
        "SLURM_LOCALID": "0",
    }
    found = from_environment(variables, [])
    assert found is not None
    assert found.local_world == counts[node]


def test_what_is_started_in_a_shell_of_a_job_is_no_part_of_it() -> None:
    of_job = {**SLURM, "SLURM_RESTART_COUNT": "1", "SLURM_MEM_PER_CPU": "100"}
    found = strip_job_variables({**USERS, **TORCHRUN, **of_job})
    assert found == {**USERS, **{name: TORCHRUN[name] for name in found if name in TORCHRUN}}
    assert from_environment(found, []) is None
    assert strip_job_variables({**USERS, "SLURM_HINT": "multithread"}) == {**USERS, "SLURM_HINT": "multithread"}
