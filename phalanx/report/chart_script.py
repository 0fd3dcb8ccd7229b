"""Parts of the pages' scripts: `CURVES_SCRIPT` makes curves of a payload, for the report and for the live page, and
`CHART_SCRIPT` makes BokehJS models of them: one plot for each chart.

The axes of all charts share one range in x.
"""

CURVES_SCRIPT = r"""
"use strict";
let data = null, units = [1, "s"];

function take(payload) {
  data = payload;
  units = data.duration > 172800 ? [86400, "d"] : data.duration > 7200 ? [3600, "h"]
    : data.duration > 180 ? [60, "min"] : [1, "s"];
}

// each kind has a separate height, so that what happens at the same step is seen side by side
const shapes = {
  died: { symbol: "x", width: 3.4, size: 9, color: "red", height: 0.97, word: "worker died", mark: "\u2717" },
  restarted: { symbol: "circle", width: 1.6, color: "amber", height: 0.89, word: "restarted", mark: "\u25cb" },
  resumed: { symbol: "triangle", turn: -90, color: "violet", height: 0.81, word: "resumed", mark: "\u25b6" },
  stopped: { symbol: "square", color: "amber", height: 0.73, word: "stopped", mark: "\u25a0" },
  failed: { symbol: "x", width: 1.6, color: "red", height: 0.08, word: "checkpoint failed or refused", mark: "\u00d7" },
  skipped: { symbol: "diamond", width: 1.6, size: 11, color: "amber", height: 0.15, word: "step skipped",
    mark: "\u25c7" },
  saved: { symbol: "dash", turn: 90, width: 1.6, color: "green", height: 0.012, word: "checkpoint saved",
    mark: "\u2758" },
};
const NEAR = 8;  // pixels between the pointer and what it is at
const TOLD = 6;  // of more events at one place, the nearest are told
let mode = "step";
const hidden = new Set();  // names of curves that were switched off in a legend, by chart
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const place = (columns) => (mode === "step" ? columns.step : columns.t.map((t) => (t === null ? null : t / units[0])));
const holder = (chart) => document.getElementById("plot-" + chart.id);

function make(tag, name, ...inside) {
  const element = document.createElement(tag);
  element.className = name;
  element.append(...inside);
  return element;
}

// ---- numbers as people read them

function short(value, digits = 4) {
  const size = Math.abs(value);
  if (size >= 1e4) {
    const power = Math.min(4, Math.floor(Math.log10(size * (1 + 0.5 * 10 ** -digits)) / 3));
    return Number((value / 1e3 ** power).toPrecision(digits)) + ["", "k", "M", "G", "T"][power];
  }
  if (size > 0 && size < 1e-3) return value.toExponential(digits - 1).replace(/\.?0*e/, "e").replace("e-", "e\u2212");
  return String(Number(value.toPrecision(digits)));
}
const read = (chart, value) => (chart.percent ? (100 * value).toFixed(1) + "%" : short(value));

// the labels of an axis, with as many digits as tell neighbours apart
function ticks(values) {
  const top = Math.max(...values.map(Math.abs)), gap = Math.abs(values[1] - values[0]) || top;
  const digits = 2 + Math.max(0, Math.round(Math.log10(top / gap)));
  const places = Math.max(0, -Math.floor(Math.log10(gap * 1.0001)));
  const one = (value) => (top >= 1e4 || top < 1e-2 ? short(value, digits) : value.toFixed(places));
  return values.map((value) => (Math.abs(value) < gap / 2 ? "0" : one(value)));
}

function percents(values) {
  return ticks(values.map((value) => 100 * value)).map((text) => text + "%");
}

function powers(values) {
  const wide = values.some((value) => value >= 1e4 || value < 1e-3);
  const power = (value) => value.toExponential(0).replace("e+", "e").replace("e-", "e\u2212");
  return values.map(wide ? power : (value) => short(value));
}

// ticks at 1, 2 and 5 of each power of ten, or where there are many powers at some of these only
function logTicks(low, high, _, wanted) {
  const from = Math.floor(Math.log10(low)), powers = Math.ceil(Math.log10(high)) - from;
  const every = Math.max(1, Math.ceil(powers / (wanted + 2)));
  const major = [], minor = [];
  for (let power = from; power <= from + powers; power++) {
    for (let factor = 1; factor < 10; factor++) {
      const labelled = powers <= 2 ? [1, 2, 5].includes(factor) : factor === 1 && (power - from) % every === 0;
      (labelled ? major : minor).push(Number(factor + "e" + power));
    }
  }
  const seen = (value) => value >= low && value <= high;
  return { major: major.filter(seen), minor: every > 1 ? [] : minor.filter(seen) };
}

// ---- what is drawn, from the columns of the payload

// x, y and step of one column; a gap where an attempt ends, unless the next one continues the steps
// (a stacked area has no gaps: it goes down to zero and comes up again)
function points(columns, name, always, area) {
  const xs = place(columns), out = { x: [], y: [], step: [] };
  columns[name].forEach((y, i) => {
    const changed = i > 0 && columns.attempt[i] !== columns.attempt[i - 1];
    if (changed && (always || mode === "time")) {
      const hair = 1e-5 * (xs[i] - xs[i - 1]), gap = area ? 0 : NaN;
      out.x.push(xs[i - 1] + hair, xs[i] - hair); out.y.push(gap, gap); out.step.push(null, null);
    }
    out.x.push(xs[i] ?? NaN); out.y.push(y ?? NaN); out.step.push(columns.step[i]);
  });
  return out;
}

function curve(spec, lost) {
  const area = spec.style === "area", thin = spec.style === "faint";
  const from = points(lost ? data.lost : data.kept, spec.column, lost, area);
  return { ...from, name: spec.name, lost, area, tone: spec.color, alpha: lost ? 0.5 : thin ? 0.55 : 1,
    width: area ? 1 : spec.style === "bold" ? 2.4 : thin ? 1.1 : 1.6, dash: lost && !area ? [2, 3] : [],
    dots: from.x.length < 8 ? 6 : 0 };
}

function heldOut(set, number) {
  return { name: set.name, x: place(set).map((x) => x ?? NaN), y: set.loss.map((y) => y ?? NaN), step: set.step,
    lost: false, tone: ["orange", "violet", "teal", "green", "red"][number % 5], alpha: 1, width: 1, dash: [5, 4],
    dots: 8 };
}

// all curves of a chart, of areas also between which heights
function curves(chart) {
  const all = chart.traces.map((spec) => curve(spec, false));
  if (data.lost.step.length) {
    const shown = (spec) => spec.column !== "smooth" && (mode === "time" || spec.style !== "area");
    all.unshift(...chart.traces.filter(shown).map((spec) => curve(spec, true)));
  }
  if (chart.id === "loss") all.push(...data.heldOut.map(heldOut));
  if (chart.id === "scores") all.push(...data.scores.map(heldOut));
  const heights = {};
  for (const each of all) {
    each.off = hidden.has(chart.id + " " + each.name);
    each.top = each.y;
    if (!each.area || each.off) continue;
    each.base = heights[each.lost] ?? each.y.map(() => 0);
    each.top = heights[each.lost] = each.base.map((base, i) => base + (each.y[i] || 0));
  }
  return all;
}

function span() {
  const all = [data.kept, data.lost, ...data.heldOut].flatMap(place).filter((x) => x !== null);
  if (mode === "time") all.push(...data.events.map((event) => event.t / units[0]));
  const low = all.reduce((a, b) => Math.min(a, b), Infinity), high = all.reduce((a, b) => Math.max(a, b), -Infinity);
  const edge = Math.max((high - low) * 0.012, high === low ? 1 : 0);
  return { start: low - edge, end: high + edge };
}

function heights(chart, drawn) {
  const all = drawn.filter((each) => !each.off).flatMap((each) => each.top)
    .filter((y) => isFinite(y) && (!chart.log || y > 0));
  if (chart.top) return { start: 0, end: chart.top };
  if (!all.length) return { start: chart.log ? 0.1 : 0, end: 1 };
  let low = all.reduce((a, b) => Math.min(a, b)), high = all.reduce((a, b) => Math.max(a, b));
  if (chart.log) {
    const edge = Math.max((high / low) ** 0.05, 1.05);
    return { start: low / edge, end: high * edge };
  }
  if (chart.zero) low = Math.min(low, 0);
  const edge = 0.05 * (high - low) || 0.1 * Math.abs(high) || 1;
  return { start: chart.zero && low === 0 ? 0 : low - edge, end: high + edge };
}

"""

CHART_SCRIPT = (
    CURVES_SCRIPT
    + r"""
// ---- Bokeh's models

take(JSON.parse(document.getElementById("data").textContent));

function plot(chart, x_range) {
  const M = Bokeh.Models, drawn = curves(chart), font = getComputedStyle(document.body).fontFamily;
  // lines of the axes are faint rather than near the background, as what is dark on the screen is white on paper
  const text = (text_font_size) => ({ text_color: color("soft"), text_font: font, text_font_size,
    text_font_style: "normal" });
  const prefixed = (prefix, values) => Object.fromEntries(Object.entries(values).map(([key, v]) => [prefix + key, v]));
  const look = { ...prefixed("major_label_", text("11.5px")), ...prefixed("axis_label_", text("12px")),
    axis_line_color: null, major_tick_line_color: null, minor_tick_line_color: null, axis_label_standoff: 4,
    axis_line_alpha: 0.35, major_tick_line_alpha: 0.35, minor_tick_line_alpha: 0.35 };
  // not Bokeh's own formatter by a function: that one takes eval, which the page forbids
  const formatter = (doFormat) => Object.assign(new M.BasicTickFormatter(), { doFormat });
  const narrow = holder(chart).clientWidth < 420;
  const y_range = new M.Range1d(heights(chart, drawn)), marks = new M.Range1d({ start: 0, end: 1 });
  marks.change.connect(() => marks.setv({ start: 0, end: 1 }));  // a zoom leaves the marks at their heights
  const figure = new M.Plot({ x_range, y_range, extra_y_ranges: { marks },
    extra_y_scales: { marks: new M.LinearScale() }, ...(chart.log ? { y_scale: new M.LogScale() } : {}),
    output_backend: "svg", sizing_mode: "stretch_both", toolbar_location: null, lod_threshold: null,
    background_fill_color: null, border_fill_color: null, outline_line_color: null,
    min_border_left: 46, min_border_right: 12, min_border_top: 8 });
  const x_ticks = new M.BasicTicker({ desired_num_ticks: narrow ? 5 : 8, min_interval: mode === "step" ? 1 : 0,
    mantissas: [1, 2, 5] });
  const y_ticks = chart.log ? new M.LogTicker() : new M.BasicTicker({ desired_num_ticks: 4, mantissas: [1, 2, 5] });
  if (chart.log) y_ticks.get_ticks_no_defaults = logTicks;
  figure.add_layout(new M.LinearAxis({ ...look, ticker: x_ticks, formatter: formatter(ticks),
    axis_line_color: color("soft"), major_tick_line_color: color("soft"), major_tick_in: 0, major_tick_out: 4,
    axis_label: mode === "step" ? "step" : "time since the start, " + units[1] }), "below");
  const Axis = chart.log ? M.LogAxis : M.LinearAxis;
  figure.add_layout(new Axis({ ...look, ticker: y_ticks,
    formatter: formatter(chart.percent ? percents : chart.log ? powers : ticks),
    ...(chart.log ? { minor_tick_line_color: color("soft"), minor_tick_out: 4, minor_tick_in: 0 } : {}) }), "left");
  figure.add_layout(new M.Grid({ dimension: 1, ticker: y_ticks, grid_line_color: color("soft"),
    grid_line_alpha: 0.16, level: "image" }));

  const add = (glyph, columns, given = {}) =>
    figure.add_glyph(glyph, new M.ColumnDataSource({ data: columns }), { nonselection_glyph: null, ...given });
  const x = { field: "x" }, y = { field: "y" }, under = { level: "underlay" };
  const again = [...new Set(mode === "step" ? data.lost.attempt : [])].map((attempt) =>
    data.lost.step.filter((_, i) => data.lost.attempt[i] === attempt));
  add(new M.VStrip({ x0: x, x1: { field: "to" }, line_color: null, fill_color: color("violet"), fill_alpha: 0.09 }),
    { x: again.map((steps) => steps[0]), to: again.map((steps) => steps.at(-1)) }, under);
  for (const [kind, shape] of Object.entries(shapes)) {
    const events = data.events.filter((event) => event.class === kind);
    const crossing = events.filter((event) => event.crosses);
    const at = (found) => place({ step: found.map((event) => event.step), t: found.map((event) => event.t) });
    const tone = color(shape.color);
    if (crossing.length) {
      add(new M.VSpan({ x, line_color: tone, line_width: 1.2, line_dash: kind === "died" ? [] : [2, 3],
        line_alpha: Math.max(0.25, Math.min(1, 40 / crossing.length)) }), { x: at(crossing) }, under);
    }
    if (events.length) {
      add(new M.Scatter({ x, y, marker: shape.symbol, size: shape.size ?? 8, angle: (shape.turn ?? 0) * Math.PI / 180,
        line_color: tone, line_width: shape.width ?? 0, fill_color: shape.width ? null : tone }),
        { x: at(events), y: events.map(() => shape.height) }, { y_range_name: "marks", level: "annotation" });
    }
  }
  for (const each of drawn.filter((one) => !one.off)) {
    const columns = { x: each.x, y: chart.log ? each.top.map((value) => (value > 0 ? value : NaN)) : each.top };
    if (each.area) {
      add(new M.VArea({ x, y1: { field: "base" }, y2: y, fill_color: color(each.tone),
        fill_alpha: each.lost ? 0.1 : 0.35 }), { ...columns, base: each.base });
    }
    add(new M.Line({ x, y, line_color: color(each.tone), line_alpha: each.alpha, line_width: each.width,
      line_dash: each.dash, line_join: "round" }), columns);
    if (each.dots) {
      add(new M.Scatter({ x, y, size: each.dots, fill_color: color(each.tone), fill_alpha: each.alpha,
        line_color: color("card"), line_width: each.dots > 6 ? 1.5 : 0 }), columns);
    }
  }
  const box = new M.BoxZoomTool({ dimensions: "auto" });
  box.event_type = "pan";  // a double click goes back to the whole, not by one step
  Object.assign(box.overlay, { fill_color: color("blue"), fill_alpha: 0.12, line_color: color("blue"), line_width: 1,
    line_dash: [] });
  figure.add_tools(box);
  figure.toolbar.active_drag = box;
  return { chart, figure, drawn, y_range };
}
"""
)
