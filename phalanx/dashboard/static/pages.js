// ---- the pages: all runs, one run, a comparison. Text of a run is only ever set as text, never as markup.

const store = { runs: [], of: new Map() };  // what the stream has sent: the list, and sections by run
const of = (id) => store.of.get(id) ?? {};
const picked = new Set();  // runs that are chosen for a comparison
const chosen = { filter: "", at: 0, smoothing: 1 };
const PALETTE = ["blue", "orange", "teal", "violet", "red", "green", "amber", "grey",
  "hsl(330 65% 55%)", "hsl(190 70% 45%)", "hsl(75 55% 42%)", "hsl(260 50% 55%)"];

// what runs are called: those of one name by as much of their folders as tells them apart
function callings(runs) {
  const parts = new Map(runs.map((run) => [run.id, (run.folder || run.name || "").split("/")])), named = new Map();
  for (const { id, name } of runs) named.set(name, [...(named.get(name) ?? []), id]);
  return new Map(runs.map(({ id, name }) => {
    const others = named.get(name).filter((other) => other !== id), tail = (one, n) => parts.get(one).slice(-n).join("/");
    let n = 1;
    while (n < parts.get(id).length && others.some((other) => tail(other, n) === tail(id, n))) n += 1;
    return [id, others.length ? tail(id, n) : name];
  }));
}

const el = (tag, name, ...inside) => make(tag, name, ...inside.filter((each) => each !== null && each !== undefined));
const link = (to, name, ...inside) => Object.assign(el("a", name, ...inside), { href: to });
function button(text, name, act, title = "") {
  const made = el("button", name, text);
  made.type = "button";
  made.title = title;
  made.addEventListener("click", act);
  return made;
}

function since(seconds) {
  if (seconds < 1.5) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} d ago`;
}
const later = window.requestIdleCallback ?? ((act) => setTimeout(act, 100));  // once the page is drawn
const two = (number) => String(number).padStart(2, "0");
function clock(moment) {
  if (moment === null || moment === undefined) return "";
  const date = new Date(1000 * moment), today = Date.now() - date < 43200e3;
  const time = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  return today ? time : `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${time}`;
}
const pill = (word, kind) => el("span", `pill ${kind}${word === "running" ? " live" : ""}`, word);
function meter(part, kind) {
  const fill = el("i", kind);
  fill.style.width = `${100 * Math.min(1, Math.max(0, part || 0))}%`;
  return el("div", "meter", fill);
}

// ------------------------------------------------------------------------------------------------------- all runs

class RunsPage {
  constructor() {
    this.rows = new Map();
    this.filter = Object.assign(el("input", "field"), { type: "search", placeholder: "Filter runs  ( / )", value: chosen.filter,
      ariaLabel: "Filter runs" });
    this.filter.id = "filter";
    this.filter.addEventListener("input", () => { chosen.filter = this.filter.value; chosen.at = 0; this.update(); });
    this.facts = el("span", "hint");
    this.compare = button("Compare", "solid", () => { location.hash = `#/compare/${[...picked].join(",")}`; },
      "Compare the chosen runs (c)");
    this.body = el("tbody", "");
    const head = el("tr", "", ...["", "run", "loss curve", "progress", "loss", "throughput", "goodput", "incidents", "last record"]
      .map((name, i) => el("th", i === 4 || i === 5 || i === 6 ? "right" : "", name)));
    const table = el("table", "", el("thead", "", head), this.body);
    this.none = el("div", "empty", "");
    this.element = el("div", "", el("div", "title", el("h1", "", "Runs"), this.facts),
      el("div", "tools", this.filter, el("span", "spacer"), this.compare), el("section", "card runs", table, this.none), this.cluster = el("div", "stack"));
  }

  showCluster(found) {
    const rows = (name, note, list, none) => el("section", "card", el("div", "head", el("h3", "", name, el("span", "", note))),
      list.length ? columns(list) : el("div", "empty", none));
    this.cluster.replaceChildren(rows(`Cluster ${found.name}`, found.error || found.status, found.nodes, "No nodes."),
      rows("Queue", `${found.queue.length} job${found.queue.length === 1 ? "" : "s"}`, found.queue, "No jobs."));
  }

  runs() { return []; }

  seen() {
    const words = chosen.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (run) => `${run.name} ${run.state ?? ""} ${run.folder ?? ""}`.toLowerCase();
    const order = { running: 0, waiting: 1 };
    return store.runs.filter((run) => words.every((word) => text(run).includes(word)))
      .sort((a, b) => (order[a.state] ?? 2) - (order[b.state] ?? 2) || (b.last_line ?? 0) - (a.last_line ?? 0));
  }

  update() {
    const found = this.seen(), by = {};
    this.called = callings(store.runs);
    for (const run of store.runs) by[run.state ?? "unreadable"] = (by[run.state ?? "unreadable"] ?? 0) + 1;
    this.facts.textContent = Object.entries(by).map(([state, number]) => `${number} ${state}`).join(" \u00b7 ");
    chosen.at = Math.max(0, Math.min(chosen.at, found.length - 1));
    this.order = found.map((run) => run.id);
    const rows = found.map((run) => this.row(run));
    rows.forEach((row, i) => {
      row.classList.toggle("at", i === chosen.at);
      if (this.body.children[i] !== row) this.body.insertBefore(row, this.body.children[i] ?? null);
    });
    while (this.body.children.length > rows.length) this.body.lastChild.remove();
    this.none.hidden = rows.length > 0;
    this.none.textContent = store.runs.length ? "No run matches the filter." : "No runs yet. A run appears here within "
      + "seconds of its start.";
    if (store.cluster && this.shown !== store.cluster) this.showCluster(this.shown = store.cluster);
    this.compare.disabled = picked.size < 2;
    this.compare.textContent = picked.size < 2 ? "Compare" : `Compare ${picked.size} runs`;
    this.tick();
  }

  row(run) {
    let row = this.rows.get(run.id);
    if (!row) {
      row = el("tr", "");
      row.addEventListener("click", (event) => {
        if (!event.target.closest("input, a")) location.hash = `#/run/${run.id}`;
      });
      row.canvas = el("canvas", "spark");
      this.rows.set(run.id, row);
    }
    const called = this.called.get(run.id), key = called + JSON.stringify(run);
    if (row.key === key) return row;
    row.key = key;
    const check = Object.assign(el("input", ""), { type: "checkbox", checked: picked.has(run.id),
      ariaLabel: `Compare ${called}` });
    check.addEventListener("change", () => {
      picked[check.checked ? "add" : "delete"](run.id);
      this.update();
    });
    row.check = check;
    const name = Object.assign(link(`#/run/${run.id}`, "", called), { title: run.folder ?? "" });
    if (run.error) {
      row.replaceChildren(el("td", "", check), el("td", "name", name), Object.assign(el("td", "soft", run.error), { colSpan: 7 }));
      return row;
    }
    const kind = { bad: "bad", warn: "warn", good: "good" }[run.tone] ?? "";
    const share = run.steps ? `${Math.floor(100 * run.step / run.steps)} %` : "";
    const left = run.left ? `${run.left} left` : share;
    row.ago = el("td", "ago soft", "");
    row.last = run.last_line;
    const trouble = el("td", "trouble", run.incidents ? el("span", "badge warn", String(run.incidents)) : el("span", "soft", "0"));
    row.replaceChildren(el("td", "", check), el("td", "name", name, el("small", "", run.ranks || run.folder)),
      el("td", "spark", row.canvas),
      el("td", "way", el("div", "steps", pill(run.state, run.tone), el("span", "num soft", `${count(run.step)}`
        + (run.steps ? ` / ${count(run.steps)}` : "") + (left ? ` \u00b7 ${left}` : ""))),
        meter(run.steps ? run.step / run.steps : 0, kind)),
      el("td", "right num loss", run.loss === null ? "-" : run.loss.toFixed(4)), el("td", "right num rate", run.rate ?? "-"),
      el("td", "right num useful soft", run.goodput === null ? (run.read !== null ? `reading ${Math.round(100 * run.read)} %` : "-")
        : `${(100 * run.goodput).toFixed(1)} %`), trouble, row.ago);
    drawSpark(row.canvas, run.spark, "blue");
    return row;
  }

  tick() {
    for (const row of this.rows.values()) {
      if (row.ago) row.ago.textContent = row.last ? since(Date.now() / 1000 - row.last) : "";
    }
  }

  recolor() { for (const row of this.rows.values()) row.key = ""; this.update(); }

  type(key) {
    const id = this.order?.[chosen.at];
    if (key === "j" || key === "ArrowDown") chosen.at += 1;
    else if (key === "k" || key === "ArrowUp") chosen.at -= 1;
    else if (key === "Enter" && id) location.hash = `#/run/${id}`;
    else if (key === "x" && id) {
      picked[picked.has(id) ? "delete" : "add"](id);
      this.rows.get(id).check.checked = picked.has(id);
    } else if (key === "c" && picked.size > 1) location.hash = `#/compare/${[...picked].join(",")}`;
    else return false;
    this.update();
    this.body.children[chosen.at]?.scrollIntoView({ block: "nearest" });
    return true;
  }

  close() {}
}

// ------------------------------------------------------------------------------------------------------- one run

// by step or by time, and how much curves are smoothed
function chartTools(page) {
  const switches = ["step", "time"].map((name) => {
    const made = button(`by ${name}`, "", () => page.setMode(name), "Switch the axis (t)");
    made.dataset.mode = name;
    made.ariaPressed = String(mode === name);
    return made;
  });
  const slide = Object.assign(el("input", ""), { type: "range", min: 0, max: 4, step: 0.25, ariaLabel: "Smoothing" });
  slide.value = chosen.smoothing;
  slide.addEventListener("input", () => { chosen.smoothing = Number(slide.value); page.redraw(); });
  const whole = button("Reset zoom", "ghost", () => page.group.zoom(null), "Back to the whole (Esc)");
  whole.hidden = true;
  page.group.onZoom = (range) => { whole.hidden = range === null; page.zoomed?.(range); };
  return el("div", "tools", el("h2", "", page.heading ?? "Curves"), el("div", "switch", ...switches),
    el("label", "slide", "smoothing", slide), whole, el("span", "spacer"),
    el("span", "hint", "drag to zoom, double-click to go back"));
}
function showMode() {
  for (const each of document.querySelectorAll(".switch button")) each.ariaPressed = String(each.dataset.mode === mode);
}
const smoothWidth = (length) => chosen.smoothing * Math.max(3, length / 50);

class RunPage {
  constructor(id) {
    this.id = id;
    this.group = new ChartGroup();
    this.title = el("h1", "", store.runs.find((run) => run.id === id)?.name ?? "");
    this.pill = el("span", "");
    this.about = el("p", "about");
    this.actions = el("div", "");
    if (document.body.dataset.actions === "yes") {
      this.stop = button("Stop after this step", "ghost danger", () => this.act("stop"));
      this.save = button("Save now", "ghost", () => this.act("save"));
      this.stop.disabled = this.save.disabled = true;  // until it is known to run
      this.actions.append(this.save, " ", this.stop);
    }
    this.note = el("div", "note");
    this.note.hidden = true;
    this.progress = el("div", "progress");
    this.tiles = el("dl", "tiles");
    this.line = el("section", "card");
    this.legend = el("div", "legend");
    this.grid = el("div", "grid");
    this.devices = el("section", "card");
    this.experts = el("section", "card");
    this.gpus = el("section", "card");
    this.nodes = el("section", "card");
    this.events = el("section", "card");
    this.done = {};
    this.curvesTools = chartTools(this);
    this.element = el("div", "", el("div", "title", this.title, this.pill, el("span", "spacer"), this.actions), this.about,
      this.note, this.progress, this.tiles, el("div", "stack", this.line), this.curvesTools, this.legend, this.grid,
      el("div", "stack", this.experts, this.devices, this.gpus, this.nodes, this.events));
    for (const each of [this.line, this.experts, this.devices, this.gpus, this.nodes, this.events]) each.hidden = true;
  }

  runs() { return [this.id]; }

  update() {
    const found = of(this.id), left = store.runs.find((run) => run.id === this.id)?.left;
    if (found.facts && (this.done.facts !== found.facts || this.done.left !== left)) {
      this.done.left = left;  // it comes with the list
      this.showFacts(this.done.facts = found.facts, left);
    }
    if (found.charts && found.rows && (this.done.charts !== found.charts || this.done.rows !== found.rows.stamp)) {
      this.done.rows = found.rows.stamp;
      this.showCharts(found, this.done.charts !== found.charts);
      this.done.charts = found.charts;
    }
    if (found.story && found.charts && this.done.story !== found.story) this.showStory(this.done.story = found.story, found.charts);
    if ("devices" in found && this.done.devices !== found.devices) this.showDevices(this.done.devices = found.devices);
    if ("experts" in found && this.done.experts !== found.experts) this.showExperts(this.done.experts = found.experts);
    if ("gpus" in found && this.done.gpus !== found.gpus) this.showGpus(this.done.gpus = found.gpus);
    if (store.runs.length && !store.runs.some((run) => run.id === this.id)) this.showGone();
    this.tick();
  }

  showFacts(facts, left) {
    this.title.textContent = facts.name;
    document.title = `${facts.name} - Phalanx`;
    this.note.hidden = !facts.error && facts.read === null;
    this.note.className = facts.error ? "note bad" : "note";
    if (facts.error) { this.note.textContent = facts.error; return; }
    this.note.textContent = facts.read === null ? "" : `Reading the records of this run: ${Math.round(100 * facts.read)} %. `
      + "Curves show a sample of the steps until then.";
    this.pill.replaceChildren(pill(facts.state, facts.tone));
    this.ago = el("span", "", "");
    this.about.replaceChildren(...facts.about.map((text) => el("span", "", text)),
      ...(facts.job ? [el("span", "", facts.job)] : []), el("span", "mono", facts.folder), this.ago);
    if (this.stop) this.stop.disabled = this.save.disabled = !facts.running;
    const part = facts.steps ? facts.step / facts.steps : 0, kind = { bad: "bad", warn: "warn", good: "good" }[facts.tone] ?? "";
    this.progress.replaceChildren(el("div", "steps", el("span", "num", `step ${count(facts.step)}`
      + (facts.steps ? ` of ${count(facts.steps)}` : "")), el("span", "num soft", (facts.steps ? `${(100 * part).toFixed(1)} %` : "")
      + (left ? ` \u00b7 ${left} left` : ""))), meter(part, kind));
    this.tiles.replaceChildren(...facts.tiles.map((tile) => el("div", tile.tone, el("dt", "", tile.label),
      el("dd", "num", tile.value), Object.assign(el("p", "", tile.note), { title: tile.note }))));
    this.nodes.hidden = !facts.nodes.length;
    const kinds = { ok: "good", watch: "warn", reset: "bad", reboot: "bad", isolate: "bad" };
    this.nodes.replaceChildren(el("div", "head", el("h3", "", "Nodes")), table(["node", "state", "health", "request"],
      facts.nodes.map((node) => [node.node, node.state, node.health ? pill(node.health, kinds[node.health] ?? "quiet") : "-",
        node.why || this.drainButton(node, facts)])));
  }

  showGone() {
    this.note.hidden = false;
    this.note.className = "note bad";
    this.note.textContent = "This run is not there: its folder was moved or removed.";
    if (this.stop) this.stop.disabled = this.save.disabled = true;
  }

  drainButton(node, facts) {
    const there = facts.nodes.filter((each) => each.state === "in the run").length;
    if (document.body.dataset.actions !== "yes" || node.state !== "in the run" || there < 2) return "";
    return button("Drain", "ghost", () => this.act("drain", node.node.split(" ")[0]), `The run leaves node ${node.node}`);
  }

  // ---- curves

  use(found) {
    const { columns } = found.rows, seen = this.detail ?? columns;
    seen.smooth = smoothed(seen.loss, smoothWidth(seen.loss.length));
    found.charts.lost.smooth = found.charts.lost.loss.map(() => null);
    take({ ...found.charts, kept: seen });
    this.all = columns;
    this.memo = new Map();
  }

  // what charts draw: `data` of the shared script is this run while its page is open
  source() {
    return {
      curves: (spec) => {
        if (!this.memo.has(spec.id)) this.memo.set(spec.id, curves(spec));
        const made = this.memo.get(spec.id);
        for (const each of made) if (hidden.has(spec.id + " " + each.name) !== each.off) { this.memo.delete(spec.id); break; }
        return this.memo.get(spec.id) ?? curves(spec);
      },
      span: () => {
        const kept = data.kept;
        data.kept = this.all;
        const found = span();
        data.kept = kept;
        return isFinite(found.start) && isFinite(found.end) ? found : { start: 0, end: 1 };
      },
      marks: () => {
        const xs = place({ step: data.events.map((one) => one.step), t: data.events.map((one) => one.t) });
        return data.events.map((one, i) => ({ ...one, x: xs[i], shape: shapes[one.class] }));
      },
      replayed: () => (mode === "step" ? [...new Set(data.lost.attempt)].map((attempt) => {
        const steps = data.lost.step.filter((_, i) => data.lost.attempt[i] === attempt);
        return [steps[0], steps.at(-1)];
      }) : []),
    };
  }

  showCharts(found, again) {
    this.use(found);
    const ids = JSON.stringify(found.charts.charts.map((spec) => [spec.id, spec.unit, spec.note, spec.traces.map((one) => one.name),
      found.charts.heldOut.map((set) => set.name)]));
    if (ids !== this.ids) {
      this.ids = ids;
      const { range } = this.group;
      this.group.close();
      this.group.charts = [];
      this.group.range = range;
      const source = this.source();
      this.grid.replaceChildren(...found.charts.charts.map((spec) => chartCard(spec, this.group, source)));
      if (!found.charts.charts.length) this.grid.append(el("div", "card empty wide", "No step was recorded yet."));
    } else if (again) {
      found.charts.charts.forEach((spec, i) => { this.group.charts[i].spec = spec; });
    }
    if (again) {
      const kinds = Object.entries(shapes).filter(([kind]) => data.events.some((event) => event.class === kind));
      this.legend.replaceChildren(...kinds.map(([, shape]) => {
        const sign = el("i", "", shape.mark);
        sign.style.setProperty("--tone", `var(--${shape.color})`);
        return el("span", "", sign, shape.word);
      }));
      this.legend.style.marginBottom = kinds.length ? "10px" : "0";
    }
    this.group.draw();
  }

  redraw() {
    if (!of(this.id).rows || !of(this.id).charts) return;
    this.use(of(this.id));
    this.group.draw();
  }

  setMode(name) {
    if (mode === name) return;
    mode = name;
    this.detail = null;
    showMode();
    this.group.zoom(null);
    this.redraw();
  }

  // a stretch that is zoomed into is read again with all its steps, where the whole curve has few of them there
  async zoomed(range) {
    this.detail = null;
    this.asked = range;
    const found = of(this.id);
    if (range && found.rows) {
      const xs = place(found.rows.columns), inside = found.rows.columns.step.filter((_, i) => xs[i] >= range.start && xs[i] <= range.end);
      const first = inside[0], last = inside.at(-1);
      if (inside.length > 1 && last - first > inside.length) {
        const answer = await fetch(`rows?run=${this.id}&first=${Math.max(0, first - 1)}&last=${last + 1}`);
        if (!answer.ok || this.asked !== range) return;
        const columns = await answer.json();
        if (columns.step.length > inside.length) this.detail = columns;
      }
    }
    this.redraw();
  }

  // ---- what happened

  showStory(story, charts) {
    this.line.hidden = !story.events.length;
    const end = Math.max(story.ended, of(this.id).facts?.running ? Date.now() / 1000 : 0), whole = Math.max(1e-3, end - story.began);
    const track = el("div", "line", el("div", "base"));
    const put = (name, from, to, title) => {
      const made = el("div", name);
      made.style.left = `${100 * Math.max(0, (from - story.began) / whole)}%`;
      if (to !== null) made.style.width = `${100 * Math.min(1, (to - from) / whole)}%`;
      made.title = title;
      track.append(made);
    };
    for (const [from, to] of story.pauses) put("span pause", from, to, "not running");
    for (const mark of charts.events.filter((one) => one.class === "saved").slice(-400)) put("tick good", story.began + mark.t, null, mark.text);
    for (const each of story.incidents.filter((one) => one.time !== null)) {
      const to = each.recovery_s === null ? end : each.time + each.recovery_s;
      put(`span hit ${each.recovery_s === null ? "bad" : "warn"}`, each.time, to, each.text);
    }
    const found = [...story.incidents, ...story.warnings].sort((a, b) => (b.time ?? 0) - (a.time ?? 0));
    const list = el("ul", "incidents", ...found.slice(0, this.more ? found.length : 6).map((each) => el("li", each.tone,
      el("time", "num", clock(each.time)), el("span", "", each.text))));
    const rest = found.length > 6 && !this.more ? [button(`Show all ${found.length}`, "ghost", () => {
      this.more = true;
      this.showStory(story, charts);
    })] : [];
    const told = story.incidents.length ? `${story.incidents.length} incident${story.incidents.length === 1 ? "" : "s"}` : "no incident";
    this.line.replaceChildren(el("div", "head", el("h3", "", "Time line", el("span", "", told))), track,
      el("div", "axis num", el("span", "", clock(story.began)), el("span", "", clock(end))), ...(found.length ? [list] : []), ...rest);
    later(() => this.showEvents(story));
  }

  showEvents(story) {
    this.events.hidden = !story.events.length;
    const rows = [...story.events].reverse().map((each) => el("tr", each.tone, el("td", "num", clock(each.time)),
      el("td", "num", each.attempt === null ? "" : String(each.attempt)), el("td", "", el("i", "", each.symbol), each.text)));
    const top = this.events.querySelector(".tall")?.scrollTop ?? 0;
    const few = story.more ? `the newest ${story.events.length} of ${count(story.events.length + story.more)}` : "newest first";
    const head = el("tr", "", ...["at", "attempt", "what happened"].map((name) => el("th", "", name)));
    this.events.replaceChildren(el("div", "head", el("h3", "", "Events", el("span", "", few))), el("div", "scroll tall",
      el("table", "events", el("thead", "", head), el("tbody", "", ...rows))));
    this.events.querySelector(".tall").scrollTop = top;
  }

  showDevices(found) {
    this.devices.hidden = !found;
    if (!found) return;
    const grid = el("div", "ranks", el("b", "", found.of), el("b", "what", "device"), el("b", "", "sequences"),
      el("b", "", "busy, and waiting"), el("b", "rate", "sequences/s"));
    for (const row of found.rows) {
      const busy = el("i", "");
      busy.style.width = `${100 * row.busy}%`;
      const bar = el("div", "bar", busy);
      bar.title = `busy ${Math.round(100 * row.busy)} %, waiting ${Math.round(100 - 100 * row.busy)} %, ${(100 * row.share).toFixed(1)} % of the work`;
      grid.append(el("span", "num", String(row.rank)), Object.assign(el("span", "what", row.name || "-"), { title: row.name }),
        el("span", "num right", String(row.sequences)), bar, el("span", "num right rate soft", row.rate ?? "-"));
    }
    const said = [found.about, found.verdict].filter(Boolean).join("; ");
    this.devices.replaceChildren(el("div", "head", el("h3", "", "Who does how much, and who waits", el("span", "", said))), grid);
  }

  showExperts(found) {
    this.experts.hidden = !found;
    if (!found) return;
    const cell = 12, map = el("canvas", ""), pen = map.getContext("2d");
    [map.width, map.height] = [cell * found.load[0].length, cell * found.load.length];
    pen.fillStyle = tone("orange");
    found.load.forEach((row, y) => row.forEach((load, x) => {
      pen.globalAlpha = Math.min(1, Math.max(0, load) / found.full);
      pen.fillRect(cell * x, cell * y, cell, cell);
    }));
    map.onmousemove = (event) => {
      const [x, y] = [event.offsetX, event.offsetY].map((at) => Math.floor(at / cell)), load = found.load[y]?.[x];
      map.title = load === undefined ? "" : `layer ${found.layers[y]}, expert ${x}: ${load.toFixed(2)} times the mean`;
    };
    this.experts.replaceChildren(el("div", "head", el("h3", "", "Load of experts", el("span", "", found.note))), el("div", "scroll", map));
  }

  showGpus(found) {
    this.gpus.hidden = !found.length;
    const drawn = [], head = ["node", "GPU", "temperature", "", "power", "", "errors corrected", "not corrected", "sampled"];
    const curve = (values, tone) => {
      const canvas = el("canvas", "spark");
      drawn.push([canvas, values, tone]);
      return el("td", "spark", canvas);
    };
    const now = (values, unit) => el("td", "num right", values.at(-1) === null ? "-" : `${Math.round(values.at(-1))} ${unit}`);
    const errors = (number, tone) => el("td", `num right ${number ? tone : ""}`, number === null ? "-" : count(number));
    const rows = found.map((row) => el("tr", "", el("td", "", row.node),
      el("td", "name", `${row.gpu} `, row.lost ? pill("lost", "bad") : el("span", "soft", row.name)),
      now(row.temperature, "°C"), curve(row.temperature, "orange"), now(row.power, "W"), curve(row.power, "teal"),
      errors(row.corrected, "warn"), errors(row.uncorrected, "bad"),
      el("td", "num right soft", `${clock(row.since)} to ${clock(row.at)}`)));
    this.gpus.replaceChildren(el("div", "head", el("h3", "", "GPUs")), el("div", "scroll",
      el("table", "", el("thead", "", el("tr", "", ...head.map((name, i) => el("th", name && i > 1 ? "right" : "", name)))), el("tbody", "", ...rows))));
    for (const [canvas, values, tone] of drawn) drawSpark(canvas, values, tone);
  }

  act(name, node = null) {
    const words = { drain: [`Drain node ${node}?`, "All ranks save, then the run continues without the node.", "Drain"], stop: ["Stop this run?", "It finishes the step, saves a checkpoint and exits. The same command resumes it.", "Stop"],
      save: ["Save a checkpoint now?", "It is saved after the current step, while training continues.", "Save"] }[name];
    ask(words[0], words[1], words[2], async () => {
      const answer = await fetch(`actions/${name}`, { method: "POST", headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ run: this.id, node }) });
      const told = await answer.json();
      ask(told.error ? "This did not work" : "Done", told.error ?? told.done);
    });
  }

  tick() {
    const facts = of(this.id).facts;
    if (this.ago && facts?.last_line) this.ago.textContent = `last record ${since(Date.now() / 1000 - facts.last_line)}`;
  }

  recolor() {
    this.redraw();
    this.showExperts(this.done.experts);
  }

  type(key) {
    if (key === "t") this.setMode(mode === "step" ? "time" : "step");
    else if (key === "l") location.hash = `#/run/${this.id}/logs`;
    else if (key === "o") location.hash = `#/run/${this.id}/config`;
    else if (key === "Escape" && this.group.range) this.group.zoom(null);
    else return false;
    return true;
  }

  close() { this.group.close(); }
}

function table(names, rows) {
  const cell = (value) => el("td", "", value ?? "");
  return el("div", "scroll", el("table", "", el("thead", "", el("tr", "", ...names.map((name) => el("th", "", name)))),
    el("tbody", "", ...rows.map((row) => el("tr", "", ...row.map(cell))))));
}

const columns = (rows) => table(Object.keys(rows[0]), rows.map((row) => Object.values(row)));

class ConfigPage {
  constructor(id) {
    this.id = id;
    this.title = el("h1", "", nameOf(id));
    this.stack = el("div", "stack");
    this.element = el("div", "", el("div", "title", this.title), this.stack);
  }

  runs() { return [this.id]; }

  update() {
    const found = of(this.id).config;
    if (!found || this.done === found) return;
    this.done = found;
    const versions = Object.entries(found.versions);
    this.title.textContent = nameOf(this.id);
    this.stack.replaceChildren(el("section", "card", el("div", "head", el("h3", "", "Resolved configuration")),
      el("pre", "", found.text || "This run has no configuration yet.")),
      ...(versions.length ? [el("section", "card", el("div", "head", el("h3", "", "Versions")), table(["what", "version"], versions))] : []));
  }

  tick() {}
  recolor() {}
  type(key) {
    if (key === "l") location.hash = `#/run/${this.id}/logs`;
    else return false;
    return true;
  }
  close() {}
}

// ------------------------------------------------------------------------------------------------------- several runs

const COMPARED = [
  ["loss", "Loss", "smooth", { wide: true }], ["speed", "Throughput", "tokens_per_s", { zero: true, unit: "a second" }],
  ["norm", "Gradient norm", "grad_norm", {}], ["lr", "Learning rate", "lr", { zero: true }],
  ["time", "Step time", "step_s", { zero: true, unit: "s" }], ["mfu", "Model FLOPs utilisation", "mfu", { zero: true, percent: true }],
  ["memory", "Memory", "memory_gib", { zero: true, unit: "GiB, peak of the fullest rank" }],
];

class ComparePage {
  constructor(ids) {
    this.ids = ids;
    this.heading = "Curves";
    this.group = new ChartGroup();
    this.facts = el("section", "card runs");
    this.grid = el("div", "grid");
    this.diff = el("section", "card diff");
    this.element = el("div", "", el("div", "title", el("h1", "", `Comparison of ${ids.length} runs`)), el("div", "stack", this.facts),
      chartTools(this), this.grid, el("div", "stack", this.diff));
  }

  runs() { return this.ids; }
  tone(i) { return PALETTE[i % PALETTE.length]; }

  update() {
    const stamps = this.ids.map((id) => [of(id).rows?.stamp, of(id).facts?.step, of(id).facts?.state]);
    const key = JSON.stringify(stamps);
    if (key === this.key) return;
    this.key = key;
    const there = this.ids.filter((id) => of(id).rows && of(id).charts);
    this.called = callings(this.ids.map((id) => ({ id, name: nameOf(id), folder: of(id).facts?.folder })));
    const longest = Math.max(0, ...there.map((id) => of(id).charts.duration));
    take({ duration: longest, kept: {}, lost: {}, events: [], heldOut: [], scores: [] });
    const source = { curves: (spec) => this.curves(spec), marks: () => [], replayed: () => [], span: () => this.span() };
    const filled = COMPARED.filter(([, , column]) => there.some((id) => of(id).rows.columns[column === "smooth" ? "loss" : column]
      .some((value) => value !== null)));
    const times = there.flatMap((id) => of(id).rows.columns.step_s).filter((value) => value !== null).sort((a, b) => a - b);
    const usual = times[Math.floor(0.98 * (times.length - 1))] ?? 0, most = times.at(-1) ?? 0;
    this.top = most > 3 * usual ? 1.1 * times.findLast((value) => value <= 3 * usual) : null;  // a first step compiles
    const ids = JSON.stringify([filled.map(([id]) => id), there, [...this.called.values()]]);
    if (ids !== this.made) {
      this.made = ids;
      this.group.close();
      this.group.charts = [];
      this.grid.replaceChildren(...filled.map(([id, title, column, options]) => {
        const spec = { id, title, unit: "", column, traces: [], ...options };
        return chartCard(spec, this.group, source);
      }));
    }
    for (const { spec } of this.group.charts) if (spec.id === "time") spec.top = this.top;
    this.group.draw();
    this.showFacts();
    this.showDiff();
  }

  curves(spec) {
    return this.ids.flatMap((id, i) => {
      const columns = of(id).rows?.columns;
      if (!columns) return [];
      const name = this.called.get(id), dash = [], off = hidden.has(spec.id + " " + id);
      const more = { key: id, name, tone: this.tone(i), lost: false, area: false, dash, off, dots: columns.step.length < 8 ? 6 : 0 };
      const made = (column, width, alpha) => {
        const values = column === "smooth" ? smoothed(columns.loss, smoothWidth(columns.loss.length)) : columns[column];
        const found = points({ ...columns, shown: values }, "shown", false, false);
        return { ...found, ...more, top: found.y, width, alpha };
      };
      if (spec.column !== "smooth") return [made(spec.column, 1.6, 1)];
      return chosen.smoothing ? [{ ...made("loss", 1, 0.3), lost: true, off }, made("smooth", 2.2, 1)] : [made("loss", 1.4, 1)];
    });
  }

  span() {
    const all = this.ids.flatMap((id) => (of(id).rows ? place(of(id).rows.columns) : [])).filter((x) => x !== null);
    if (!all.length) return { start: 0, end: 1 };
    const low = all.reduce((a, b) => Math.min(a, b)), high = all.reduce((a, b) => Math.max(a, b));
    const edge = Math.max((high - low) * 0.012, high === low ? 1 : 0);
    return { start: low - edge, end: high + edge };
  }

  showFacts() {
    const labels = [...new Set(this.ids.flatMap((id) => of(id).facts?.tiles?.map((tile) => tile.label) ?? []))];
    const figure = (label, text) => {  // narrow pages have no head: each figure says there what it is
      const made = el("td", "right num", text);
      made.dataset.label = label;
      return made;
    };
    const head = el("tr", "", el("th", "", ""), el("th", "", "run"), el("th", "", "state"), el("th", "right", "step"),
      ...labels.map((name) => el("th", "right", name)));
    const rows = this.ids.map((id, i) => {
      const facts = of(id).facts, mark = el("i", "swatch");
      mark.style.setProperty("--tone", this.tone(i).startsWith("hsl") ? this.tone(i) : `var(--${this.tone(i)})`);
      if (!facts || facts.error) return el("tr", "", el("td", "", mark), el("td", "soft", facts?.error ?? "loading"));
      const value = (label) => facts.tiles.find((tile) => tile.label === label)?.value ?? "-";
      return el("tr", "", el("td", "", mark), el("td", "name", link(`#/run/${id}`, "", this.called.get(id))),
        el("td", "", pill(facts.state, facts.tone)), figure("step", count(facts.step)),
        ...labels.map((label) => figure(label, value(label))));
    });
    this.facts.replaceChildren(el("table", "", el("thead", "", head), el("tbody", "", ...rows)));
  }

  // keys of the recipes that are not the same in all runs
  showDiff() {
    const configs = this.ids.map((id) => flatten(of(id).config?.text ?? ""));
    const keys = [...new Set(configs.flatMap((each) => [...each.keys()]))];
    const differing = keys.filter((key) => new Set(configs.map((each) => each.get(key) ?? "")).size > 1);
    const names = ["key", ...this.called.values()];
    this.diff.replaceChildren(el("div", "head", el("h3", "", "Differences of the recipes", el("span", "", differing.length
      ? `${differing.length} of ${keys.length} keys` : "none"))), ...(differing.length ? [table(names,
      differing.map((key) => [key, ...configs.map((each) => each.get(key) ?? "-")]))] : []));
  }

  setMode(name) {
    if (mode === name) return;
    mode = name;
    showMode();
    this.group.zoom(null);
  }

  redraw() { this.group.draw(); }
  recolor() { this.group.draw(); }
  tick() {}
  close() { this.group.close(); }
  type(key) {
    if (key === "t") this.setMode(mode === "step" ? "time" : "step");
    else if (key === "Escape" && this.group.range) this.group.zoom(null);
    else return false;
    return true;
  }
}

// the keys of a configuration as Phalanx writes it: YAML in blocks, two spaces deeper for each section
function flatten(text) {
  const found = new Map(), path = [];
  for (const line of text.split("\n")) {
    const parts = /^( *)([\w.-]+):(?: (.*))?$/.exec(line);
    if (!parts) {
      const key = path.join(".");
      if (line.trim() && found.has(key)) found.set(key, `${found.get(key)} ${line.trim()}`.trim());
      continue;
    }
    path.length = Math.min(path.length, parts[1].length / 2);
    path.push(parts[2]);
    found.set(path.join("."), parts[3] ?? "");
  }
  return new Map([...found].filter(([key, value]) => value !== "" || ![...found.keys()].some((other) => other.startsWith(key + "."))));
}
