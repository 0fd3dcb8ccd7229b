// ---- charts on canvases: all charts of a page share one range in x and one place of the pointer

const EDGE = { left: 54, right: 14, top: 10, bottom: 24 };
const tones = new Map();
const tone = (name) => {
  if (!tones.has(name)) tones.set(name, name.startsWith("hsl") ? name : color(name));
  return tones.get(name);
};
const alpha = (name, part) => `color-mix(in srgb, ${tone(name)} ${Math.round(100 * part)}%, transparent)`;
// a whole number with its thousands apart; the browser's own way loads its tables of languages, for half a second
const count = (number) => String(number).replace(/\B(?=(\d{3})+$)/g, ",");

// steps of 1, 2 or 5 times a power of ten that divide a range into about so many parts
function linearTicks(low, high, wanted, least = 0) {
  const raw = (high - low) / Math.max(1, wanted), power = 10 ** Math.floor(Math.log10(raw || 1));
  const gap = Math.max(least, power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999));
  const found = [];
  for (let value = Math.ceil(low / gap) * gap; value <= high + gap * 1e-9; value += gap) {
    found.push(Number(value.toPrecision(12)));
  }
  return found;
}

class ChartGroup {
  constructor() {
    this.charts = [];
    this.range = null;  // what is zoomed into; null is all
    this.at = null;  // the pointer, in units of x
    this.onZoom = () => {};
  }

  add(chart) { this.charts.push(chart); }

  zoom(range) {
    this.range = range;
    this.point(null);
    this.draw();
    this.onZoom(range);
  }

  point(at, from = null, event = null) {
    this.at = at;
    for (const chart of this.charts) chart.cross(at);
    if (from && event && at !== null) from.tell(event);
    else tip.remove();
  }

  draw() { for (const chart of this.charts) chart.ask(); }

  close() {
    for (const chart of this.charts) chart.close();
    tip.remove();
  }
}

const tip = make("div", "tip");

// `source` gives what is drawn at each time: curves, heights, marks, spans of replayed steps, the whole range of x
class Chart {
  constructor(holder, spec, group, source) {
    Object.assign(this, { holder, spec, group, source });
    this.paper = document.createElement("canvas");
    this.over = document.createElement("canvas");
    holder.replaceChildren(this.paper, this.over);
    this.asked = false;
    this.sizes = new ResizeObserver(() => this.ask());
    this.sizes.observe(holder);
    this.seen = new IntersectionObserver((found) => {
      this.visible = found[found.length - 1].isIntersecting;
      if (this.visible && this.stale) this.ask();
    }, { rootMargin: "200px" });
    this.seen.observe(holder);
    this.visible = Boolean(spec.wide);  // others only once they are seen, so that the first one is drawn at once
    holder.tabIndex = 0;
    holder.setAttribute("role", "img");
    holder.addEventListener("pointermove", (event) => this.move(event));
    holder.addEventListener("pointerdown", (event) => this.press(event));
    holder.addEventListener("pointerup", (event) => this.release(event));
    holder.addEventListener("pointerleave", () => { if (!this.drag) this.group.point(null); });
    holder.addEventListener("dblclick", () => this.group.zoom(null));
    holder.addEventListener("keydown", (event) => this.type(event));
  }

  close() {
    this.sizes.disconnect();
    this.seen.disconnect();
  }

  ask() {
    this.stale = true;
    if (this.asked || !this.visible) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; this.draw(); });
  }

  size(canvas) {
    const scale = devicePixelRatio || 1, width = this.holder.clientWidth, height = this.holder.clientHeight;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.width = width + "px";
      canvas.style.height = height + "px";
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    return pen;
  }

  draw() {
    const width = this.holder.clientWidth, height = this.holder.clientHeight;
    if (width < 80 || !this.holder.isConnected) return;
    this.stale = false;
    const pen = this.size(this.paper), { spec } = this, drawn = this.source.curves(spec);
    const range = this.group.range ?? this.source.span();
    const seen = drawn.filter((each) => !each.off).map((each) => this.cut(each, range));
    const y = this.heights(spec, seen);
    const left = EDGE.left, right = width - EDGE.right, top = EDGE.top, bottom = height - EDGE.bottom;
    const log = spec.log ? Math.log10 : (value) => value;
    const px = (x) => left + (right - left) * (x - range.start) / (range.end - range.start || 1);
    const py = (value) => bottom - (bottom - top) * (log(value) - log(y.start)) / (log(y.end) - log(y.start) || 1);
    Object.assign(this, { px, py, drawn, shown: range, box: { left, right, top, bottom } });
    pen.font = "11.5px " + getComputedStyle(document.body).fontFamily;

    // axes
    const found = spec.log ? logTicks(y.start, y.end, null, 4) : { major: linearTicks(y.start, y.end, height > 260 ? 6 : 4), minor: [] };
    const words = (spec.percent ? percents : spec.log ? powers : ticks)(found.major);
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    found.major.forEach((value, i) => {
      const at = Math.round(py(value)) + 0.5;
      pen.strokeStyle = tone("grid");
      pen.beginPath(); pen.moveTo(left, at); pen.lineTo(right, at); pen.stroke();
      pen.fillStyle = tone("soft");
      pen.fillText(words[i], left - 8, at);
    });
    pen.textAlign = "center";
    pen.textBaseline = "top";
    const across = linearTicks(range.start, range.end, width < 420 ? 4 : 8, mode === "step" ? 1 : 0);
    const names = ticks(across.length > 1 ? across : [...across, ...across]);
    across.forEach((value, i) => {
      const at = Math.round(px(value)) + 0.5;
      if (at < left || at > right) return;
      pen.fillStyle = tone("soft");
      const last = mode === "time" && i === across.length - 1 ? " " + units[1] : "";
      pen.fillText(names[i] + last, Math.min(at, width - 20), bottom + 7);
    });

    pen.save();
    pen.beginPath(); pen.rect(left, top - 6, right - left, bottom - top + 7); pen.clip();
    for (const [from, to] of this.source.replayed()) {
      pen.fillStyle = alpha("violet", 0.1);
      pen.fillRect(px(from), top, Math.max(1, px(to) - px(from)), bottom - top);
    }
    const marks = this.source.marks().filter((mark) => mark.x >= range.start && mark.x <= range.end);
    const crossing = marks.filter((mark) => mark.crosses);
    for (const mark of crossing) {
      pen.strokeStyle = alpha(mark.shape.color, Math.max(0.25, Math.min(0.8, 40 / crossing.length)));
      pen.setLineDash(mark.class === "died" ? [] : [2, 3]);
      pen.beginPath(); pen.moveTo(px(mark.x), top); pen.lineTo(px(mark.x), bottom); pen.stroke();
    }
    pen.setLineDash([]);
    for (const each of seen) this.trace(pen, each, px, py, spec);
    pen.textBaseline = "middle";
    pen.font = "700 11px system-ui, sans-serif";
    for (const mark of marks) {
      pen.fillStyle = tone(mark.shape.color);
      const at = bottom - mark.shape.height * (bottom - top);
      if (mark.class === "saved") pen.fillRect(px(mark.x) - 0.75, bottom - 5, 1.5, 5);
      else if (spec.wide) pen.fillText(mark.shape.mark, px(mark.x), at);
    }
    pen.restore();
    pen.strokeStyle = tone("line");
    pen.beginPath(); pen.moveTo(left, bottom + 0.5); pen.lineTo(right, bottom + 0.5); pen.stroke();
    if (!seen.some((each) => each.x.length)) {
      pen.fillStyle = tone("soft");
      pen.fillText("no numbers in this range", (left + right) / 2, (top + bottom) / 2);
    }
    this.holder.setAttribute("aria-label", `${spec.title}: ${seen.map((each) => {
      const last = each.top.findLast((value) => isFinite(value));
      return last === undefined ? each.name : `${each.name} ${read(spec, last)}`;
    }).join(", ")}`);
    this.cross(this.group.at);
  }

  // the points of a curve in a range, and one more at each side
  cut(each, range) {
    const { x } = each;
    let first = x.findIndex((value) => value >= range.start), last = x.findLastIndex((value) => value <= range.end);
    if (first < 0 || last < 0) return { ...each, x: [], y: [], top: [], base: [] };
    first = Math.max(0, first - 1);
    last = Math.min(x.length - 1, last + 1);
    const part = (values) => values?.slice(first, last + 1);
    return { ...each, x: part(x), y: part(each.y), top: part(each.top), base: part(each.base) };
  }

  // a first step that includes compilation, or a loss that begins very high, does not flatten the rest
  heights(spec, seen) {
    if (this.group.range && spec.top) return heights({ ...spec, top: null }, seen);
    return heights(spec, seen);
  }

  trace(pen, each, px, py, spec) {
    const ok = (value) => isFinite(value) && (!spec.log || value > 0);
    if (each.area) {
      pen.fillStyle = alpha(each.tone, each.lost ? 0.12 : 0.32);
      pen.beginPath();
      each.x.forEach((x, i) => pen.lineTo(px(x), py(each.top[i] || 0)));
      for (let i = each.x.length - 1; i >= 0; i--) pen.lineTo(px(each.x[i]), py(each.base[i]));
      pen.fill();
    }
    pen.strokeStyle = each.alpha < 1 ? alpha(each.tone, each.alpha) : tone(each.tone);
    pen.lineWidth = each.width;
    pen.lineJoin = "round";
    pen.setLineDash(each.dash);
    pen.beginPath();
    let down = false;
    each.x.forEach((x, i) => {
      const fine = ok(each.top[i]);
      if (fine) pen[down ? "lineTo" : "moveTo"](px(x), py(each.top[i]));
      down = fine;
    });
    pen.stroke();
    pen.setLineDash([]);
    if (each.dots) {
      pen.fillStyle = tone(each.tone);
      each.x.forEach((x, i) => {
        if (!ok(each.top[i])) return;
        pen.beginPath(); pen.arc(px(x), py(each.top[i]), each.dots / 2, 0, 7); pen.fill();
      });
    }
  }

  // ---- the pointer

  cross(at) {
    const pen = this.size(this.over);
    if (!this.box) return;
    const { left, right, top, bottom } = this.box;
    if (this.drag && this.drag.to !== undefined) {
      pen.fillStyle = alpha("blue", 0.14);
      pen.fillRect(this.drag.from, top, this.drag.to - this.drag.from, bottom - top);
    }
    if (at === null || at < this.shown.start || at > this.shown.end) return;
    pen.strokeStyle = tone("grey");
    pen.setLineDash([3, 3]);
    pen.beginPath(); pen.moveTo(this.px(at), top); pen.lineTo(this.px(at), bottom); pen.stroke();
    pen.setLineDash([]);
    for (const each of this.drawn) {
      const i = each.off ? -1 : nearest(each, at);
      if (i < 0 || Math.abs(this.px(each.x[i]) - this.px(at)) > NEAR || each.alpha < 1) continue;
      pen.fillStyle = tone(each.tone);
      pen.strokeStyle = tone("card");
      pen.lineWidth = 1.5;
      pen.beginPath(); pen.arc(this.px(each.x[i]), this.py(each.top[i]), 4, 0, 7); pen.fill(); pen.stroke();
    }
    void right;
  }

  place(event) {
    const edge = this.holder.getBoundingClientRect(), { left, right } = this.box;
    const px = Math.min(right, Math.max(left, event.clientX - edge.left));
    return [px, this.shown.start + (this.shown.end - this.shown.start) * (px - left) / (right - left)];
  }

  move(event) {
    if (!this.box) return;
    const [px, x] = this.place(event);
    if (this.drag) {
      this.drag.to = px;
      this.cross(null);
      return;
    }
    const on = this.drawn.filter((each) => !each.off && each.x.length);
    const spots = on.map((each) => [each, nearest(each, x)]).filter(([, i]) => i >= 0)
      .sort(([one, i], [other, j]) => Math.abs(one.x[i] - x) - Math.abs(other.x[j] - x));
    this.group.point(spots.length ? spots[0][0].x[spots[0][1]] : null, this, event);
  }

  press(event) {
    if (!this.box || event.button !== 0 || event.pointerType !== "mouse") return;
    this.holder.setPointerCapture(event.pointerId);
    this.drag = { from: this.place(event)[0] };
    tip.remove();
  }

  release(event) {
    const { drag } = this;
    this.drag = null;
    if (!drag || drag.to === undefined || Math.abs(drag.to - drag.from) < 6) return;
    const { left, right } = this.box, width = this.shown.end - this.shown.start;
    const x = (px) => this.shown.start + width * (px - left) / (right - left);
    this.group.zoom({ start: x(Math.min(drag.from, drag.to)), end: x(Math.max(drag.from, drag.to)) });
    void event;
  }

  // arrows move the pointer, + and - zoom, Escape goes back to the whole
  type(event) {
    const { shown, group } = this;
    if (!shown) return;
    const width = shown.end - shown.start, middle = group.at ?? (shown.start + shown.end) / 2;
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) group.point(Math.min(shown.end, Math.max(shown.start, middle + by * width / 100)));
    else if (event.key === "+" || event.key === "=") group.zoom({ start: middle - width / 4, end: middle + width / 4 });
    else if (event.key === "-" && group.range) {
      const all = this.source.span(), start = Math.max(all.start, middle - width), end = Math.min(all.end, middle + width);
      group.zoom(start <= all.start && end >= all.end ? null : { start, end });
    } else if (event.key === "Escape" && group.range) group.zoom(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // one box with all values at the pointer, and with what happened there
  tell(event) {
    const at = this.group.at, near = (x, pixels) => Math.abs(this.px(x) - this.px(at)) <= pixels;
    const title = [];
    if (mode === "time") title.push(`after ${short(at)} ${units[1]}`);
    else title.push("step " + count(Math.round(at)));
    tip.replaceChildren(make("b", "", title.join(", ")));
    for (const each of [...this.drawn].sort((a, b) => a.lost - b.lost)) {
      const i = each.off ? -1 : nearest(each, at);
      if (i < 0 || !near(each.x[i], NEAR)) continue;
      const other = mode === "time" && each.step[i] !== null ? ` (step ${count(each.step[i])})`
        : each.x[i] === at ? "" : ` (step ${each.step[i]})`;
      const name = make("span", "", each.name + (each.lost ? ", replayed" : "") + other);
      tip.append(make("div", "", keyOf(each), name, make("em", "", read(this.spec, each.y[i]))));
    }
    const told = this.source.marks().filter((mark) => near(mark.x, NEAR));
    for (const mark of told.slice(0, TOLD)) {
      const sign = make("i", "", mark.shape.mark);
      sign.style.setProperty("--tone", `var(--${mark.shape.color})`);
      tip.append(make("div", "told", sign, make("span", "", mark.text)));
    }
    if (told.length > TOLD) tip.append(make("div", "told", make("i", ""), `and ${told.length - TOLD} more`));
    document.body.append(tip);
    const room = document.documentElement.clientWidth, left = event.clientX + 18;
    const fits = left + tip.offsetWidth < room - 8;
    tip.style.left = Math.max(8, fits ? left : Math.min(event.clientX - 18, room - 8) - tip.offsetWidth) + "px";
    tip.style.top = Math.max(8, Math.min(event.clientY - 24, innerHeight - tip.offsetHeight - 8)) + "px";
  }
}

// the point of a curve that is nearest in x; points are in order
function nearest(each, at) {
  let low = 0, high = each.x.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (!(each.x[middle] >= at)) low = middle + 1;
    else high = middle;
  }
  let best = -1;
  for (let i = Math.max(0, low - 3); i <= Math.min(each.x.length - 1, low + 3); i++) {
    if (isFinite(each.y[i]) && each.step[i] !== null
      && (best < 0 || Math.abs(each.x[i] - at) < Math.abs(each.x[best] - at))) best = i;
  }
  return best;
}

function keyOf(each) {
  const kind = each.area ? " area" : each.dots > 6 ? " dashed" : each.width > 2 ? " bold" : each.alpha < 1 ? " faint" : "";
  const sign = make("i", "key" + kind);
  sign.style.setProperty("--tone", each.tone.startsWith("hsl") ? each.tone : `var(--${each.tone})`);
  return sign;
}

// a card with a chart; its legend switches curves off and on
function chartCard(spec, group, source) {
  const unit = [spec.unit, spec.note].filter(Boolean).join(" \u00b7 ");
  const head = make("div", "head", make("h3", "", spec.title, ...(unit ? [make("span", "", unit)] : [])));
  const holder = make("div", "plot"), card = make("section", "card" + (spec.wide ? " wide" : ""), head, holder);
  holder.id = "plot-" + spec.id;
  const chart = new Chart(holder, spec, group, source);
  group.add(chart);
  const all = source.curves(spec).filter((each) => !each.lost);
  if (all.length > 1 || spec.legend) {
    const list = make("div", "keys");
    for (const each of all) {
      const button = make("button", "", keyOf(each), each.name), name = spec.id + " " + (each.key ?? each.name);
      button.type = "button";
      button.title = each.name;
      button.ariaPressed = String(!hidden.has(name));
      button.addEventListener("click", () => {
        if (!hidden.delete(name)) hidden.add(name);
        button.ariaPressed = String(!hidden.has(name));
        chart.ask();
      });
      list.append(button);
    }
    head.append(list);
  }
  return card;
}

function drawSpark(canvas, values, name) {
  const scale = devicePixelRatio || 1, width = 130, height = 30, pen = canvas.getContext("2d");
  canvas.width = width * scale;
  canvas.height = height * scale;
  pen.scale(scale, scale);
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return;
  const low = Math.min(...known), high = Math.max(...known);
  const y = (value) => height - 3 - (height - 6) * (value - low) / (high - low || 1);
  const x = (i) => 2 + (width - 4) * i / (values.length - 1);
  const path = new Path2D();
  let down = false;
  values.forEach((value, i) => {
    if (value !== null) path[down ? "lineTo" : "moveTo"](x(i), y(value));
    down = value !== null;
  });
  pen.strokeStyle = tone(name);
  pen.lineWidth = 1.5;
  pen.lineJoin = "round";
  pen.stroke(path);
}

// the exponential mean of both sides, as the report's curve (phalanx/report/history.py, `smooth`)
function smoothed(values, width) {
  if (width <= 1) return values.map(() => null);
  const decay = 1 - 2 / (1 + width);
  const sums = (ordered) => {
    let total = 0, weight = 0;
    return ordered.map((value) => {
      total = decay * total + (value ?? 0);
      weight = decay * weight + (value !== null);
      return [total, weight];
    });
  };
  const before = sums(values), after = sums([...values].reverse()).reverse();
  return values.map((value, i) => (value === null ? null
    : (before[i][0] + after[i][0] - value) / (before[i][1] + after[i][1] - 1)));
}
