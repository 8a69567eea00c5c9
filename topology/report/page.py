"""A topology as one HTML file: the picture, which lights up what belongs together, and the report as text."""

from __future__ import annotations

from html import escape

from tokenring.display.safe_text import plain
from tokenring.topology.model.graph import Graph
from tokenring.topology.model.verdict import Verdict
from tokenring.topology.report.picture import to_svg
from tokenring.topology.report.text import report, sentence

# Nothing may be loaded, whatever a dump contains.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
STYLE = """\
:root { color-scheme: light dark }
body { margin: 0; background: #ffffff; color: #22282f; font: 14px/1.45 Helvetica, Arial, sans-serif }
main { max-width: 1120px; margin: 0 auto }
main > svg { display: block; width: 100%; height: auto }
pre { margin: 0 28px 28px; padding: 14px; overflow-x: auto; border: 1px solid #dfe4e9; border-radius: 8px;
  font: 12px/1.5 "DejaVu Sans Mono", Menlo, Consolas, monospace }
svg.chosen .link { opacity: 0.12 } svg.chosen .node { opacity: 0.35 }
svg.chosen .link.near, svg.chosen .node.near { opacity: 1 }
@media (prefers-color-scheme: dark) { body { background: #14181d; color: #e8ecf0 } pre { border-color: #2c333b } }
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
{STYLE}</style>
</head>
<body>
<main>
{to_svg(graph, verdict)}<pre>{escape(report(graph, verdict))}</pre>
</main>
<script>
{SCRIPT}</script>
</body>
</html>
"""
