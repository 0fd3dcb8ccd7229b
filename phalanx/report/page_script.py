"""The script of a report's page: it draws the charts and shows the values at the pointer. BokehJS is in the page.

The box of values, the vertical line through all charts and the legends are elements of the page, not of Bokeh, so that
text of a run is never read as markup, and they follow the page's colours.
"""

from phalanx.report.chart_script import CHART_SCRIPT

PAGE_SCRIPT = (
    CHART_SCRIPT
    + r"""
let shown = [], views = null, drawing = Promise.resolve();

function draw(whole = true) {
  drawing = drawing.then(async () => {
    const { Document } = Bokeh.require("document");
    Bokeh.documents.length = 0;
    const kept = shown.length && !whole ? shown[0].figure.x_range : null;
    const x_range = new Bokeh.Models.Range1d(kept ? { start: kept.start, end: kept.end } : span());
    const old = views, page = new Document(), made = data.charts.map((chart) => plot(chart, x_range));
    for (const { figure } of made) page.add_root(figure);
    views = await Bokeh.embed.add_document_standalone(page, document.body, made.map(({ chart }) => holder(chart)));
    old?.clear();
    shown = made.map((each) => ({ ...each, view: views.get(each.figure) }));
    for (const { view } of shown) {  // a finger that goes up or down scrolls the page
      view.canvas?.touch_action?.replace(`.bk-events { touch-action: pan-y pinch-zoom; }
        .bk-events:focus:not(:focus-visible) { outline: none; }`);
    }
    leave();
  });
  for (const button of document.querySelectorAll(".switch button")) {
    button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
  }
  return drawing;
}

function reset() {
  for (const { figure, chart, drawn, y_range } of shown) {
    figure.x_range.setv(span());
    y_range.setv(heights(chart, drawn));
  }
}

const tip = make("div", "tip");

function leave() {
  tip.remove();
  for (const rule of document.querySelectorAll(".rule")) rule.remove();
}

// one box with all values at the step that is nearest to the pointer, and with what happened there
function point(at, event) {
  const { view, chart, drawn } = at, frame = view.frame.bbox, edge = holder(chart).getBoundingClientRect();
  const px = event.clientX - edge.left, py = event.clientY - edge.top;
  leave();
  if (px < frame.left - NEAR || px > frame.right + NEAR || py < frame.top || py > frame.bottom) return;
  if (event.buttons && event.pointerType === "mouse") return;
  const scale = view.frame.x_scale, seen = (x) => x >= scale.source_range.start && x <= scale.source_range.end;
  const nearest = (each, x) => each.y.reduce((best, y, i) => (isFinite(y) && each.step[i] !== null && seen(each.x[i])
    && (best < 0 || Math.abs(each.x[i] - x) < Math.abs(each.x[best] - x)) ? i : best), -1);
  const on = drawn.filter((each) => !each.off), x = scale.invert(px);
  const far = (each, i) => Math.abs(scale.compute(each.x[i]) - px) + (each.lost && mode === "step" ? NEAR : 0);
  const first = on.map((each) => [each, nearest(each, x)]).filter(([, i]) => i >= 0)
    .sort((one, other) => far(...one) - far(...other))[0];
  const spots = place({ step: data.events.map((one) => one.step), t: data.events.map((one) => one.t) });
  const off = (spot) => Math.abs(scale.compute(spot) - px);
  const mark = spots.filter(seen).reduce((best, spot) => (off(spot) < off(best ?? Infinity) ? spot : best), null);
  // between two attempts there is no step, but what happened there
  const alone = mark !== null && off(mark) <= NEAR && (!first || far(...first) > 2 * NEAR);
  if (!first && !alone) return;
  const centre = alone ? mark : first[0].x[first[1]], step = alone ? null : first[0].step[first[1]];
  const near = (other, pixels) => Math.abs(scale.compute(other) - scale.compute(centre)) <= pixels;
  const title = alone && mode === "time" ? [] : ["step " + (step ?? centre).toLocaleString("en")];
  if (mode === "time") title.push(`after ${short(centre)} ${units[1]}`);
  tip.replaceChildren(make("b", "", title.join(", ")));
  for (const each of on.sort((a, b) => a.lost - b.lost)) {
    const i = nearest(each, centre);
    if (i < 0 || !near(each.x[i], each.dots ? NEAR : NEAR / 3)) continue;
    const name = each.name + (each.lost ? ", lost" : "") + (each.step[i] === step ? "" : ` (step ${each.step[i]})`);
    tip.append(make("div", "", key(each), make("span", "", name), make("em", "", read(chart, each.y[i]))));
  }
  const told = data.events.map((one, i) => [one, spots[i]]).filter(([, spot]) => seen(spot) && near(spot, NEAR))
    .sort(([, spot], [, other]) => Math.abs(spot - centre) - Math.abs(other - centre));
  for (const [one] of told.slice(0, TOLD)) {
    const sign = make("i", "", shapes[one.class].mark);
    sign.style.color = `var(--${shapes[one.class].color})`;
    tip.append(make("div", "told", sign, make("span", "", one.text)));
  }
  if (told.length > TOLD) tip.append(make("div", "told", make("i", ""), `and ${told.length - TOLD} more`));
  for (const other of shown) {
    const rule = make("div", "rule"), { bbox: inside, x_scale } = other.view.frame;
    rule.style.cssText = `left: ${x_scale.compute(centre)}px; top: ${inside.top}px; height: ${inside.height}px`;
    holder(other.chart).append(rule);
  }
  document.body.append(tip);
  const room = document.documentElement.clientWidth, left = event.clientX + 16;
  const fits = left + tip.offsetWidth < room - 8;
  tip.style.left = Math.max(8, fits ? left : Math.min(event.clientX - 16, room - 8) - tip.offsetWidth) + "px";
  tip.style.top = Math.max(8, Math.min(event.clientY - 20, innerHeight - tip.offsetHeight - 8)) + "px";
}

function listen(chart) {
  const found = () => shown.find((each) => each.chart === chart);
  for (const kind of ["pointermove", "pointerdown"]) {
    holder(chart).addEventListener(kind, (event) => found() && point(found(), event));
  }
  holder(chart).addEventListener("pointerleave", (event) => event.pointerType === "mouse" && leave());
  holder(chart).addEventListener("dblclick", reset);
}

function key(each) {
  const kind = each.area ? " area" : each.dots > 6 ? " dashed" : each.width > 2 ? " bold" : each.alpha < 1 ? " faint"
    : "";
  const sign = make("i", "key" + kind);
  sign.style.setProperty("--tone", `var(--${each.tone})`);
  return sign;
}

// a legend in the head of each chart with several curves; its entries switch curves off and on
function keys(chart) {
  const all = curves(chart).filter((each) => !each.lost);
  if (all.length < 2 && !chart.legend) return;
  const list = make("div", "keys");
  for (const each of all) {
    const button = make("button", "", key(each), each.name), name = chart.id + " " + each.name;
    button.type = "button";
    button.ariaPressed = "true";
    button.addEventListener("click", () => {
      if (!hidden.delete(name)) hidden.add(name);
      button.ariaPressed = String(!hidden.has(name));
      draw(false);
    });
    list.append(button);
  }
  holder(chart).previousElementSibling.append(list);
}

function legend() {
  const entries = Object.entries(shapes).filter(([kind]) => data.events.some((event) => event.class === kind))
    .map(([, shape]) => [shape.mark, shape.color, shape.word]);
  if (data.lost.step.length) entries.push(["\u22ef", "blue", "lost steps, replayed"]);
  for (const [mark, tone, word] of entries) {
    const item = document.createElement("span"), sign = document.createElement("i");
    sign.textContent = mark; sign.style.color = `var(--${tone})`;
    item.append(sign, word);
    document.querySelector(".legend").append(item);
  }
}

// runs the library that draws, which the page holds gzipped
async function library() {
  const packed = Uint8Array.from(atob(document.getElementById("bokeh").textContent), (each) => each.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(unpacked).text();
  document.head.append(script);
}

async function show() {
  try {
    await library();
    Bokeh.logger.set_level("warn");
    await draw();
  } catch (error) {
    document.querySelector(".hint").textContent = "curves need a browser of 2023 or later (" + error.message + ")";
    return;
  }
  legend();
  data.charts.forEach((chart) => { keys(chart); listen(chart); });
}

if (data.charts.length) {
  if (location.hash === "#time") mode = "time";
  show();
  for (const button of document.querySelectorAll(".switch button")) {
    button.addEventListener("click", () => { mode = button.dataset.mode; draw(); });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(false));
  addEventListener("scroll", leave, { passive: true });
  // a browser prints as soon as this returns, so the charts are drawn for the width of paper at once
  const resize = (paper) => {
    document.querySelector("main").classList.toggle("paper", paper);
    leave();
    for (const { view } of shown) { view.after_resize(); view.repaint(); }
  };
  addEventListener("beforeprint", () => resize(true));
  addEventListener("afterprint", () => resize(false));
}
"""
)
