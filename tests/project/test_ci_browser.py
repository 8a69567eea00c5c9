"""`ci/browser` installs a browser in CI alone, where there is none; whatever happens, it stops no `make test`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "ci" / "browser"
CALLED = "the script has called apt-get"


def run(folder: Path, ci: str, there: Sequence[str] = (), apt_rc: int = 0, root: bool = True) -> tuple[list[str], str]:
    """Call the script with made-up tools; return what apt-get was asked, and what the script said."""
    tools = folder / "bin"
    tools.mkdir()
    for name in ("mktemp", "rm", "cat", "sh"):
        (tools / name).symlink_to(f"/bin/{name}" if Path(f"/bin/{name}").exists() else f"/usr/bin/{name}")
    calls = folder / "calls"
    scripts = {"id": f"echo {0 if root else 1000}", "apt-get": f'echo "$@" >>{calls}; echo "{CALLED}"; exit {apt_rc}'}
    for name, text in {**scripts, **dict.fromkeys(there, "exit 1")}.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (tools / name).chmod(0o755)
    environment = {"PATH": str(tools), "CI": ci, "TMPDIR": str(folder)}
    done = subprocess.run(["/bin/sh", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    asked = calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []
    return asked, done.stdout + done.stderr


@pytest.mark.parametrize(("ci", "there"), [("", ()), ("true", ("chromium",)), ("true", ("google-chrome",))])
def test_does_nothing(ci: str, there: tuple[str, ...], tmp_path: Path) -> None:
    assert run(tmp_path, ci, there) == ([], "")


def test_installs_in_ci(tmp_path: Path) -> None:
    (update, install), said = run(tmp_path, "true")
    assert update.startswith("update") and install.startswith("install") and "chromium-headless-shell" in install
    assert said == "browser: chromium-headless-shell installed\n"


def test_says_why_there_is_none(tmp_path: Path) -> None:
    asked, said = run(tmp_path, "true", apt_rc=100)
    assert len(asked) == 3 and CALLED in said and "tests of pictures will fail" in said


def test_only_root_installs(tmp_path: Path) -> None:
    asked, said = run(tmp_path, "true", root=False)
    assert asked == [] and "only root" in said


def test_browsers_are_those_that_tests_take() -> None:
    from browser import NAMES

    assert " ".join(NAMES) in SCRIPT.read_text(encoding="utf-8") and os.access(SCRIPT, os.X_OK)
