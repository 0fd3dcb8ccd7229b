"""The live page over many runs: first picture, delay, what it takes from training, and what its server takes.

    python3 benchmarks/dashboard.py [--quick] [--json FILE] [--browsers N] [--turns N]

A folder has one run of 10^6 steps and 99 of 10^4, with records as training writes them. Pages are opened by Chromium
(with its driver and Selenium), each first picture by a browser with an empty profile. Timed from the navigation until
the frame after the loss curve was drawn; of a server that was started just before, and of one that has read all runs.

*Behind* is the time from a record's write until the frame that shows it, of a run with a step every 0.43 s.
*Taken from training* compares steps of one `phalanx train`, by turns of a second, with the server at work, its page's
stream read by a client (a browser is mostly on another machine), and with the server halted. Training has one core for
itself. A step also writes its record, with and without a page, whose time is measured by itself.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Check, Row, at_most, machine, options, report, result, spread
from benchmarks.started import ROOT, Command, Run, Tail, children
from benchmarks.tidy import heeding_signals
from phalanx.config import load
from phalanx.core.json_lines import append_line
from phalanx.core.run_paths import RunPaths

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
STEP_S = 0.5  # of the runs that are written here
GROW_S = 0.43  # between steps of the run that grows: none that the server's polls are a multiple of
STEPS = 6  # of a turn of training with or without the page
ATTEMPTS = 20  # of the long run
PATIENCE_S = 240.0
RECIPE = """
model: {{hidden: 256, layers: 4, heads: 4, intermediate: 688}}
data: {{source: stdlib, tokenizer_vocab: 1024, seq_len: 128, cache: {cache}}}
train: {{steps: 1000000, global_batch: 4, micro_batch: 4, dtype: fp32, compile: false, eval_sequences: 0}}
checkpoint: {{every: 1000000}}
resilience: {{in_memory_checkpoints: false}}
report: {{tensorboard: false}}
"""
# Notes when the frame after the first curve is on the screen, in ms since the navigation began.
NOTE_PICTURE = """
const stroke = CanvasRenderingContext2D.prototype.stroke;
let drawn = false;
CanvasRenderingContext2D.prototype.stroke = function (...path) {
  stroke.apply(this, path);
  if (drawn || !this.canvas.matches("#plot-loss canvas, canvas.spark")) return;
  drawn = true;
  requestAnimationFrame(() => setTimeout(() => { window.pictureMs = performance.now(); }));
};
"""
# Notes the newest step of a run and when it was on the screen: charts are drawn a frame after they are asked to.
NOTE_STEPS = """
window.seen = [];
let last = -1;
const look = () => {
  const step = store.of.get(arguments[0])?.rows?.columns.step.at(-1) ?? last;
  const note = () => window.seen.push([step, Date.now() / 1e3]);
  if (step !== last) requestAnimationFrame(() => requestAnimationFrame(note));
  last = step;
  requestAnimationFrame(look);
};
look();
"""


# ------------------------------------------------------------------------------------------------------ what is opened


def write_run(paths: RunPaths, steps: int, over: bool, attempts: int = 1) -> None:
    """The records of a run whose last step is now, with a death before each further attempt."""
    paths.root.mkdir(parents=True)
    recipe = load.parse_yaml(RECIPE.format(cache=paths.root), "the recipe")
    paths.config.write_text(load.render_saved_recipe(load.build_config(recipe, "the recipe")))
    began = time.time() - STEP_S * steps
    started = {"steps": steps if over else 2 * steps, "world": 4, "device": "cuda", "device_names": ["NVIDIA H100"] * 4}
    append_line(paths.events, {"kind": "run_started", "time": began, "attempt": 1, **started, "hosts": ["node-1"]})
    for attempt in range(2, attempts + 1):
        first = steps * (attempt - 1) // attempts + 1
        at = {"time": began + STEP_S * first, "attempt": attempt - 1}
        append_line(paths.events, {"kind": "worker_died", **at, "rank": 1, "signal": "SIGKILL"})
        append_line(paths.events, {"kind": "restarted", **at, "attempt": attempt})
        append_line(paths.events, {"kind": "resumed", **at, "attempt": attempt, "step": first - 1})
    for step in range(steps // 10, steps + 1, max(1, steps // 200)):
        saved = {"time": began + STEP_S * step, "attempt": 1 + (step - 1) * attempts // steps, "step": step}
        append_line(paths.events, {"kind": "checkpoint_saved", **saved})
    if over:
        append_line(paths.events, {"kind": "finished", "time": time.time(), "attempt": 1, "step": steps})
    with open(paths.metrics, "w", encoding="ascii") as file:
        for step in range(1, steps + 1):
            file.write(record_line(step, 1 + (step - 1) * attempts // steps, began + STEP_S * step))


def record_line(step: int, attempt: int, moment: float) -> str:
    """A line of `metrics.jsonl`, as long as those of training on four devices."""
    wave = (step * 7919 % 1000) / 1e3
    return (
        f'{{"step": {step}, "attempt": {attempt}, "loss": {2 + 6 * 100 / (step + 100) + wave / 10!r}, "grad_norm": '
        f'{1 + wave!r}, "lr": 0.0003, "tokens": 262144, "total_tokens": {262144 * step}, "step_s": '
        f'{STEP_S * (0.9 + wave / 5)!r}, "tokens_per_s": {524288 - 1e5 * wave!r}, "data_s": 0.0012, "wait_s": '
        f'{wave / 20!r}, "comm_bytes": 1048576, "memory_bytes": 75161927680, "mfu": {0.4 + wave / 50!r}, "mfu_causal": '
        f'0.36, "time": {moment!r}, "skipped": false, "shares": [64, 64, 64, 40], "busy_s": [0.45, 0.45, 0.45, 0.3]}}\n'
    )


@dataclass
class Server:
    """A started `phalanx dashboard`, and its address with the token."""

    command: Command
    url: str

    def ids(self) -> dict[str, str]:
        """The runs' identifiers on the page, by name."""
        with urllib.request.urlopen(f"{self.url}stream", timeout=PATIENCE_S) as stream:
            while not (line := stream.readline()).startswith(b"data: ["):
                continue
        return {run["name"]: run["id"] for run in json.loads(line.partition(b" ")[2])}

    def settle(self) -> None:
        """Wait until it has read all records, and takes little time for a while."""
        until = time.monotonic() + PATIENCE_S
        quiet = 0
        while quiet < 3 and time.monotonic() < until:
            quiet = quiet + 1 if share_of_core([self.command.pid], 1.0) < 0.1 else 0


def begin(output: Path, *words: str) -> Command:
    """Start a command of `phalanx`, whose output goes to a file."""
    output.unlink(missing_ok=True)
    into = [(os.POSIX_SPAWN_OPEN, 1, str(output), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)]
    actions = [*into, (os.POSIX_SPAWN_DUP2, 1, 2)]
    environment, line = {**os.environ, "PYTHONPATH": str(ROOT)}, [sys.executable, "-m", "phalanx", *words]
    return Command(os.posix_spawn(sys.executable, line, environment, file_actions=actions, setsid=True), output)


@contextlib.contextmanager
def serving(runs: Path, output: Path, *words: str) -> Iterator[Server]:
    """A server of a folder of runs, as a user starts it, until the end of the block."""
    command = begin(output, "dashboard", str(runs), "--port", "0", *words)
    try:
        until = time.monotonic() + PATIENCE_S
        while (found := re.search(r"http://127\S+(?=\s)", output.read_text() if output.exists() else "")) is None:
            assert not command.over() and time.monotonic() < until, command.said()
            time.sleep(0.01)
        yield Server(command, found[0])
    finally:
        command.end()


@contextlib.contextmanager
def browsing(width: int = 1300, height: int = 1000) -> Iterator[Any]:
    """A headless Chromium with an empty profile, as Selenium's driver."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    how = webdriver.ChromeOptions()
    how.binary_location = str(BROWSER)
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        how.add_argument(word)
    how.add_argument(f"--window-size={width},{height}")
    how.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=how, service=Service(str(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()


def cpu_s(pids: Sequence[int]) -> float:
    """Processor time so far of processes and all that they have started."""
    total, found = 0, list(pids)
    for pid in found:
        found += children(pid)
        with contextlib.suppress(OSError):
            total += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return total * TICK_S


def share_of_core(pids: Sequence[int], seconds: float) -> float:
    """The part of one core that processes take over so many seconds."""
    before, began = cpu_s(pids), time.monotonic()
    time.sleep(seconds)
    return (cpu_s(pids) - before) / (time.monotonic() - began)


def until_true(found: Callable[[], Any], what: str) -> Any:
    until = time.monotonic() + PATIENCE_S
    while not (value := found()):
        assert time.monotonic() < until, f"not seen within {PATIENCE_S:g} s: {what}"
        time.sleep(0.02)
    return value


# ------------------------------------------------------------------------------------------------------- what is timed


def first_picture(server: Server, page: str) -> tuple[float, float, float]:
    """Seconds until a fresh browser shows a page; processor seconds of the browser and of the server until then."""
    with browsing() as driver:
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": NOTE_PICTURE})
        browser, own = [driver.service.process.pid], [server.command.pid]
        before = cpu_s(browser), cpu_s(own)
        driver.get(server.url + page)
        shown_ms = until_true(lambda: driver.execute_script("return window.pictureMs"), "the first picture")
        return shown_ms / 1e3, cpu_s(browser) - before[0], cpu_s(own) - before[1]


def measure_pictures(runs: Path, output: Path, browsers: int) -> list[Row]:
    """First pictures of the list and of the long run, by a server that was started just before and by one that has
    read all."""
    with serving(runs, output) as settled:
        settled.settle()
        pages = {"all runs": "", "the long run": f"#/run/{settled.ids()['long']}"}
        found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
        for _ in range(browsers):
            for what, page in pages.items():
                found.setdefault((what, "has read all"), []).append(first_picture(settled, page))
                with serving(runs, output.with_suffix(".fresh")) as fresh:
                    found.setdefault((what, "just started"), []).append(first_picture(fresh, page))
    rows: list[Row] = []
    for (what, server), times in sorted(found.items()):
        low, middle, high = spread([each[0] for each in times])
        browser_s, server_s = (statistics.median(each[place] for each in times) for place in (1, 2))
        row = {"first picture of": what, "server": server, "browsers": len(times), "seconds": middle}
        rows.append(row | {"quartiles": f"{low:.2f} .. {high:.2f}", "CPU s, browser": browser_s, "server, s": server_s})
    return rows


def weigh_page(server: Server, run: str) -> int:
    """Bytes of a run's page with all that it loads, and of its stream until the curves have come."""
    total = 0
    for path in ("", "app.css", "app.js"):
        with urllib.request.urlopen(server.url + path, timeout=PATIENCE_S) as answer:
            total += len(answer.read())
    with urllib.request.urlopen(f"{server.url}stream?runs={run}", timeout=PATIENCE_S) as stream:
        event = b""
        while not event.startswith(b"event: curves"):
            total += len(event := stream.readline())
        return total + len(stream.readline())


def grow(paths: RunPaths, ending: threading.Event, written: dict[int, float]) -> None:
    """Write a step every GROW_S, and note when."""
    step = 1  # there already
    while not ending.wait(GROW_S):
        line = json.loads(record_line(step := step + 1, 1, time.time()))
        append_line(paths.metrics, line)
        written[step] = time.time()


def measure_server(runs: Path, output: Path, seconds: float) -> tuple[list[Row], float, float, int]:
    """Rows of the server's memory and CPU; then how far behind a page is (median, longest), and the page's bytes."""
    rows: list[Row] = []

    def add(what: str) -> None:
        share = share_of_core([server.command.pid], seconds)
        status = Path(f"/proc/{server.command.pid}/status").read_text()
        (kib,) = re.findall(r"VmRSS:\s+(\d+)", status)
        rows.append({"server with": what, "CPU of a core": share, "MiB": int(kib) / 1024})

    ending, written = threading.Event(), dict[int, float]()
    with serving(runs, output) as server, browsing() as driver:
        server.settle()
        ids = server.ids()
        weight = weigh_page(server, ids["long"])
        add("no page")
        for number, name in enumerate(("long", "live", "run-1", "run-2", None)):
            driver.switch_to.new_window("window")
            driver.get(server.url + (f"#/run/{ids[name]}" if name else ""))
            if number == 1:
                watching = driver.current_window_handle
        time.sleep(3)
        add("5 pages")
        driver.switch_to.window(watching)
        assert driver.execute_script("return !document.hidden && stream !== null"), "pages in other windows are hidden"
        writer = threading.Thread(target=grow, args=(RunPaths(runs / "live"), ending, written))
        writer.start()
        try:
            driver.execute_script(NOTE_STEPS, ids["live"])
            add("5 pages, one run growing")
            seen = driver.execute_script("return window.seen")
        finally:
            ending.set()
            writer.join()
    behind = [at - written[step] for step, at in seen if step in written]
    assert len(behind) > 3, f"{len(behind)} updates were seen of {len(written)}"
    return rows, statistics.median(behind), max(behind), weight


def follow(url: str, ending: threading.Event) -> None:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as stream:
        any(ending.is_set() for _ in stream)


def measure_taken(folder: Path, turns: int) -> Row:
    """A real run, in turns with its page open and with the server halted: what a step takes longer."""
    cores = os.sched_getaffinity(0)
    own, others = {min(cores)}, cores - {min(cores)} or cores
    paths, recipe = RunPaths(folder / "trained" / "run"), folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(cache=folder / "cache"))
    os.sched_setaffinity(0, own)
    command = begin(folder / "train.txt", "train", str(recipe), "--run-dir", str(paths.root), "--ranks", "1")
    os.sched_setaffinity(0, others)  # for the server as well
    ending, spans = threading.Event(), []
    try:
        with Run(paths, {0: command}).ending() as run, contextlib.ExitStack() as held:
            run.reach(20)
            server = held.enter_context(serving(paths.root.parent, folder / "dashboard.txt"))
            (page,) = server.ids().values()
            client = threading.Thread(target=follow, args=(f"{server.url}stream?runs={page}", ending))
            client.start()
            server.settle()
            turn_s = STEPS * Tail(paths.metrics).read()[-1]["step_s"]
            for turn in range(2 * turns):
                open_ = turn % 4 in (0, 3)  # each way comes first as often as second
                os.kill(server.command.pid, signal.SIGCONT if open_ else signal.SIGSTOP)
                began = time.time()
                time.sleep(turn_s)
                spans.append((open_, began, time.time()))
            os.kill(server.command.pid, signal.SIGCONT)
            ending.set()
            client.join()  # at the next record
            records = Tail(paths.metrics).read()
    finally:
        os.sched_setaffinity(0, cores)
    times: dict[bool, list[float]] = {True: [], False: []}
    for open_, began, ended in spans:
        steps = [each["step_s"] for each in records if began + each["step_s"] < each["time"] < ended]
        times[open_].append(statistics.median(steps))
    low, middle, high = spread([with_ / without - 1 for with_, without in zip(times[True], times[False], strict=True)])
    return {"turns": turns, "ms of a step": 1e3 * statistics.median(times[False]), "taken by an open page": middle,
            "quartiles": f"{low:+.4f} .. {high:+.4f}", "ms to write a record": time_of_record(folder)}  # fmt: skip


def time_of_record(folder: Path) -> float:
    """Milliseconds to write a step's record; the median."""
    line, times = json.loads(record_line(1, 1, time.time())), []
    for _ in range(2000):
        began = time.perf_counter()
        append_line(folder / "records.jsonl", line)
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


# ------------------------------------------------------------------------------------------------------------ the whole


def measure(folder: Path, quick: bool, browsers: int, turns: int) -> tuple[list[Row], list[Check]]:
    runs = folder / "runs"
    write_run(RunPaths(runs / "long"), 100_000 if quick else 1_000_000, over=False, attempts=ATTEMPTS)
    for number in range(1, 20 if quick else 100):
        write_run(RunPaths(runs / f"run-{number}"), 1_000 if quick else 10_000, over=True)
    rows = list(measure_pictures(runs, folder / "dashboard.txt", browsers))
    pictures = [(f"{row['first picture of']}, server {row['server']}", row["seconds"]) for row in rows]
    write_run(RunPaths(runs / "live"), 1, over=False)
    server, behind_s, longest_s, weight = measure_server(runs, folder / "dashboard.txt", 10.0 if quick else 60.0)
    taken = measure_taken(folder, turns)
    rows += [*server, {"behind, s (median)": behind_s, "longest": longest_s, "first page, MB": weight / 1e6}, taken]
    writes = taken["ms to write a record"] / taken["ms of a step"]
    return rows, [
        *(at_most(f"first picture of {what}, s", seconds, 1.0) for what, seconds in pictures),
        at_most("behind, s (longest)", longest_s, 1.0),
        at_most("taken by an open page, of a step", taken["taken by an open page"], 0.002),
        at_most("taken by a record, of a step", writes, 0.002),
        at_most("memory of the server, MiB", max(row["MiB"] for row in server), 150),
        *(at_most(f"CPU of a core, {row['server with']}", row["CPU of a core"], 0.05) for row in server[:2]),
        at_most("weight of the first page, MB", weight / 1e6, 1.0),
    ]


def main() -> None:
    parser = options("First picture, delay and cost of the live page.")
    parser.add_argument("--browsers", type=int, help="fresh browsers for each first picture (default 9)")
    parser.add_argument("--turns", type=int, help="turns of training with the page open (default 250)")
    given = parser.parse_args()
    if not (BROWSER and DRIVER):
        parser.error("Chromium with its driver is needed: apt-get install chromium chromium-driver")
    with heeding_signals(), tempfile.TemporaryDirectory(prefix="phalanx-dashboard-") as name:
        browsers, turns = given.browsers or (1 if given.quick else 9), given.turns or (5 if given.quick else 250)
        rows, checks = measure(Path(name), given.quick, browsers, turns)
    report(result("dashboard", machine(None, 1), rows, checks), given.json)


if __name__ == "__main__":
    main()
