"""The page of a report: its markup and style; what draws in it is `page_script.py`. The numbers come from `html.py`.
Nothing is fetched.

Everything here is ASCII, and a content policy in the page forbids any request, so that it opens offline for good.
"""

import re

from phalanx.report.page_script import PAGE_SCRIPT


def render_page(**parts: str) -> str:
    """The page with its parts put in. Parts are put in once, so that text of a part never counts as a place of one."""
    return re.sub(r"@@(\w+)@@", lambda place: parts[place[1]], _PAGE)


_STYLE = """
:root { color-scheme: light dark;
  --back: #f4f5f7; --card: #ffffff; --ink: #171a21; --soft: #667085; --line: #e3e6eb; --grid: #eef0f3;
  --blue: #2f6fde; --orange: #d9730d; --teal: #0f8f7f; --violet: #7a5af8; --red: #d92d20; --green: #12905a;
  --amber: #b7791f; --grey: #98a2b3; }
@media screen and (prefers-color-scheme: dark) { :root {
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
.grid .card { display: flex; flex-direction: column; }
.head { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 16px; margin-bottom: 6px; }
.head h3 { margin: 0; }
.keys { display: flex; flex-wrap: wrap; gap: 0 12px; }
.keys button { border: 0; padding: 0; font: inherit; font-size: 12.5px; text-align: left; color: var(--ink);
  background: none; cursor: pointer; } .keys button[aria-pressed=false] { opacity: .4; }
.key { display: inline-block; width: 18px; margin-right: 6px; vertical-align: 3px; border-top: 2px solid var(--tone); }
.key.faint { border-top-width: 1px; opacity: .6; } .key.dashed { border-top-style: dashed; }
.key.bold { border-top-width: 3px; }
.key.area { height: 9px; vertical-align: -1px; border-top-width: 1px;
  background: color-mix(in srgb, var(--tone) 35%, transparent); }
.plot { position: relative; flex: 1 0 auto; height: 250px; overflow: hidden; } .wide .plot { height: 350px; }
.rule { position: absolute; width: 0; border-left: 1px dotted var(--soft); pointer-events: none; }
.tip { position: fixed; z-index: 9; max-width: min(420px, calc(100vw - 16px)); padding: 7px 11px; font-size: 12.5px;
  color: var(--ink); background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  box-shadow: 0 4px 14px #0003; pointer-events: none; }
.tip b { font-weight: 600; } .tip div { display: flex; align-items: center; } .tip span { overflow-wrap: anywhere; }
.tip em { margin-left: auto; padding-left: 16px; font-style: normal; font-variant-numeric: tabular-nums; }
.tip .told { align-items: baseline; } .told i { flex: 0 0 24px; font-style: normal; font-weight: 700; }
.tip .key { flex: none; }
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
main.paper { width: 800px; padding: 0; } .paper .grid { grid-template-columns: 1fr 1fr; }
@media print { body { background: none; } .switch, .hint, .tip { display: none; } .scroll, pre { max-height: none; }
  .grid .card, .incidents li { break-inside: avoid; } }
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
<script type="text/plain" id="bokeh">@@bokeh@@</script>
<script>"""
    + PAGE_SCRIPT
    + """</script>
</body>
</html>
"""
)
