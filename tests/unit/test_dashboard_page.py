"""The live page in a real browser: one life of a run, with a death, a log, a comparison and hostile text."""

import functools
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.dashboard import BROWSER, DRIVER, browsing, serving
from phalanx.core.run_paths import RunPaths
from phalanx.report.gpu_samples import gpu_samples_path
from tests.unit.test_run_index import append, write_life

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"

pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="there is no chromium with its driver")


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The dashboard as a user starts it, over two runs."""
    for name, seed in (("first", 1), ("second <b>", 2)):
        paths = RunPaths(tmp_path / "runs" / name)
        paths.log(1, 0).parent.mkdir(parents=True)
        for path, record in write_life(paths, seed, steps=60)[:-1]:
            append(path, record)
        append(paths.events, {"kind": "warning", "time": time.time(), "attempt": 1, "message": HOSTILE})
        paths.config.write_text(f"train:\n  steps: {100 * seed}\n  seed: 3\nmodel:\n  preset: '{HOSTILE}'\n")
        for node, before_s in enumerate((5000, 0)):
            gpus = [{"index": 0, "name": "H100", "temperature_c": 50}]
            line = {"time": time.time() - before_s, "host": f"n{node}", "gpus": gpus}
            append(gpu_samples_path(paths, node), line)
        paths.log(1, 0).write_text(f"begin\n{HOSTILE}\n\x1b[31mError: it died\x1b[0m\n" + "step\n" * 400)
    with serving(tmp_path / "runs", tmp_path / "dashboard.txt", "--allow-actions") as server:
        yield server.url
        os.kill(server.command.pid, signal.SIGINT)
        wait(server.command.over, "the server's end")
        said = server.command.output.read_text()
        assert "Traceback" not in said and "/static" not in said, said


@pytest.fixture
def page(address: str) -> Iterator[Any]:
    with browsing() as driver:
        driver.get(address)
        yield driver
        assert driver.title != "owned"
        assert [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []


def wait(found: Callable[[], Any], what: str) -> Any:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if value := found():
            return value
        time.sleep(0.05)
    raise AssertionError(f"not seen: {what}")


def test_a_life_of_a_run_in_a_browser(page: Any, tmp_path: Path) -> None:
    def text() -> str:
        return page.execute_script("return document.getElementById('main').innerText")

    def press(key: str) -> None:
        made = "new KeyboardEvent('keydown', {key: arguments[0], bubbles: true})"
        page.execute_script(f"document.body.dispatchEvent({made})", key)

    def count(selector: str) -> int:
        return page.execute_script("return document.querySelectorAll(arguments[0]).length", selector)

    assert page.execute_script("return [7, 999, 1234, 1000000].map(count)") == ["7", "999", "1,234", "1,000,000"]
    # all runs, found by their names as text
    wait(lambda: "first" in text() and "second <b>" in text(), "both runs")
    assert count("tbody tr") == 2 and count("#main b") == 0
    page.execute_script("document.getElementById('filter').value = 'fir'; filter.dispatchEvent(new Event('input'))")
    wait(lambda: count("tbody tr") == 1, "the filtered list")
    press("Enter")
    wait(lambda: count(".plot canvas") >= 10, "the charts of a run")
    drawn = (
        "const c = document.querySelector('#plot-loss canvas'); "
        "return [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data].some((value) => value > 0)"
    )
    wait(lambda: page.execute_script(drawn), "a drawn curve")

    # a death and a recovery come in
    paths = RunPaths(tmp_path / "runs" / "first")
    now = time.time()
    append(paths.events, {"kind": "worker_died", "time": now, "attempt": 90, "rank": 1, "signal": "SIGKILL"})
    append(paths.events, {"kind": "restarted", "time": now + 0.1, "attempt": 91})
    loads = {"layers": [0, 2], "load": [[0.5, 1.5, 1.0], [3.0, 0.0, 0.0]]}
    evaluated = {"kind": "evaluated", "time": now + 0.2, "attempt": 91, "step": 57, "set": "held_out", "loss": 2.0}
    append(paths.events, evaluated | {"tokens": 9, "seconds": 0.1, "experts": loads})
    began = time.monotonic()
    record = {"step": 58, "attempt": 91, "loss": 1.2345, "step_s": 0.1, "time": now + 0.5, "tokens_per_s": 10.0}
    append(paths.metrics, record)
    wait(lambda: "1.2345" in text(), "the newest loss")
    assert time.monotonic() - began < 20  # docs/runs.md has the figure of an idle machine
    wait(lambda: "training resumed with step 58" in text(), "the incident")
    assert HOSTILE in text()  # as text
    wait(lambda: "the busiest has 3.00 times the mean" in text(), "the load of experts")
    alphas = (
        "const c = document.querySelector('.scroll > canvas').getContext('2d'); "
        "return [[6, 6], [18, 6], [6, 18], [18, 18]].map(([x, y]) => c.getImageData(x, y, 1, 1).data[3])"
    )
    assert page.execute_script(alphas) == [pytest.approx(255 * part, abs=2) for part in (1 / 6, 1 / 2, 1, 0)]

    # each GPU with the times of its own samples
    sampled = (
        "const cards = [...document.querySelectorAll('section')];"
        "const card = cards.find((each) => each.querySelector('h3')?.textContent === 'GPUs');"
        "return [...card.querySelectorAll('tbody tr')].map((row) => row.lastChild.textContent)"
    )
    assert len(set(page.execute_script(sampled))) == 2

    # by time, and back
    press("t")
    assert page.execute_script("return mode") == "time"
    press("t")

    # its log: searched, and followed
    press("l")
    wait(lambda: "Error: it died" in text() and HOSTILE in text(), "the log")
    assert "\x1b" not in text() and count("#main img") == 0
    with open(paths.log(1, 0), "a", encoding="utf-8") as file:
        file.write("a line that came later\n")
    wait(lambda: "a line that came later" in text(), "a line that is followed")
    paths.log(1, 1).touch()  # of a rank that has just begun
    page.execute_script("location.hash += '/attempt-001%2Frank-00001.log'")
    wait(lambda: "This log is empty." in text(), "an empty log")
    for part in ("first half, ", "second half\n"):
        with open(paths.log(1, 1), "a", encoding="utf-8") as file:
            file.write(part)
        wait(functools.partial(lambda part: part.strip() in text(), part), "a line that grows")
    assert "first half, second half" in text() and "This log is empty." not in text()
    page.execute_script("location.hash = location.hash.replace(/.attempt.*/, '')")
    wait(lambda: "a line that came later" in text(), "the log of before")

    # its configuration
    press("o")
    wait(lambda: "Resolved configuration" in text() and "steps: 100" in text(), "the configuration")
    assert count(".tabs a") == 3 and "first" in text()
    press("l")
    wait(lambda: "a line that came later" in text(), "the log again")
    page.execute_script("filter.value = 'IT DIED'; filter.dispatchEvent(new Event('input'))")
    wait(lambda: count(".text mark") == 1, "the line that is searched")

    # two runs side by side
    ids = json.loads(page.execute_script("return JSON.stringify(store.runs.map((run) => run.id))"))
    page.execute_script("location.hash = '#/compare/' + arguments[0].join(',')", ids)
    wait(lambda: "train.steps" in text() and "Comparison of 2 runs" in text(), "the differences of two recipes")
    wait(lambda: "train.seed" not in text(), "the recipe of the second run, which has the same seed")
    assert count(".plot") >= 3

    # two of one name are called by their folders, and one of them is switched off: its points and their smoothed curve
    same = (
        "store.runs = store.runs.map((run) => ({ ...run, name: 'same' }));"
        "for (const [i, folder] of ['/x/a/same', '/x/b/same'].entries()) of(page.ids[i]).facts.folder = folder;"
        "page.key = ''; page.update(); document.querySelector('.keys button').click();"
        "const off = page.curves({ id: 'loss', column: 'smooth' }).filter((each) => each.off);"
        "const named = [...document.querySelector('.keys').children].map((each) => each.textContent);"
        "return [named, off.map((each) => each.name)]"
    )
    assert page.execute_script(same) == [["a/same", "b/same"], ["a/same"] * 2]

    # a run that is not there, or not running, cannot be stopped; narrow and dark pages fit
    page.execute_script("location.hash = '#/run/0123456789ab'")
    wait(lambda: "its folder was moved or removed" in text(), "that a run is gone")
    assert count("button:disabled") == 2
    page.execute_script("location.hash = '#/run/' + arguments[0]", ids[0])
    for features in ([], [{"name": "prefers-color-scheme", "value": "dark"}]):
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        page.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {"width": 380, "height": 900, "deviceScaleFactor": 1, "mobile": True}
        )
        wait(lambda: count(".plot canvas") >= 10, "the charts")
        wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.execute_script(wide) <= 0
    dark = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", dark)[:3])) < 100
