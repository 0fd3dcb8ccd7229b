"""Ranks of a script, as `phalanx run` has them begin and leave."""

import contextlib
import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.core.placement import Placement
from tests.dist.scripts import written
from tests.helpers import run_ranks

LINGERS = """
import os, pathlib, time
if os.environ["RANK"] == "0":
    time.sleep(1.0)
    pathlib.Path("over").touch()
"""


def leaves(placement: Placement, script: str, folder: str) -> bool:
    """Whether the script was over on rank 0, which lingers, when this rank had left; each has a node of its own."""
    from phalanx.compat import run

    with contextlib.chdir(folder):
        run.run_rank(replace(placement, nodes=2), script, [], launched=run.LaunchInfo())
        return Path("over").exists()


def test_on_several_nodes_no_rank_leaves_before_the_script_is_over_on_all(tmp_path: Path) -> None:
    script = written(tmp_path, LINGERS)
    assert run_ranks(leaves, 2, script=script, folder=str(tmp_path)) == [True, True]


def ended(placement: Placement, script: str, environment: dict[str, str]) -> Any:
    """Exit code and errors of the one rank that mpirun has started."""
    from phalanx.compat import run

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = run.run_script(script, [], environment)
    return [code, said.getvalue()]


def test_a_mistake_of_a_script_that_mpirun_has_started_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    ranks = {f"OMPI_COMM_WORLD_{name}": value for name, value in
             {"RANK": "0", "SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}.items()}  # fmt: skip
    script = written(tmp_path, "import os\nraise KeyError(os.environ['RANK'] + ' of ' + os.environ['WORLD_SIZE'])\n")
    ((code, said),) = run_ranks(ended, 1, script=script, environment=ranks)
    assert code == 1
    assert "Traceback" in said and said.endswith("KeyError: '0 of 1'\n")


def left(placement: Placement, script: str, codes: list[int]) -> list[int]:
    """What this package makes of the exit codes of a script."""
    from phalanx.compat import run

    found = []
    for code in codes:
        try:
            found.append(run.run_rank(replace(placement, store=None), script, [str(code)], launched=run.LaunchInfo()))
        except SystemExit as leaving:
            found.append(int(leaving.code or 0))
        sys.path.pop(0)
    return found


def test_an_exit_code_of_a_script_is_not_taken_for_one_of_ours(tmp_path: Path) -> None:
    """10 and 11 would say that it was asked to stop, or had no memory."""
    script = written(tmp_path, "import sys\nraise SystemExit(int(sys.argv[1]))\n")
    assert run_ranks(left, 1, script=script, codes=[0, 2, 7, 10, 11]) == [[0, 2, 7, 1, 1]]
