"""Pages in a headless browser, where this machine has one: what became of them, and what it complained of."""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Seen(NamedTuple):
    """A page after its scripts have run: its elements, and what stands in the browser's console."""

    page: str
    console: list[str]


def look(path: Path, width: int = 1300) -> Seen:
    """Open a file in the browser, in a window so many pixels wide, without any network."""
    assert BROWSER, "there is no browser"
    with tempfile.TemporaryDirectory(prefix="phalanx-browser-", ignore_cleanup_errors=True) as profile:
        options = [
            "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", f"--window-size={width},2400",
            "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=30000", "--enable-logging=stderr",
        ]  # fmt: skip
        command = [BROWSER, *options, "--dump-dom", path.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return Seen(done.stdout, re.findall(r"CONSOLE[:(]\d+\)?\] (.*)", done.stderr))


def curves(seen: Seen) -> dict[str, int]:
    """How many curves each chart of a report shows; lines in a legend are not counted."""
    charts = re.split(r'class="plot[^"]*" id="plot-', seen.page)[1:]
    return {
        chart.partition('"')[0]: len(re.findall(r'<path class="js-line"[^>]* d="M[^"]*L', chart)) for chart in charts
    }
