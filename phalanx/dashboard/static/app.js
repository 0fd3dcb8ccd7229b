// ---- where the page is, the stream that feeds it, and the keyboard

let page = null, stream = null, streamed = "", drawing = 0;

function show() {
  const [, kind = "", what = "", part = "", name = ""] = location.hash.replace(/^#/, "").split("/");
  page?.close();
  tip.remove();
  const ids = what.split(",").filter((id) => /^[0-9a-f]+$/.test(id));
  if (kind === "run" && ids.length && part === "logs") page = new LogsPage(ids[0], name ? decodeURIComponent(name) : undefined);
  else if (kind === "run" && ids.length && part === "config") page = new ConfigPage(ids[0]);
  else if (kind === "run" && ids.length) page = new RunPage(ids[0]);
  else if (kind === "compare" && ids.length) page = new ComparePage(ids.slice(0, 11));
  else page = new RunsPage();
  document.title = "Phalanx";
  document.getElementById("main").replaceChildren(page.element);
  if (kind === "run" && ids.length) page.element.firstChild.append(tabs(ids[0], part));
  scrollTo(0, 0);
  showPath(kind, ids);
  connect();
  page.update();
}

function tabs(id, part) {
  const made = [["", "Overview"], ["logs", "Logs"], ["config", "Configuration"]].map(([key, name]) => {
    const to = link(`#/run/${id}${key ? "/" + key : ""}`, "", name);
    if (key === part) to.setAttribute("aria-current", "page");
    return to;
  });
  return el("nav", "tabs", ...made);
}

function showPath(kind, ids) {
  const path = document.getElementById("path");
  if (kind === "run") path.replaceChildren(link("#/", "", "runs"), el("b", "", nameOf(ids[0])));
  else if (kind === "compare") path.replaceChildren(link("#/", "", "runs"), el("b", "", "comparison"));
  else path.replaceChildren();
}
const nameOf = (id) => store.runs.find((run) => run.id === id)?.name ?? of(id).facts?.name ?? "";

// ---- the stream: closed while the page is hidden, since a browser has few connections to one server

function connect() {
  const wanted = page.runs().join(",");
  if (document.hidden || (stream && streamed === wanted)) return;
  stream?.close();
  streamed = wanted;
  store.of = new Map([...store.of].filter(([id]) => page.runs().includes(id)));
  const made = stream = new EventSource(`stream?runs=${wanted}`);
  state("warn", "connecting");
  made.addEventListener("open", () => state("good", "live"));
  made.addEventListener("error", () => {
    state("bad", "no connection; trying again");
    if (made.readyState === EventSource.CLOSED && stream === made) {
      stream = null;
      setTimeout(connect, 2000);
    }
  });
  made.addEventListener("runs", (event) => {
    store.runs = JSON.parse(event.data);
    soon();
  });
  made.addEventListener("cluster", (event) => {
    store.cluster = JSON.parse(event.data);
    soon();
  });
  for (const name of ["facts", "charts", "story", "devices", "gpus", "experts", "config"]) {
    made.addEventListener(name, (event) => {
      const told = JSON.parse(event.data);
      store.of.set(told.run, { ...of(told.run), [name]: told[name] });
      soon();
    });
  }
  made.addEventListener("curves", (event) => {
    const told = JSON.parse(event.data), old = of(told.run).rows;
    const goesOn = told.from > 0 && old && old.base === told.base;
    const columns = {};
    for (const [name, values] of Object.entries(told.columns)) {
      columns[name] = goesOn ? [...old.columns[name].slice(0, told.from), ...values] : values;
    }
    store.of.set(told.run, { ...of(told.run), rows: { base: told.base, columns, stamp: (old?.stamp ?? 0) + 1 } });
    soon();
  });
}

// one redraw for all that has come since the last frame
function soon() {
  if (drawing) return;
  drawing = requestAnimationFrame(() => {
    drawing = 0;
    page.update();
    const told = document.querySelector("#path b");
    const ids = page.runs();
    if (told && ids.length === 1 && !(page instanceof ComparePage)) told.textContent = nameOf(ids[0]);
  });
}

function state(kind, word) {
  const link = document.getElementById("link");
  link.className = kind;
  link.lastElementChild.textContent = word;
  link.title = word;
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    stream?.close();
    stream = null;
  } else connect();
});

// ---- questions and help

function ask(title, text, yes = null, act = () => {}) {
  const dialog = document.getElementById("dialog");
  const close = button(yes ? "Cancel" : "Close", "ghost", () => dialog.close());
  const buttons = yes ? [close, button(yes, "solid", () => { dialog.close(); act(); })] : [close];
  dialog.replaceChildren(el("h2", "", title), el("p", "", text), el("div", "row", ...buttons));
  dialog.showModal();
}

const KEYS = [["/", "filter runs, or search a log"], ["j k", "next, previous run"], ["Enter", "open the run"], ["x", "choose the run for a comparison"],
  ["c", "compare the chosen runs"], ["t", "curves by step or by time"], ["l", "logs of the run"], ["o", "configuration of the run"], ["f", "follow the log"],
  ["\u2190 \u2192 + \u2212", "on a chart: move and zoom"], ["Esc", "zoom out, or back"]];

function help() {
  const dialog = document.getElementById("dialog");
  dialog.replaceChildren(el("h2", "", "Keyboard"), el("dl", "", ...KEYS.flatMap(([key, told]) => [el("dt", "", ...key.split(" ")
    .map((one) => el("kbd", "", one))), el("dd", "", told)])), el("div", "row", button("Close", "ghost", () => dialog.close())));
  dialog.showModal();
}

document.getElementById("help").addEventListener("click", help);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("dialog").open) return;
  if (!(event.target instanceof Element)) return;
  const typing = event.target.matches("input:not([type=checkbox], [type=range]), textarea, select");
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "/") document.getElementById("filter")?.focus();
  else if (event.key === "?") help();
  else if (event.target.matches("a, button") && event.key === "Enter") return;
  else if (!page.type(event.key)) {
    if (event.key !== "Escape" || location.hash.length < 3) return;
    const [, kind, id, part] = location.hash.split("/");
    location.hash = kind === "run" && part ? `#/run/${id}` : "#/";
  }
  event.preventDefault();
});

addEventListener("hashchange", show);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { tones.clear(); page.recolor(); });
setInterval(() => page.tick(), 1000);
show();
