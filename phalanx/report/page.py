"""The page of a report: its markup, style and script. The numbers come from `html.py`; nothing is fetched.

Everything here is ASCII, and a content policy in the page forbids any request, so that it opens offline for good.
"""

import re


def render_page(**parts: str) -> str:
    """The page with its parts put in. Parts are put in once, so that text of a part never counts as a place of one."""
    return re.sub(r"@@(\w+)@@", lambda place: parts[place[1]], _PAGE)


_STYLE = """
:root { color-scheme: light dark;
  --back: #f4f5f7; --card: #ffffff; --ink: #171a21; --soft: #667085; --line: #e3e6eb; --grid: #eef0f3;
  --blue: #2f6fde; --orange: #d9730d; --teal: #0f8f7f; --violet: #7a5af8; --red: #d92d20; --green: #12905a;
  --amber: #b7791f; --grey: #98a2b3; }
@media (prefers-color-scheme: dark) { :root {
  --back: #0e1116; --card: #161b22; --ink: #e6e9ef; --soft: #8b95a5; --line: #272e38; --grid: #212832;
  --blue: #6ea8fe; --orange: #f5a55a; --teal: #4cc9b0; --violet: #a78bfa; --red: #ff6b61; --green: #4cc38a;
  --amber: #e3b341; --grey: #6b7686; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 28px 24px 48px; }
.brand { display: flex; align-items: flex-end; gap: 8px; color: var(--soft); font-size: 12px; letter-spacing: .08em;
  text-transform: uppercase; line-height: 1; }
.brand i { display: inline-flex; align-items: flex-end; gap: 2px; }
.brand b { width: 4px; border-radius: 1px; background: var(--blue); }
h1 { margin: 10px 0 2px; font-size: 28px; line-height: 1.25; font-weight: 650; overflow-wrap: anywhere; }
h2 { margin: 0; font-size: 17px; font-weight: 650; }
h3 { margin: 0 0 6px; font-size: 14px; font-weight: 650; }
h3 span, summary span { margin-left: 8px; color: var(--soft); font-weight: 400; font-size: 12.5px; }
.pill { display: inline-block; margin-left: 6px; padding: 3px 10px; border-radius: 99px; font-size: 13px;
  font-weight: 600; line-height: 1.3; vertical-align: 4px; color: var(--tone); border: 1px solid var(--tone); }
.good { --tone: var(--green); } .bad { --tone: var(--red); } .warn { --tone: var(--amber); }
.info { --tone: var(--blue); } .quiet { --tone: var(--soft); }
.facts { margin: 0 0 20px; color: var(--soft); }
.facts span { display: inline-block; } .facts span + span::before { content: "\\00b7"; margin: 0 8px; }
.tiles { display: flex; flex-wrap: wrap; gap: 1px; margin: 0; background: var(--line);
  border: 1px solid var(--line); border-radius: 12px; overflow: hidden; }
.tile { flex: 1 1 205px; background: var(--card); padding: 12px 16px 10px; }
.tile dt { color: var(--soft); font-size: 12.5px; }
.tile dd { margin: 1px 0 0; font-size: 22px; font-weight: 620; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile p { margin: 0; min-height: 19px; color: var(--soft); font-size: 12.5px; }
.incidents { list-style: none; margin: 16px 0 0; padding: 0; display: grid; gap: 8px; }
.incidents li { padding: 10px 16px; background: var(--card); border: 1px solid var(--line);
  border-left: 4px solid var(--red); border-radius: 8px; overflow-wrap: anywhere; }
.incidents b { font-weight: 600; } .incidents span { display: block; color: var(--soft); }
.bar { display: flex; flex-wrap: wrap; align-items: center; gap: 8px 18px; margin: 28px 0 12px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; color: var(--soft); font-size: 12.5px; }
.hint { margin-left: auto; color: var(--soft); font-size: 12.5px; }
.legend i { font-style: normal; font-weight: 700; margin-right: 5px; }
.switch { display: inline-flex; padding: 3px; background: var(--line); border-radius: 9px; }
.switch button { border: 0; padding: 4px 13px; border-radius: 7px; font: inherit; font-size: 13px; color: var(--soft);
  background: none; cursor: pointer; }
.switch button[aria-pressed=true] { background: var(--card); color: var(--ink); box-shadow: 0 1px 2px #0002; }
.grid { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); }
.card { min-width: 0; background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 14px 16px; }
.grid .wide, .grid .card:last-child:nth-child(even) { grid-column: 1 / -1; }
.plot { height: 250px; } .wide .plot { height: 350px; }
.below { display: grid; gap: 14px; margin-top: 14px; } .below .card { overflow: hidden; }
.empty { color: var(--soft); }
.scroll { max-height: 460px; overflow: auto; margin: 0 -16px -14px; border-top: 1px solid var(--line); }
.scroll:not(:last-child) { margin-bottom: 14px; }
table { width: 100%; border-collapse: collapse; font-size: 13px; }
td, th { padding: 6px 16px; text-align: left; vertical-align: top; border-bottom: 1px solid var(--grid); }
.events th { position: sticky; top: 0; background: var(--card); color: var(--soft); font-weight: 500; }
.events td { white-space: nowrap; font-variant-numeric: tabular-nums; color: var(--soft); }
.events td:last-child { width: 100%; min-width: 240px; white-space: normal; overflow-wrap: anywhere;
  color: var(--ink); }
.events .quiet td:last-child { color: var(--soft); }
.inside .warn td { color: var(--tone); font-weight: 600; }
.events i { display: inline-block; width: 20px; font-style: normal; font-weight: 700; color: var(--tone); }
.versions th { width: 1%; white-space: nowrap; font-weight: 500; color: var(--soft); }
summary { cursor: pointer; font-weight: 650; } details[open] summary { margin-bottom: 10px; }
pre { margin: 0 -16px -14px; padding: 12px 16px; border-top: 1px solid var(--line); overflow: auto; max-height: 560px;
  font: 12.5px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
footer { margin-top: 22px; color: var(--soft); font-size: 12.5px; }
@media (max-width: 560px) { main { padding: 18px 12px 32px; } h1 { font-size: 22px; } .tile { flex-basis: 40%; }
  .timed :is(td, th):is(:nth-child(2), :nth-child(3)) { display: none; } .hint { margin-left: 0; }
  td, th { padding: 6px 4px; font-size: 12px; } .inside td:not(:first-child, :nth-child(2)) { white-space: nowrap; }
  :is(td, th):first-child { padding-left: 12px; } .events td:last-child { min-width: 0; } }
"""

_SCRIPT = r"""
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const units = data.duration > 172800 ? [86400, "d"] : data.duration > 7200 ? [3600, "h"]
  : data.duration > 180 ? [60, "min"] : [1, "s"];
// each kind has a height of its own, so that what happens at the same step is seen side by side
const shapes = {
  died: { symbol: "x", color: "red", height: 0.97, word: "worker died", mark: "\u2717" },
  restarted: { symbol: "circle-open", color: "amber", height: 0.89, word: "restarted", mark: "\u25cb" },
  resumed: { symbol: "triangle-right", color: "violet", height: 0.81, word: "resumed", mark: "\u25b6" },
  stopped: { symbol: "square", color: "amber", height: 0.73, word: "stopped", mark: "\u25a0" },
  failed: { symbol: "x-thin-open", color: "red", height: 0.08, word: "checkpoint failed or refused", mark: "\u00d7" },
  skipped: { symbol: "diamond-open", color: "amber", height: 0.15, word: "step skipped", mark: "\u25c7" },
  saved: { symbol: "line-ns-open", color: "green", height: 0.012, word: "checkpoint saved", mark: "\u2758" },
};
let mode = "step";
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const veil = (name, alpha) => {
  const hex = color(name);
  return `rgba(${[1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(",")},${alpha})`;
};
const place = (columns) => (mode === "step" ? columns.step : columns.t.map((t) => (t === null ? null : t / units[0])));

// x, y and step of one column; a gap where an attempt ends, unless steps simply go on in the next one
// (a stacked area has no gaps: it goes down to zero and comes up again)
function points(columns, name, always, area) {
  const xs = place(columns), out = { x: [], y: [], step: [] };
  columns[name].forEach((y, i) => {
    const changed = i > 0 && columns.attempt[i] !== columns.attempt[i - 1];
    if (changed && (always || mode === "time")) {
      const hair = 1e-5 * (xs[i] - xs[i - 1]);
      out.x.push(xs[i - 1] + hair, xs[i] - hair);
      out.y.push(...(area ? [0, 0] : [null, null]));
      out.step.push(columns.step[i - 1], columns.step[i - 1]);
    }
    out.x.push(xs[i]); out.y.push(y); out.step.push(columns.step[i]);
  });
  return out;
}

function curve(chart, spec, lost) {
  const area = spec.style === "area", from = points(lost ? data.lost : data.kept, spec.column, lost, area);
  const few = from.x.length < 8, thin = spec.style === "faint";
  const name = lost ? spec.name + ", lost" : spec.name;
  const form = (chart.percent ? "%{y:.1%}" : "%{y:.4~g}") + (mode === "time" ? "  (step %{customdata})" : "");
  const width = spec.style === "bold" ? 2.4 : thin ? 1.1 : 1.6;
  return {
    type: "scatter", name, x: from.x, y: from.y, customdata: from.step, mode: few ? "lines+markers" : "lines",
    hovertemplate: form + "<extra>" + name + "</extra>", showlegend: !lost && chart.traces.length > 1,
    line: { color: veil(spec.color, lost ? 0.4 : thin ? 0.55 : 1), width: area ? 1 : width,
      dash: lost && !area ? "dot" : "solid" },
    ...(area ? { stackgroup: lost ? "lost" : "kept", fillcolor: veil(spec.color, lost ? 0.1 : 0.35) } : {}),
  };
}

function heldOut(set, number) {
  const tone = color(["orange", "violet", "teal", "green", "red"][number % 5]);
  const name = set.name.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/%/g, "&#37;");
  return { type: "scatter", name, x: place(set), y: set.loss,
    customdata: set.step, mode: "lines+markers", line: { color: tone, width: 1, dash: "dash" },
    marker: { size: 8, color: tone, line: { color: color("card"), width: 1.5 } },
    hovertemplate: "%{y:.4~g}" + (mode === "time" ? "  (step %{customdata})" : "") + "<extra>" + name + "</extra>" };
}

function marks() {
  return Object.entries(shapes).map(([kind, shape]) => {
    const events = data.events.filter((event) => event.class === kind);
    return { type: "scatter", mode: "markers", yaxis: "y2", name: shape.word, showlegend: false, cliponaxis: false,
      x: place({ step: events.map((e) => e.step), t: events.map((e) => e.t) }), y: events.map(() => shape.height),
      text: events.map((e) => e.text), hovertemplate: "%{text}<extra></extra>",
      marker: { symbol: shape.symbol, size: kind === "died" ? 10 : 8, color: color(shape.color),
        line: { color: color(shape.color), width: /open/.test(shape.symbol) ? 1.6 : 0 } } };
  }).filter((trace) => trace.x.length);
}

function lines() {
  const again = [...new Set(mode === "step" ? data.lost.attempt : [])].map((attempt) => {
    const steps = data.lost.step.filter((_, i) => data.lost.attempt[i] === attempt);
    return { type: "rect", x0: steps[0], x1: steps[steps.length - 1], y0: 0, y1: 1, yref: "paper", layer: "below",
      fillcolor: veil("violet", 0.09), line: { width: 0 } };
  });
  const crossing = data.events.filter((event) => event.crosses).map((event) => {
    const x = place({ step: [event.step], t: [event.t] })[0], shape = shapes[event.class];
    return { type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", layer: "below",
      line: { color: color(shape.color), width: 1.2, dash: event.class === "died" ? "solid" : "dot" } };
  });
  return [...again, ...crossing];
}

function span() {
  const all = [data.kept, data.lost, ...data.heldOut].flatMap(place).filter((x) => x !== null);
  if (mode === "time") all.push(...data.events.map((event) => event.t / units[0]));
  const low = all.reduce((a, b) => Math.min(a, b), Infinity), high = all.reduce((a, b) => Math.max(a, b), -Infinity);
  const edge = Math.max((high - low) * 0.012, high === low ? 1 : 0);
  return [low - edge, high + edge];
}

function layout(chart) {
  const axis = { color: color("soft"), gridcolor: color("grid"), linecolor: color("line"), zeroline: false,
    tickfont: { size: 11.5 }, automargin: true };
  const few = mode === "step" && data.kept.step.length < 8;
  return {
    xaxis: { ...axis, range: span(), showgrid: false, showline: true, ticks: "outside", ticklen: 4,
      tickcolor: color("line"), spikecolor: color("soft"), spikethickness: 1, spikedash: "dot",
      ...(few ? { dtick: 1 } : {}),
      title: { text: mode === "step" ? "step" : "time since the start, " + units[1], font: { size: 12 }, standoff: 6 },
      unifiedhovertitle: { text: mode === "step" ? "step %{x}" : "after %{x:.4~g} " + units[1] } },
    yaxis: { ...axis, rangemode: chart.zero ? "tozero" : "normal", ...(chart.top ? { range: [0, chart.top] } : {}),
      ...(chart.log ? { type: "log", dtick: 1, minor: { dtick: "D2", showgrid: false } } : {}),
      ...(chart.percent ? { tickformat: ".0%" } : {}), ...(chart.id === "lr" ? { tickformat: ".1~e" } : {}) },
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    shapes: lines(), hovermode: "x unified", dragmode: "zoom",
    margin: { l: 46, r: 12, t: chart.traces.length > 1 || chart.legend ? 26 : 10, b: 40 },
    paper_bgcolor: color("card"), plot_bgcolor: color("card"),
    font: { family: getComputedStyle(document.body).fontFamily, color: color("ink"), size: 12 },
    hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("ink"), size: 12 },
      align: "left" },
    legend: { orientation: "h", x: 1, xanchor: "right", y: 1, yref: "container", yanchor: "top",
      bgcolor: "rgba(0,0,0,0)", font: { size: 12 }, traceorder: "normal" },
  };
}

function draw() {
  for (const chart of data.charts) {
    const traces = chart.traces.map((spec) => curve(chart, spec, false));
    if (data.lost.step.length) {
      const shown = (spec) => spec.column !== "smooth" && (mode === "time" || spec.style !== "area");
      traces.unshift(...chart.traces.filter(shown).map((spec) => curve(chart, spec, true)));
    }
    if (chart.id === "loss") traces.push(...data.heldOut.map(heldOut));
    if (chart.id === "scores") traces.push(...data.scores.map(heldOut));
    const options = { responsive: true, displayModeBar: false };
    Plotly.react("plot-" + chart.id, [...traces, ...marks()], layout(chart), options);
  }
  for (const button of document.querySelectorAll(".switch button")) {
    button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
  }
}

// a zoom into one chart is a zoom into all: they share the axis
let linking = false;
function link(chart) {
  const from = document.getElementById("plot-" + chart.id);
  from.on("plotly_relayout", (change) => {
    if (linking || !Object.keys(change).some((key) => key.startsWith("xaxis."))) return;
    linking = true;
    const range = from.layout.xaxis.range.slice();
    const others = data.charts.filter((other) => other.id !== chart.id);
    Promise.all(others.map((other) => Plotly.relayout("plot-" + other.id, { "xaxis.range": range.slice() })))
      .finally(() => { linking = false; });
  });
}

function legend() {
  const entries = Object.entries(shapes).filter(([kind]) => data.events.some((event) => event.class === kind))
    .map(([, shape]) => [shape.mark, shape.color, shape.word]);
  if (data.lost.step.length) entries.push(["\u22ef", "blue", "steps lost and walked again"]);
  for (const [mark, tone, word] of entries) {
    const item = document.createElement("span"), sign = document.createElement("i");
    sign.textContent = mark; sign.style.color = `var(--${tone})`;
    item.append(sign, word);
    document.querySelector(".legend").append(item);
  }
}

// runs the library that draws, which the page holds gzipped
async function library() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (each) => each.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(unpacked).text();
  document.head.append(script);
}

async function show() {
  try {
    await library();
  } catch (error) {
    document.querySelector(".hint").textContent = "curves need a browser of 2023 or later (" + error.message + ")";
    return;
  }
  draw(); legend(); data.charts.forEach(link);
}

if (data.charts.length) {
  if (location.hash === "#time") mode = "time";
  show();
  for (const button of document.querySelectorAll(".switch button")) {
    button.addEventListener("click", () => { mode = button.dataset.mode; draw(); });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
"""

_PAGE = (
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:">
<title>@@title@@ - Phalanx</title>
<style>"""
    + _STYLE
    + """</style>
</head>
<body>
<main>
<header>
<div class="brand"><i><b style="height:9px"></b><b style="height:14px"></b><b style="height:6px"></b>
<b style="height:12px"></b></i>Phalanx run report</div>
@@header@@
<dl class="tiles">@@tiles@@</dl>
@@incidents@@
</header>
@@curves@@
<div class="below">@@records@@</div>
<footer>@@footer@@</footer>
</main>
<script type="application/json" id="data">@@payload@@</script>
<script type="text/plain" id="plotly">@@plotly@@</script>
<script>"""
    + _SCRIPT
    + """</script>
</body>
</html>
"""
)
