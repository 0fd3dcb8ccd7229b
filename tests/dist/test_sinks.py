"""Records on a disk that is full for a while: nothing is lost and the order stays."""

import resource
from pathlib import Path

from phalanx.records import Placement, RunPaths, read_lines
from phalanx.train.sinks import Records
from tests.helpers import run_ranks


def write_with_little_room(placement: Placement, run: str) -> int:
    """Events while no file may exceed 1000 bytes, then one more without that limit; returns lines found meanwhile."""
    paths = RunPaths(Path(run))
    records = Records(paths, 1, [], active=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # a file's last line is then cut in the middle
    for number in range(30):
        records.event("warning", {"number": number, "message": "x" * (number % 7)})
    found = len(list(read_lines(paths.events)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    records.event("warning", {"number": 30})
    records.close()
    return found


def test_lines_wait_for_room(tmp_path: Path) -> None:
    (found,) = run_ranks(write_with_little_room, 1, run=str(tmp_path))
    assert 0 < found < 30
    assert [event["number"] for event in read_lines(RunPaths(tmp_path).events)] == list(range(31))
