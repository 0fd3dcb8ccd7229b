"""Pages in a headless browser, where this machine has one: what became of them, and what it complained of."""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# Bokeh draws inside shadow roots, which a dump of the page leaves out, so the curves are counted in the page.
COUNT = """<script>
const roots = (node) => [node, ...[...node.querySelectorAll("*")].filter((each) => each.shadowRoot)
  .flatMap((each) => roots(each.shadowRoot))];
const paths = (plot) => roots(plot)
  .flatMap((root) => [...root.querySelectorAll("path[fill=none][stroke-linejoin=round]")]);
setInterval(() => {
  for (const plot of document.querySelectorAll(".plot")) {
    plot.dataset.curves = paths(plot).filter((path) => path.getAttribute("d").includes("L")).length;
  }
}, 200);
</script>"""


class Seen(NamedTuple):
    """A page after its scripts have run: its elements, and what stands in the browser's console."""

    page: str
    console: list[str]


def look(path: Path, width: int = 1300, script: str = "") -> Seen:
    """Open a file in the browser, in a window so many pixels wide, without any network; `script` runs in the page."""
    assert BROWSER, "there is no browser"
    with tempfile.TemporaryDirectory(prefix="phalanx-browser-", ignore_cleanup_errors=True) as profile:
        page = Path(profile, path.name)
        added = f"{COUNT}<script>{script}</script></body>"
        page.write_text(path.read_text(encoding="utf-8").replace("</body>", added), encoding="utf-8")
        options = [
            "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", f"--window-size={width},2400",
            "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=30000", "--enable-logging=stderr",
        ]  # fmt: skip
        command = [BROWSER, *options, "--dump-dom", page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return Seen(done.stdout, re.findall(r"CONSOLE[:(]\d+\)?\] (.*)", done.stderr))


def curves(seen: Seen) -> dict[str, int]:
    """How many curves each chart of a report shows; single points are not counted."""
    found = re.findall(r'class="plot" id="plot-(\w+)" data-curves="(\d+)"', seen.page)
    return {chart: int(number) for chart, number in found}
