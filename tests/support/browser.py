"""A real browser, headless: what it complains of, what it shows, and which text leaves its picture or its box."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from html import escape, unescape
from pathlib import Path

import pytest
from patience import patient

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
REQUIRED = os.environ.get("CI") == "true"  # there ci/browser installs one: no test skips
BROWSER = pytest.mark.skipif(CHROMIUM is None and not REQUIRED, reason=f"none of {', '.join(NAMES)} here: ci/browser")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--disable-background-networking", "--no-first-run", "--enable-logging=stderr", "--v=0",
]  # fmt: skip
LOOK = Path(__file__).with_name("look.js")
PAGE = "<!doctype html><html><head><meta charset=utf-8><title>frames</title></head><body>{}</body></html>"
# As a README shows a picture: as wide as the page allows, on the page's own colour.
SHOWN = """<!doctype html><html><head><meta charset=utf-8><style>
  body {{ margin: 0; background: #fff }} svg {{ display: block; max-width: 100%; height: auto }}
  @media (prefers-color-scheme: dark) {{ body {{ background: #0d1117 }} }}
</style></head><body>{}</body></html>"""
PHONE, DESK = 400, 1200  # widths in CSS pixels
Look = tuple[str, int, str]  # of what, in a frame how wide, in which colours


def overflows(
    texts: Mapping[str, str], folder: Path, widths: Sequence[int] = (PHONE, DESK), dark: Sequence[bool] = (False, True)
) -> dict[Look, list[str]]:
    """What is wrong with each SVG or page, in frames so wide and in these colours; one browser has them all.

    `text:` leaves its picture or, in a page, its box. `page:` is wider than its window. `faint:` stands hardly out
    from what lies behind it.
    """
    pages = {name: SHOWN.format(text) if text.lstrip().startswith("<svg") else text for name, text in texts.items()}
    looks = [(name, width, "dark" if night else "light") for name in pages for width in widths for night in dark]
    given = json.dumps([[*look, pages[look[0]]] for look in looks]).replace("<", "\\u003c")
    script = LOOK.read_text(encoding="utf-8").replace("FRAMES", given)
    out = _run(PAGE.format(f"<script>{script}</script>"), folder, ["--dump-dom", f"--window-size={DESK},1400"]).stdout
    found = re.search(r'<pre id="found">(.*?)</pre>', out, re.DOTALL)
    assert found is not None, "the script has not run"
    said: list[list[str]] = json.loads(unescape(found[1]))
    return dict(zip(looks, said, strict=True))


def browse(texts: Mapping[str, str], folder: Path) -> tuple[list[str], bytes]:
    """What a browser complains of on its console, and its screenshot of pages in frames, one below another."""
    shot = folder / "shot.png"
    frames = [f'<iframe width="1160" height="1400" srcdoc="{escape(text)}"></iframe>' for text in texts.values()]
    done = _run(PAGE.format("".join(frames)), folder, [f"--screenshot={shot}", "--window-size=1200,1400"])
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line], shot.read_bytes()


def _run(text: str, folder: Path, options: list[str]) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None, "CI has no browser: ci/browser was to install one"
    file = folder / "page.html"
    file.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", *options, file.as_uri()],
        capture_output=True, text=True, errors="replace", timeout=patient(90), env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done
