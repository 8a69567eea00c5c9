"""A topology as one HTML file: the picture, which lights up what belongs together, and the report as text."""

from __future__ import annotations

from html import escape

from tokenring.display.safe_text import plain, plain_lines
from tokenring.topology.model.graph import Graph
from tokenring.topology.model.verdict import Verdict
from tokenring.topology.report.picture import LINKS, to_svg
from tokenring.topology.report.text import MAX_CELL, Block, Table, blocks, sentence

# Nothing may be loaded, whatever a dump contains.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
STYLE = """\
:root { color-scheme: light dark }
body { margin: 0; background: #ffffff; color: #22282f; font: 14px/1.45 Helvetica, Arial, sans-serif }
main { max-width: 1120px; margin: 0 auto }
.picture { overflow-x: auto } .picture > svg { display: block; width: 100%; height: auto }
section { margin: 0 28px 28px; padding: 14px; border: 1px solid #dfe4e9; border-radius: 8px }
pre, table { font: 12px/1.5 "DejaVu Sans Mono", Menlo, Consolas, monospace }
pre { margin: 0 0 12px; white-space: pre-wrap; overflow-wrap: anywhere }
.wide { margin: 0 0 12px; overflow-x: auto }
table { border-collapse: collapse } caption { text-align: left; padding-bottom: 4px }
th, td { padding: 2px 8px; text-align: left; white-space: nowrap; border-bottom: 1px solid #dfe4e9 }
th { font-weight: normal; color: #66707b }
svg.chosen .link { opacity: 0.12 } svg.chosen .node { opacity: 0.35 }
svg.chosen .link.near, svg.chosen .node.near { opacity: 1 }
@media (prefers-color-scheme: dark) {
  body { background: #14181d; color: #e8ecf0 }
  section, th, td { border-color: #2c333b }
  th { color: #9aa5b1 }
}
@media screen and (max-width: 700px) {
  section { margin: 0 8px 16px; padding: 8px }
  .picture > svg { min-width: 760px }
}
@media print {
  main { max-width: none }
  section { margin: 0; padding: 0; border: 0 }
  .wide { overflow: visible }
  table { font-size: 8px }
  th, td { padding: 1px 3px; white-space: normal; overflow-wrap: anywhere }
}
"""
SCRIPT = """\
const svg = document.querySelector("svg");
const all = kind => Array.from(svg.querySelectorAll(kind));
const mark = wanted => {
  for (const each of all(".link, .node")) each.classList.toggle("near", false);
  svg.classList.toggle("chosen", wanted !== null);
  if (wanted === null) return;
  const near = new Set([wanted]);
  for (const link of all(".link")) {
    if (link.dataset.a !== wanted && link.dataset.b !== wanted) continue;
    link.classList.add("near");
    near.add(link.dataset.a).add(link.dataset.b);
  }
  for (const node of all(".node")) node.classList.toggle("near", near.has(node.dataset.n));
};
for (const node of all(".node")) {
  node.addEventListener("mouseenter", () => mark(node.dataset.n));
  node.addEventListener("mouseleave", () => mark(null));
}
"""


def to_html(graph: Graph, verdict: Verdict) -> str:
    """Return the page: complete in itself."""
    title = plain(sentence(graph, verdict), 200)
    return f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{STYLE}{_kinds()}</style>
</head>
<body>
<main>
<div class="picture">
{to_svg(graph, verdict)}</div>
<section>
{"".join(map(_block, blocks(graph, verdict)))}</section>
</main>
<script>
{SCRIPT}</script>
</body>
</html>
"""


def _kinds() -> str:
    """Return the rules that colour cells as the picture colours links, faintly."""
    light = " ".join(f"td.{name} {{ background: {colours[0]}33 }}" for name, colours in LINKS.items())
    dark = " ".join(f"td.{name} {{ background: {colours[1]}33 }}" for name, colours in LINKS.items())
    return f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n"


def _block(block: Block) -> str:
    if not isinstance(block, Table):
        return f"<pre>{escape(plain_lines(chr(10).join(block)))}</pre>\n"
    head, *rows = block.rows
    kinds = block.kinds or tuple(("",) * (len(head) - 1) for _ in rows)
    lines = [f"<tr>{''.join(map(_heading, head))}</tr>"]
    for (name, *cells), row in zip(rows, kinds, strict=True):
        lines.append(f"<tr>{_heading(name)}{''.join(map(_cell, cells, row))}</tr>")
    caption = f"<caption>{escape(block.title)}</caption>\n" if block.title else ""
    return f'<div class="wide"><table>\n{caption}{chr(10).join(lines)}\n</table></div>\n'


def _heading(text: str) -> str:
    return f"<th>{escape(plain(text, MAX_CELL))}</th>"


def _cell(text: str, kind: str) -> str:
    of = f' class="{kind if kind in LINKS else "other"}"' if kind else ""
    return f"<td{of}>{escape(plain(text, MAX_CELL))}</td>"
