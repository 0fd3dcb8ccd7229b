"""Records on a disk that is full for a while: nothing is lost and the order stays."""

import dataclasses
import resource
from pathlib import Path

from phalanx.core.json_lines import read_lines
from phalanx.core.placement import Placement
from phalanx.core.records import StepRecord
from phalanx.core.run_paths import RunPaths
from phalanx.workload.sinks import RecordWriter, TensorBoardSink
from tests.helpers import run_ranks


def write_with_little_room(placement: Placement, run: str) -> int:
    """Events while no file may exceed 1000 bytes, then one more without that limit; returns lines found meanwhile."""
    paths = RunPaths(Path(run))
    records = RecordWriter(paths, 1, [], active=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # a file's last line is then cut in the middle
    for number in range(30):
        records.write_event("warning", {"number": number, "message": "x" * (number % 7)})
    found = len(list(read_lines(paths.events)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    records.write_event("warning", {"number": 30})
    records.close()
    return found


def test_lines_wait_for_room(tmp_path: Path) -> None:
    (found,) = run_ranks(write_with_little_room, 1, run=str(tmp_path))
    assert 0 < found < 30
    assert [event["number"] for event in read_lines(RunPaths(tmp_path).events)] == list(range(31))


def steps_and_evaluations(placement: Placement, run: str) -> dict[str, list[list[float]]]:
    """What TensorBoard's own reader finds of evaluations on two sets and of steps of two ranks and of many, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    paths = RunPaths(Path(run))
    records = RecordWriter(paths, 1, [TensorBoardSink(paths)], active=True)
    for step, name, loss in ((1, "held_out", 3.0), (1, "math", 4.0), (2, "math", 3.5)):
        records.write_event("evaluated", {"step": step, "set": name, "loss": loss, "tokens": 1, "seconds": 0.1})
    record = StepRecord(
        step=1, attempt=1, loss=2.0, grad_norm=1.0, lr=0.1, tokens=6, total_tokens=6, step_s=1.0, tokens_per_s=6.0,
        wait_s=0.5, comm_bytes=8, data_s=0.1, mfu=None, mfu_causal=None, memory_bytes=7, shares=[4, 2],
        busy_s=[0.75, 0.5],
    )  # fmt: skip
    records.write_step(record)
    many = dataclasses.replace(record, step=2, shares=[1] * 65, busy_s=[1.0] * 65)
    records.write_step(many)
    records.close()
    found = EventAccumulator(str(paths.tensorboard)).Reload()
    return {tag: [[event.step, event.value] for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_each_set_and_each_rank_has_a_tag_of_its_own(tmp_path: Path) -> None:
    (found,) = run_ranks(steps_and_evaluations, 1, run=str(tmp_path))
    sets = {tag: points for tag, points in found.items() if tag.startswith("eval/")}
    assert sets == {"eval/held_out": [[1, 3.0]], "eval/math": [[1, 4.0], [2, 3.5]]}
    assert found["train/loss"] == [[1, 2.0], [2, 2.0]]
    ranks = {tag: points for tag, points in found.items() if "rank" in tag}
    assert ranks == {
        "shares/rank 00": [[1, 4]], "shares/rank 01": [[1, 2]],
        "busy_s/rank 00": [[1, 0.75]], "busy_s/rank 01": [[1, 0.5]],
    }, "of more than 64 ranks there are none"  # fmt: skip
