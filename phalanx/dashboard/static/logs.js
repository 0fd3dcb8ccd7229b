// ---- logs of a run: choose, search, follow

const LINES = 6000;  // on the page at once
const FOLLOW_MS = 700;
const ESCAPES = /\u001b\[[0-9;?]*[A-Za-z]/g;  // colours of a terminal

class LogsPage {
  constructor(id, name) {
    Object.assign(this, { id, name, start: 0, end: null, text: "" });
    this.files = el("nav", "card files");
    this.files.setAttribute("aria-label", "Logs");
    this.search = Object.assign(el("input", "field"), { type: "search", placeholder: "Search this log  ( / )", ariaLabel: "Search this log" });
    this.search.id = "filter";
    this.search.addEventListener("input", () => {
      clearTimeout(this.soon);
      this.soon = setTimeout(() => { this.text = this.search.value; this.open(this.name); }, 250);
    });
    this.follow = button("Follow", "ghost", () => this.setFollow(this.follow.ariaPressed !== "true"), "Follow the log (f)");
    this.follow.ariaPressed = "true";
    this.head = el("h3", "", "");
    this.lines = el("div", "text mono");
    this.lines.tabIndex = 0;
    this.lines.addEventListener("scroll", () => {
      const { scrollTop, scrollHeight, clientHeight } = this.lines;
      if (scrollHeight - scrollTop - clientHeight > 60 && this.follow.ariaPressed === "true" && !this.filling) this.setFollow(false);
    });
    this.title = el("h1", "", "");
    this.element = el("div", "", el("div", "title", this.title), el("div", "tools", this.search, this.follow, el("span", "spacer"),
      this.told = el("span", "hint", "")), el("div", "logs", this.files, el("section", "card", el("div", "head", this.head), this.lines)));
    this.list().then(() => this.open(this.name));
    this.timer = setInterval(() => this.poll(), FOLLOW_MS);
    this.lister = setInterval(() => this.list(), 5000);
  }

  runs() { return [this.id]; }

  update() { this.title.textContent = of(this.id).facts?.name ?? this.title.textContent; }

  async get(path) {
    const answer = await fetch(path);
    return answer.ok ? answer.json() : null;
  }

  async list() {
    if (document.hidden) return;
    const found = await this.get(`logs?run=${this.id}`);
    if (!found) return;
    const key = JSON.stringify([found.map((log) => [log.name, log.bytes]), this.name]);
    if (key === this.listed) return;
    this.listed = key;
    this.name ??= found.find((log) => log.name === "node-0.log")?.name ?? found[0]?.name;
    const groups = new Map();
    for (const log of found) {
      const [folder, file] = log.name.includes("/") ? log.name.split("/") : ["nodes and jobs", log.name];
      if (!groups.has(folder)) groups.set(folder, []);
      const made = el("button", "", el("span", "", file.replace(/\.log$/, "").replace(/^rank-0*(\d)/, "rank $1")), el("small", "", size(log.bytes)));
      made.type = "button";
      if (log.name === this.name) made.setAttribute("aria-current", "true");
      made.addEventListener("click", () => { location.hash = `#/run/${this.id}/logs/${encodeURIComponent(log.name)}`; });
      groups.get(folder).push(made);
    }
    this.files.replaceChildren(...[...groups].flatMap(([folder, made]) => [el("h3", "", folder.replace("attempt-", "attempt ")
      .replace(/ 0+(\d)/, " $1")), ...made]));
    if (!found.length) this.lines.replaceChildren(el("div", "soft", "This run has no logs here: only launched runs and ranks write them."));
  }

  async open(name) {
    if (!name) return;
    this.name = name;
    this.head.textContent = name;
    const text = this.text ? `&text=${encodeURIComponent(this.text)}` : "", asked = this.asked = {};
    const found = await this.get(`log?run=${this.id}&name=${encodeURIComponent(name)}${text}`);
    if (this.asked !== asked) return;
    this.lines.replaceChildren();
    this.last = null;
    if (!found) { this.lines.append(el("div", "soft", "This log cannot be read.")); return; }
    this.start = found.start;
    this.end = found.end;
    this.append(found.lines);
    this.earlier();
    this.tell(found);
    if (!this.text) this.last = found.lines.at(-1)?.[0] ?? null;
    if (!found.lines.length) this.lines.append(this.none = el("div", "soft", this.text ? "No line contains this text." : "This log is empty."));
    this.toEnd();
  }

  tell(found) {
    this.told.textContent = this.text ? `${found.lines.length} lines found in the last ${size(found.end - found.start)} of ${size(found.bytes)}`
      : size(found.bytes);
  }

  earlier() {
    if (this.start <= 0) return;
    const made = button("Earlier lines", "ghost", async () => {
      const text = this.text ? `&text=${encodeURIComponent(this.text)}` : "";
      const found = await this.get(`log?run=${this.id}&name=${encodeURIComponent(this.name)}&before=${this.start}${text}`);
      if (!found) return;
      made.remove();
      const before = this.lines.scrollHeight;
      this.lines.prepend(...found.lines.map((line) => this.line(line)));
      this.start = found.start;
      this.earlier();
      this.lines.scrollTop += this.lines.scrollHeight - before;
    });
    this.lines.prepend(made);
  }

  line([, raw]) {
    const text = raw.replace(ESCAPES, ""), tone = /\b(error|traceback|exception|fatal|killed|died|out of memory)\b/i.test(text) ? "bad"
      : /\bwarn(ing)?\b/i.test(text) ? "warn" : "";
    const made = el("div", tone);
    const word = this.text.toLowerCase(), low = text.toLowerCase();
    let from = 0;
    while (word && low.length === text.length) {
      const at = low.indexOf(word, from);
      if (at < 0) break;
      made.append(text.slice(from, at), el("mark", "", text.slice(at, at + word.length)));
      from = at + word.length;
    }
    made.append(text.slice(from) || "\u00a0");
    return made;
  }

  append(lines) {
    if (lines.length) this.none?.remove();
    this.lines.append(...lines.map((line) => this.line(line)));
    while (this.lines.children.length > LINES) this.lines.firstChild.remove();
  }

  async poll() {
    if (document.hidden || this.follow.ariaPressed !== "true" || !this.name || this.busy || this.end === null) return;
    this.busy = true;
    try {
      const asked = this.asked, from = this.last ?? this.end;  // the last line again, which may not have ended
      const found = await this.get(`log?run=${this.id}&name=${encodeURIComponent(this.name)}&after=${from}`);
      if (!found || asked !== this.asked) return;
      if (found.end === this.end) {  // nothing new, or a line that is longer than a part
        if (found.bytes > found.end) this.last = null;
        return;
      }
      if (this.last !== null && found.lines[0]?.[0] === this.last) this.lines.lastChild?.remove();
      if (!this.text) this.last = found.lines.at(-1)?.[0] ?? null;
      this.end = found.end;
      const word = this.text.toLowerCase();
      this.append(found.lines.filter(([, text]) => text.toLowerCase().includes(word)));
      if (!this.text) this.tell(found);
      this.toEnd();
    } catch (error) {
      void error;  // the server is away; the next poll tries again
    } finally {
      this.busy = false;
    }
  }

  toEnd() {
    if (this.follow.ariaPressed !== "true") return;
    this.filling = true;
    this.lines.scrollTop = this.lines.scrollHeight;
    requestAnimationFrame(() => { this.filling = false; });
  }

  setFollow(on) {
    this.follow.ariaPressed = String(on);
    if (on) this.open(this.name);
  }

  type(key) {
    if (key === "f") this.setFollow(this.follow.ariaPressed !== "true");
    else if (key === "o") location.hash = `#/run/${this.id}/config`;
    else return false;
    return true;
  }

  tick() {}
  recolor() {}
  close() { clearInterval(this.timer); clearInterval(this.lister); clearTimeout(this.soon); }
}

function size(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  const power = Math.min(4, Math.floor(Math.log(bytes) / Math.log(1024)) || 1);
  return `${Number((bytes / 1024 ** power).toPrecision(3))} ${["", "KiB", "MiB", "GiB", "TiB"][power]}`;
}
