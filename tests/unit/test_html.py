import base64
import gzip
import html.parser
import itertools
import json
import os
import random
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import RunError
from phalanx.core.json_lines import append_line
from phalanx.core.records import EventKind, StepRecord
from phalanx.core.run_paths import RunPaths
from phalanx.report import html as report
from phalanx.report.charts import build_charts
from phalanx.report.history import read_run_history
from tests import browser


def step(number: int, attempt: int = 1, **changes: Any) -> dict[str, Any]:
    record = StepRecord(
        step=number, attempt=attempt, loss=5.0 - number / 100, grad_norm=1.0, lr=1e-3, tokens=1000,
        total_tokens=1000 * number, step_s=0.5, tokens_per_s=2000.0, wait_s=0.1, comm_bytes=0, data_s=0.05,
        mfu=None, mfu_causal=None,
        memory_bytes=2**30, time=1000.0 + number + 100 * (attempt - 1),
    )  # fmt: skip
    return {**asdict(record), **changes}


def make_run(folder: Path) -> RunPaths:
    """A run that dies after step 12, resumes at 10 and ends at 20."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = RunPaths(folder)
    for number in range(1, 13):
        append_line(paths.metrics, step(number))
    for number in range(11, 21):
        append_line(paths.metrics, step(number, 2))
    events: list[dict[str, Any]] = [
        {
            "kind": EventKind.RUN_STARTED,
            "attempt": 1,
            "time": 1000.0,
            "parameters": 12_400_000,
            "world": 2,
            "device": "cpu",
        },
        {"kind": EventKind.CHECKPOINT_SAVED, "attempt": 1, "time": 1010.5, "step": 10, "bytes": 10, "seconds": 1},
        {"kind": EventKind.WORKER_DIED, "attempt": 1, "time": 1012.5, "rank": 1, "pid": 77, "signal": 9},
        {"kind": EventKind.WORKER_DIED, "attempt": 1, "time": 1012.6, "rank": 0, "pid": 76, "exit_code": 1},
        {"kind": EventKind.RESTARTED, "attempt": 2, "time": 1013.0},
        {"kind": EventKind.RESUMED, "attempt": 2, "time": 1014.0, "step": 10},
        {"kind": EventKind.EVALUATED, "attempt": 2, "time": 1120.0, "step": 20, "loss": 2.0, "tokens": 5},
        {"kind": EventKind.FINISHED, "attempt": 2, "time": 1121.0, "step": 20, "seconds": 121},
    ]
    for event in events:
        append_line(paths.events, event)
    paths.config.write_text("model:\n  preset: tiny\ntrain:\n  steps: 20\n")
    paths.versions.write_text(json.dumps({"torch": "2.13.0"}))
    return paths


class Page(html.parser.HTMLParser):
    """The tags of a page, the text people see, and the embedded data."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = self.raw_data = self.drawing = ""
        self.inside: tuple[str, dict[str, str | None]] = ("", {})
        self.source = path.read_text(encoding="ascii")
        self.feed(self.source)
        self.data = json.loads(self.raw_data, parse_constant=_refuse)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = (tag, dict(attrs))
        self.tags.append(self.inside)

    def handle_endtag(self, tag: str) -> None:
        self.inside = ("", {})

    def handle_data(self, data: str) -> None:
        if self.inside[1].get("id") == "data":
            self.raw_data += data
        elif self.inside[1].get("id") == "bokeh":
            self.drawing += data
        elif self.inside[0] not in ("script", "style"):
            self.text += data + " "


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def test_report_of_a_run_with_a_death(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "night-run")
    assert report.write_report(paths) == paths.report
    page = Page(paths.report)
    for words in ("night-run", "finished", "12.4M parameters", "2 ranks", "tiny", "perplexity 7.4", "of 20"):
        assert words in page.text
    assert "rank 1 (pid 77) was killed by SIGKILL after step 12" in page.text
    assert "training resumed with step 11 after 1 min 38 s, 2 steps replayed" in page.text  # 1112 s - 1012.5 s
    assert page.text.count("replayed") >= 2
    assert page.data["kept"]["step"] == list(range(1, 21))
    assert page.data["kept"]["attempt"] == [1] * 10 + [2] * 10
    assert page.data["lost"]["step"] == [11, 12]
    assert page.data["lost"]["attempt"] == [1, 1]
    [held_out] = page.data["heldOut"]
    assert (held_out["name"], held_out["loss"], held_out["step"]) == ("held-out", [2.0], [20])
    assert "<h3>Evaluations</h3>" not in page.text
    marks = [(mark["class"], mark["step"]) for mark in page.data["events"]]
    assert marks == [("saved", 10), ("died", 12), ("died", 12), ("restarted", 12), ("resumed", 10)]
    assert page.data["kept"]["compute_s"][0] == pytest.approx(0.35)


def test_the_mean_speed_counts_all_tokens_as_its_curve_does(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for number in (1, 2):  # of a chat few tokens are learnt
        append_line(paths.metrics, step(number, tokens=7, tokens_per_s=1000.0 * number, step_s=3.0 / number))
    assert "<dt>mean speed</dt><dd>1.33k</dd>" in Page(report.write_report(paths)).source


def test_a_run_with_adapters_says_how_small_they_are(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    append_line(paths.events, {"kind": EventKind.RUN_STARTED, "time": 1.0, "parameters": 8e9, "trainable": 42_000_000})
    text = Page(report.write_report(paths)).text
    assert text.count("8B parameters and 42M in adapters") == 2  # in the header and in the event


def test_report_opens_offline(tmp_path: Path) -> None:
    page = Page(report.write_report(make_run(tmp_path)))
    assert not [tag for tag, attributes in page.tags if "src" in attributes or "href" in attributes]
    policy = [attributes.get("content") or "" for tag, attributes in page.tags if tag == "meta"]
    assert any("default-src 'none'" in content for content in policy)
    assert gzip.decompress(base64.b64decode(page.drawing)).startswith(b"'use strict';\n/*!\n * Copyright (c) Anaconda")


# What a reader does once the charts are there: points into the chart of losses by time, and then by steps. What the box
# tells is noted at the page's end.
POINT = """
const wait = setInterval(() => {
  const plot = document.getElementById("plot-loss");
  if (!Number(plot.dataset.curves)) return;
  clearInterval(wait);
  const tell = (mode, place, then) => {
    document.querySelector(`[data-mode=${mode}]`).click();
    setTimeout(() => {
      const { left, top, width } = plot.getBoundingClientRect();
      const clientX = left + 46 + place * (width - 58);
      plot.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY: top + 100 }));
    }, 2000);
    setTimeout(() => {
      const noted = document.body.appendChild(document.createElement("pre"));
      noted.textContent = mode + document.querySelector(".tip").innerHTML.replace(/<[^>]*>/g, "|");
      then?.();
    }, 3000);
  };
  tell("time", 0.1045, () => tell("step", 0.577));  // of 120 seconds, and of steps 1 to 20
}, 100);
"""


@pytest.mark.skipif(browser.BROWSER is None, reason="needs chromium")
def test_every_chart_has_its_curves_and_one_box_tells_all_values_of_a_step(tmp_path: Path) -> None:
    """In a browser that complains of nothing; and what happened there."""
    seen = browser.look(report.write_report(make_run(tmp_path)), script=POINT)
    assert seen.console == []
    assert browser.curves(seen) == {"loss": 3, "speed": 2, "time": 3, "memory": 1, "lr": 2, "norm": 2}
    assert seen.page.count('class="rule"') == 6  # the step is marked in every chart
    by_time, at_death = re.findall("<pre>(?:time|step)(.*?)</pre>", seen.page, re.S)
    for words in (
        "|step 12|",
        "|train|",
        "|train, smoothed|",
        "|train, lost|",
        "|4.88|",
        "|rank 1 (pid 77) was killed by",
    ):
        assert words in at_death
    assert "resumed" not in at_death
    assert "|step 12, after 12 s|" in by_time and "|train, lost|" in by_time and "|train|" not in by_time
    assert "|rank 1 (pid 77) was killed by" in by_time


def test_text_of_a_run_cannot_become_markup(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "<script>alert(1)<")
    evil = "</script><script>alert(2)</script><img src=x onerror=alert(3)> @@bokeh@@ é漢"
    append_line(paths.events, {"kind": "worker_died", "attempt": 2, "time": 1122.0, "rank": 0, "reason": evil})
    append_line(paths.events, {"kind": "warning", "attempt": 2, "time": "soon", "message": evil})
    paths.config.write_text(f"model: {{preset: '{evil}'}}\n", encoding="utf-8")
    paths.versions.write_text(json.dumps({evil: evil}))
    page = Page(report.write_report(paths))
    assert [tag for tag, _ in page.tags].count("script") == 3  # data, Bokeh, ours
    assert "img" not in [tag for tag, _ in page.tags]
    assert page.text.count(evil) >= 5
    assert "<script>alert(1)<" in page.text


@pytest.mark.parametrize("count", [0, 1])
def test_a_run_that_hardly_began(tmp_path: Path, count: int) -> None:
    paths = RunPaths(tmp_path)
    append_line(paths.events, {"kind": "run_started", "attempt": 1, "time": 1.0})
    for number in range(1, count + 1):
        append_line(paths.metrics, step(number, grad_norm=None, wait_s=None))
    page = Page(report.write_report(paths))
    plots = [attributes["id"] for _, attributes in page.tags if attributes.get("class") == "plot"]
    assert plots == (["plot-loss", "plot-speed", "plot-time", "plot-memory", "plot-lr"] if count else [])
    assert ("No steps recorded yet" in page.text) == (count == 0)


def test_numbers_that_are_none_are_left_out(tmp_path: Path) -> None:
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for number, loss in ((1, float("nan")), (2, float("inf")), (3, 4.0)):
            file.write(json.dumps(step(number, loss=loss)) + "\n")
    data = Page(report.write_report(RunPaths(tmp_path))).data
    assert data["kept"]["loss"] == [None, None, 4.0]


def charts(folder: Path, *records: dict[str, Any]) -> dict[str, dict[str, Any]]:
    folder.mkdir()
    for record in records:
        append_line(RunPaths(folder).metrics, record)
    return {chart["id"]: chart for chart in build_charts(read_run_history(RunPaths(folder)))}


def test_charts_follow_the_numbers(tmp_path: Path) -> None:
    plain = charts(tmp_path / "plain", *(step(number) for number in range(1, 50)))
    assert "mfu" not in plain
    assert not plain["norm"]["log"]
    assert plain["time"]["top"] is None
    first = step(1, step_s=30.0, grad_norm=99.0, mfu=0.5)
    uneven = charts(tmp_path / "uneven", first, *(step(number, mfu=0.5) for number in range(2, 50)))
    assert uneven["norm"]["log"]
    assert uneven["time"]["top"] == pytest.approx(0.55)
    assert "30.0 s" in uneven["time"]["note"]
    assert "mfu" in uneven


def test_a_long_run_stays_a_small_page(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    draw = random.Random(0).random
    steps = (*range(1, 4001), *range(2501, 5001))  # the first attempt's last 1500 were lost
    with open(paths.metrics, "w") as file:
        for at, number in enumerate(steps):
            busy = {"shares": [4] * 6, "busy_s": [draw() for _ in range(6)]}
            many = {key: draw() for key in ("grad_norm", "lr", "step_s", "tokens_per_s", "wait_s", "data_s", "mfu")}
            loss = 9.0 if number == 3777 else 2.0 + draw()
            file.write(json.dumps(step(number, 1 + (at >= 4000), loss=loss, **busy, **many)) + "\n")
    with open(paths.events, "w") as file:
        for number in range(3000):
            event = {"kind": EventKind.CHECKPOINT_SAVED, "attempt": 1, "time": 1000.0 + number, "step": number}
            file.write(json.dumps(event | ({"kind": EventKind.WORKER_DIED, "rank": 3} if number == 40 else {})) + "\n")
    page = Page(report.write_report(paths))
    assert len(page.data["kept"]["step"]) <= 2010
    assert 3777 in page.data["kept"]["step"]  # a spike is never thinned away
    assert paths.report.stat().st_size < 1_500_000  # of which what draws the curves is 0.5
    assert "The newest 1,000 of 3,000; all are in events.jsonl." in page.text
    assert [mark["class"] for mark in page.data["events"]] == ["died"]


def test_marks_of_one_step_stand_apart(tmp_path: Path) -> None:
    page = Page(report.write_report(make_run(tmp_path)))
    heights = dict(re.findall(r"^  (\w+): \{ symbol: .*? height: ([\d.]+)", page.source, re.M))
    assert heights.keys() >= {mark["class"] for mark in page.data["events"]}
    ordered = sorted(map(float, heights.values()))
    assert min(high - low for low, high in itertools.pairwise(ordered)) >= 0.058  # of a plot of 175 pixels: a mark's
    crossing = [(mark["class"], mark["step"]) for mark in page.data["events"] if mark["crosses"]]
    assert crossing == [("died", 12), ("died", 12)]  # a line for the death, none on it for what follows


def test_values_of_auto_are_folded_away(tmp_path: Path) -> None:
    paths = make_run(tmp_path)
    append_line(
        paths.events, {"kind": EventKind.AUTO_RESOLVED, "attempt": 1, "time": 1000.1, "key": "optim.lr", "value": 0.125}
    )
    source = Page(report.write_report(paths)).source
    events, folded = source.index("<h3>Events</h3>"), source.index("<summary>Values of <code>auto</code>")
    assert source.count("optim.lr = 0.125") == 1 and events < folded < source.index("optim.lr = 0.125")
    assert "<details open" not in source[folded - 40 : folded]


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    paths = make_run(tmp_path)
    paths.report.mkdir()
    (paths.report / "in-the-way").touch()
    with pytest.raises(RunError, match=r"cannot write the report .*report\.html .*; make the folder writable"):
        report.write_report(paths)
    assert sorted(os.listdir(paths.report)) == ["in-the-way"]


def test_script_is_ascii(tmp_path: Path) -> None:
    assert re.fullmatch(r"[\x00-\x7f]+", report.to_script({"text": "é漢</script>"}))
    assert "</" not in report.to_script({"text": "</script>"})


def test_each_set_that_is_evaluated_on_has_a_curve_a_tile_and_a_row(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "sets")
    for step, name, loss in ((10, "a<b", 3.0), (10, "held_out", 3.5), (20, "a<b", 4.0), (10, "a<b", 2.5)):
        event = {
            "kind": EventKind.EVALUATED,
            "attempt": 2,
            "time": 1121.0,
            "step": step,
            "set": name,
            "loss": loss,
            "tokens": 9,
        }
        append_line(paths.events, event)
    report.write_report(paths)
    page = Page(paths.report)
    curves = {curve["name"]: (curve["step"], curve["loss"]) for curve in page.data["heldOut"]}
    assert curves == {"held-out": ([10, 20], [3.5, 2.0]), "a<b": ([10, 20], [2.5, 4.0])}
    for words in ("held-out loss", "a<b loss", "perplexity 7.4", "perplexity 54.6", "Evaluations"):
        assert words in page.text
    assert "2.5000 at step 10" in page.text
    assert "a<b" not in paths.report.read_text().split("<script")[0]


def test_ranges_of_fp8_are_a_table(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run")
    event = {"kind": EventKind.EVALUATED, "attempt": 2, "time": 1120.5, "step": 20, "loss": 2.0, "tokens": 5}
    append_line(paths.events, event | {"fp8": {"largest": [40.0, 6.5], "zero": [0.0, 0.00125]}})
    text = " ".join(Page(report.write_report(paths)).text.split())
    assert "0 40 0.000%" in text and "1 6.5 0.125%" in text
    append_line(paths.events, event | {"fp8": {"largest": ["<b>"], "zero": 3}})
    assert "FP8 products" not in Page(report.write_report(paths)).text


def test_loads_of_experts_are_a_heat_map(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run")
    event = {"kind": EventKind.EVALUATED, "attempt": 2, "time": 1120.5, "step": 20, "loss": 2.0, "tokens": 5}
    append_line(paths.events, event | {"experts": {"layers": [0, 2], "load": [[0.5, 1.5, 1.0], [3.0, 0.0, 0.0]]}})
    append_line(paths.events, event | {"step": 30, "set": "second"})  # of two sets the first has it
    text = report.write_report(paths).read_text()
    assert text.count("<rect") == 6 and "<title>layer 2, expert 0: 3.00 times the mean</title>" in text
    assert "the busiest has 3.00 times the mean, the idlest 0.00" in text


@pytest.mark.parametrize(
    "experts",
    [3, {"layers": [0]}, {"layers": [0], "load": [["<b>"]]}, {"layers": ["<b>"], "load": [[1.0]]},
     {"layers": [0, 1], "load": [[1.0], [1.0, 1.0]]}, {"layers": [], "load": []}, {"layers": [0], "load": [[]]}],
)  # fmt: skip
def test_a_damaged_load_of_experts_is_left_out(experts: Any, tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run")
    event = {"kind": EventKind.EVALUATED, "attempt": 2, "time": 1120.5, "step": 20, "loss": 2.0, "tokens": 5}
    append_line(paths.events, event | {"experts": experts})
    assert "Load of experts" not in report.write_report(paths).read_text()


def test_a_node_that_was_lost_is_an_incident_where_ranks_had_to_start_again(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for number in range(1, 6):
        append_line(paths.metrics, step(number))
    lost = {"kind": EventKind.NODE_LOST, "node": 1, "host": "n1", "reason": "it closed the connection"}
    events: list[dict[str, Any]] = [
        {"kind": EventKind.RUN_STARTED, "attempt": 1, "time": 1000.0},
        {**lost, "attempt": 1, "time": 1005.5},
        {"kind": EventKind.RESTARTED, "attempt": 2, "time": 1006.0},
        {**lost, "attempt": 2, "time": 1007.0, "node": 3},  # a spare: then the ranks are divided anew for a user
        {"kind": EventKind.RESTARTED, "attempt": 3, "time": 1008.0, "reason": "node 0 will be drained"},
    ]
    for event in events:
        append_line(paths.events, event)
    report.write_report(paths)
    page = paths.report.read_text()
    assert "<dt>incidents</dt><dd>1</dd>" in page
    assert page.count("<li><b>node 1 (n1) was lost: it closed the connection</b>") == 1
