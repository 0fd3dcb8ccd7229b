"""Devices are measured before the first step, by a command of its own or by the run; what was measured is used again.

Rank 1 really is slower: its blocks sleep.
"""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from phalanx.core.json_lines import read_lines
from phalanx.core.placement import ExitCode, Placement
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.layout import hardware
from phalanx.layout.balance import parse_division
from phalanx.layout.hardware import fit_line
from tests.dist import command
from tests.dist.command import contents, refused, write_place
from tests.helpers import ALL, run_ranks

MODEL = """
import time
import torch.distributed as dist
from phalanx.models import llama

class Block(llama.Block):
    def forward(self, x, *args, **kwargs):
        if x.device.type != "meta" and dist.is_initialized() and dist.get_rank() == 1:
            time.sleep(0.003 * x.shape[0])
        return super().forward(x, *args, **kwargs)

class Model(llama.Llama):
    block = Block
"""
JOB = ("recipe.yaml", "--ranks", "2", "model.code=slow.py", "train.global_batch=8", "train.micro_batch=8")


def phalanx(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """What sleeps is seen to be slow in little time."""
    return command.phalanx(folder, *arguments, block_s=0.004)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_place(tmp_path_factory.mktemp("hardware"))
    (folder / "slow.py").write_text(MODEL)
    return folder


@pytest.fixture(scope="module")
def known(here: Path) -> dict[str, Any]:
    """What `phalanx hardware` says, and writes into hardware.json; one that the recipe names is measured anew."""
    asked = ("train.micro_batch=2", "balance.hardware=hardware.json")
    code, out, err = phalanx(here, "hardware", *JOB[:-1], *asked, "--json")
    assert code == ExitCode.DONE, err
    found: dict[str, Any] = json.loads(out)
    return found


def events(paths: RunPaths, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(paths.events) if event["kind"] == kind]


def test_the_command_measures_each_device_and_says_what_follows(here: Path, known: dict[str, Any]) -> None:
    written = hardware.read_hardware(here / "hardware.json")
    shown = {key: value for key, value in known.items() if key not in ("shares", "parts")}
    assert json.loads((here / "hardware.json").read_text()) == shown
    fast, slow = written.devices
    assert [size for size, _ in slow.times][:2] == [1, 3]
    # A pass of the slow one sleeps 3 ms for each sequence, in the one block that this model has.
    for size, seconds in slow.times:
        assert seconds > 0.003 * size
    assert dict(fast.times)[3] < dict(slow.times)[3]
    assert (fast.most, slow.most) == (8, 8), "of memory alone"
    assert fast.memory_bytes > 2**20
    assert fast.host_to_device_bytes_per_s is None
    for device in written.devices:  # no processor takes as long for a byte, nor is done with it at once
        assert device.carries_s_per_byte is not None and 1e-12 < device.carries_s_per_byte < 1e-3
    assert written.link is not None and written.link.busy_latency_s is not None
    assert 1e-6 < written.link.busy_latency_s < 10.0
    assert written.work["positions"] == 8
    assert known["shares"][0] > known["shares"][1]
    assert sum(known["shares"]) == 8
    division = parse_division(known)
    assert division is not None and division.fits([2, 2]), "the shares are of a run with the recipe's limit"
    assert not (here / "runs").exists(), "it makes no run folder"


def test_the_table_has_a_row_for_each_device(here: Path) -> None:
    code, out, _ = phalanx(here, "hardware", *JOB[:3], "--out", "other/h.json")
    assert code == ExitCode.DONE
    assert [line.split()[:2] for line in out.splitlines() if "GiB  " in line] == [["0", "cpu"], ["1", "cpu"]]
    assert "an all-reduce over all ranks" in out
    assert (here / "other" / "h.json").exists()


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(here: Path) -> None:
    (here / "taken").mkdir()
    (here / "plain").write_text("")
    for name, why in (("taken", "it is a folder"), ("plain/h.json", "File exists")):
        code, out, err = phalanx(here, "hardware", *JOB, "--out", name)
        assert (code, out) == (ExitCode.CONFIG, "")
        assert err == f"error: {name} cannot be written ({why}); choose another with --out\n"


class Launching:
    """Stands for a device that takes 0.1 s to begin with anything, and next to nothing for a sample more."""

    def measure_peak_bytes(self, samples: int) -> int:
        return samples

    def measure_seconds(self, samples: int, passes: int = 1) -> float:
        return 0.1 + 0.001 * samples

    def discard_step(self) -> None:
        raise AssertionError("memory did not run out")


def test_what_any_micro_batch_takes_is_told_from_what_a_sample_takes() -> None:
    from phalanx.autotune.measure import BUDGET_S, _time_sizes

    found = _time_sizes(cast("Any", Launching()), [1, 3, 9, 27], 1e9, BUDGET_S)
    assert list(found.seconds) == [1, 3], "the next one might take longer than anybody waits"
    told = fit_line(tuple(found.seconds.items()))
    assert told == pytest.approx((0.1, 0.001))


class Disturbed(Launching):
    """Stands for a fast device from which a neighbour takes the cores for one pass, the first of three samples."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def measure_seconds(self, samples: int, passes: int = 1) -> float:
        self.seen.append(samples)
        return 0.5 if self.seen == [1, 3] else 0.001 * samples


def test_one_disturbed_pass_does_not_end_the_measuring() -> None:
    from phalanx.autotune.measure import BUDGET_S, _time_sizes

    found = _time_sizes(cast("Any", Disturbed()), [1, 3, 8], 1e9, BUDGET_S)
    assert found.seconds == {1: 0.001, 3: 0.003, 8: 0.008}


def test_a_run_measures_once_and_keeps_what_it_found(here: Path) -> None:
    job = (*JOB, "--run-dir", "run", "balance.batch=measured-once")
    assert phalanx(here, "train", *job)[0] == ExitCode.DONE
    paths = RunPaths(here / "run")
    measuring, again = events(paths, EventKind.MEASURING)
    (measured,) = events(paths, EventKind.MEASURED)
    assert (measuring["ranks"], measuring["reason"]) == (2, "nothing was known of these devices")
    assert again["reason"].startswith("once more, since rank 1 takes")  # both of one model
    assert [row["rank"] for row in measured["devices"]] == [0, 1]
    assert measured["devices"][0]["sequences_per_s"] > measured["devices"][1]["sequences_per_s"]
    before = contents(here / "run")["hardware.json"]
    assert phalanx(here, "train", *job, "train.steps=3")[0] == ExitCode.DONE
    assert len(events(paths, EventKind.MEASURED)) == 1
    assert contents(here / "run")["hardware.json"] == before
    for record in read_steps(paths.metrics):
        assert record["shares"][0] > record["shares"][1]
    # Where it was measured on another device the run begins anew with what is measured now, and says so.
    paths.hardware.write_text(paths.hardware.read_text().replace('"model": "cpu"', '"model": "another"', 1))
    assert phalanx(here, "train", *job, "train.steps=4")[0] == ExitCode.DONE
    (changed,) = events(paths, EventKind.DEVICES_CHANGED)
    assert changed["reason"] == "rank 0 was on a device called 'another' when it was measured, and is on 'cpu' now"
    assert hardware.read_hardware(paths.hardware).devices[0].model == "cpu"
    if not ALL:
        return
    # With other devices, here more of them, it does not fit any more.
    more = ("train", *(part if part != "2" else "3" for part in job), "train.steps=5")
    assert phalanx(here, *more)[0] == ExitCode.DONE
    again = [event for event in events(paths, EventKind.MEASURING)[1:] if not event["reason"].startswith("once more")]
    assert [event["reason"] for event in again] == [
        changed["reason"],
        "it was measured with 2 ranks, and this job has 3",
    ]
    assert len(events(paths, EventKind.DEVICES_CHANGED)) == 1
    assert len(hardware.read_hardware(paths.hardware).devices) == 3


def test_a_file_that_the_recipe_names_is_used(here: Path, known: dict[str, Any]) -> None:
    tree = {key: value for key, value in known.items() if key not in ("shares", "parts")}
    tree["devices"][0]["times"], tree["devices"][1]["times"] = [[1, 0.03]], [[1, 0.01]]
    (here / "given.json").write_text(json.dumps(tree))
    given = (*JOB, "balance.hardware=given.json", "balance.batch=measured-once", "--run-dir", "given")
    assert phalanx(here, "train", *given)[0] == ExitCode.DONE
    paths = RunPaths(here / "given")
    assert events(paths, EventKind.MEASURING) == []
    assert [record["shares"] for record in read_steps(paths.metrics)] == [[2, 6]] * 2
    assert hardware.read_hardware(paths.hardware) == hardware.read_hardware(here / "given.json"), (
        "a copy, to repeat the run with"
    )


def test_a_file_of_another_job_is_refused(here: Path, known: dict[str, Any]) -> None:
    given = ("balance.hardware=hardware.json", "--run-dir", "refused")
    rest = "; measure again with `phalanx hardware`, or remove balance.hardware"
    said = "balance.hardware hardware.json does not fit this job: "
    found = refused(here, "train", *JOB, *given, "model.hidden=32")
    assert found.startswith(f"{said}it was measured for another piece of work: ")
    assert found.endswith(f" now{rest}")
    assert refused(here, "train", *(part if part != "2" else "3" for part in JOB), *given) == (
        f"{said}it was measured with 2 ranks, and this job has 3{rest}"
    )
    (here / "torn.json").write_text("{")
    assert refused(here, "train", *JOB, "balance.hardware=torn.json") == (
        "the hardware file torn.json is not JSON, so it is damaged; measure again with `phalanx hardware`, or delete "
        "the file"
    )
    assert refused(here, "train", *JOB, "balance.hardware=none.json") == (
        "the hardware file none.json cannot be read (No such file or directory); name one that `phalanx hardware` wrote"
    )
    assert not (here / "refused").exists()


def of_another_model(placement: Placement, folder: str, model: str) -> str:
    """What a rank says of a file that was measured on a device of another model."""
    from phalanx.autotune.rank_speeds import read_hardware_file
    from phalanx.core.errors import ConfigError

    try:
        read_hardware_file(
            f"{folder}/hardware.json", ["cpu", model], hardware.read_hardware(Path(folder) / "hardware.json").work
        )
    except ConfigError as error:
        return str(error)
    return "it fits"


def test_a_file_of_other_devices_is_refused(here: Path, known: dict[str, Any]) -> None:
    assert run_ranks(of_another_model, 1, folder=str(here), model="cpu") == ["it fits"]
    (found,) = run_ranks(of_another_model, 1, folder=str(here), model="H200")
    assert "rank 1 was on a device called 'cpu' when it was measured, and is on 'H200' now; measure again" in found


def test_a_model_that_several_ranks_hold_is_not_measured(here: Path) -> None:
    assert "measurement needs the whole model on each device" in refused(
        here, "hardware", "recipe.yaml", "--ranks", "2", "parallel.tensor=2"
    )


def link_beside_an_accelerator(placement: Placement, hosts: list[int]) -> float | None:
    from phalanx.autotune import link_speed
    from phalanx.comm.mesh import join

    with join(placement, 20) as mesh:
        link_speed._computes_itself = lambda mesh: mesh.rank in hosts
        found, _ = link_speed.measure_link(mesh)
        assert found is not None
        return found.busy_latency_s


def test_cpus_and_accelerators_measure_their_link_together() -> None:
    first, other = run_ranks(link_beside_an_accelerator, 2, hosts=[0])
    assert first is not None and first == other
    assert run_ranks(link_beside_an_accelerator, 2, hosts=[]) == [None, None]
