"""A real browser, headless: what it complains of, what it shows, and which text leaves its picture or its box."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from patience import patient

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (Debian's package chromium)")
FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--disable-background-networking", "--no-first-run", "--enable-logging=stderr", "--v=0",
]  # fmt: skip
# Of an SVG: texts outside what its viewBox shows. Of a page: what is wider than the window or than its own box.
PROBE = """<script>addEventListener("load", () => {
  const out = [], near = 1
  for (const svg of document.querySelectorAll("svg")) {
    const room = svg.getBoundingClientRect()
    for (const text of svg.querySelectorAll("text")) {
      const box = text.getBoundingClientRect()
      if (!box.width) continue
      if (box.left < room.left - near || box.right > room.right + near
          || box.top < room.top - near || box.bottom > room.bottom + near) out.push("text: " + text.textContent)
    }
  }
  for (const each of document.querySelectorAll("body, body *:not(svg):not(svg *)")) {
    const style = getComputedStyle(each), scrolls = ["auto", "scroll"].includes(style.overflowX)
    if (each.scrollWidth > each.clientWidth + near && each.clientWidth && !scrolls && style.display !== "inline")
      out.push(each.tagName.toLowerCase() + ": " + each.textContent.slice(0, 60))
  }
  if (document.documentElement.scrollWidth > innerWidth + near) out.push("page: wider than its window")
  if (matchMedia("(prefers-color-scheme: dark)").matches !== DARK) out.push("page: the other colours are asked for")
  const found = document.createElement("pre")
  found.id = "overflows"
  found.textContent = JSON.stringify(out)
  document.body.append(found)
})</script>"""
PAGE = "<!doctype html><html><head><meta charset=utf-8><style>body {{ margin: 0 }}</style></head><body>{}</body></html>"


def browse(text: str, folder: Path) -> tuple[list[str], bytes]:
    """What a browser complains of on its console, and its screenshot of a page."""
    shot = folder / "shot.png"
    done = _run(text, folder, [f"--screenshot={shot}", "--window-size=1160,1400"])
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line], shot.read_bytes()


def overflows(text: str, folder: Path, width: int, dark: bool = False) -> list[str]:
    """The texts of an SVG or of a page that do not fit, in a window so wide."""
    page = PAGE.format(text) if text.lstrip().startswith("<svg") else text
    page = page.replace("</body>", PROBE.replace("DARK", str(dark).lower()) + "</body>")
    options = ["--dump-dom", f"--window-size={width},1400", *(["--force-dark-mode"] if dark else [])]
    found = re.search(r'<pre id="overflows">(.*?)</pre>', _run(page, folder, options).stdout, re.DOTALL)
    assert found is not None, "the page has no body, or its script has not run"
    said: list[str] = json.loads(unescape(found[1]))
    return said


def _run(text: str, folder: Path, options: list[str]) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    file = folder / "page.html"
    file.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", *options, file.as_uri()],
        capture_output=True, text=True, errors="replace", timeout=patient(90), env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done
