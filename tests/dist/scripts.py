"""Scripts of users on forked ranks, as `phalanx run` would start them."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

from phalanx.core.placement import Placement
from tests.helpers import ROOT, run_ranks

EXAMPLES = ROOT / "examples" / "sagemaker"


def run_script(placement: Placement, script: str, arguments: list[str], settings: str | None = None) -> str:
    """What a rank of the script prints."""
    from phalanx.compat import run

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run.run_rank(placement, script, arguments, settings, launched=run.LaunchInfo())
    return out.getvalue()


def example(name: str, world: int, *arguments: str, **options: Any) -> str:
    """What rank 0 of an example prints."""
    script = str(EXAMPLES / f"{name}.py")
    printed: list[str] = run_ranks(
        run_script, world, timeout_s=200, script=script, arguments=list(arguments), **options
    )
    return printed[0]


def written(folder: Path, text: str) -> str:
    """A script of these lines."""
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def losses(printed: str) -> list[float]:
    return [float(value) for value in re.findall(r"^step \d+ loss (\S+)$", printed, re.M)]
