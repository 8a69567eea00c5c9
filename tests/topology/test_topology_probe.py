"""Tools of vendors that hang, fail, print without end or may not be run: a note each, within a time limit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import patient

from tokenring.topology.probing import probe
from tokenring.topology.probing.probe import Hangs, NoAnswer, run_command

Tool = Callable[[str], tuple[str, ...]]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """A shell script that is first in PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def make(script: str) -> tuple[str, ...]:
        path = tmp_path / "acme-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return ("acme-smi", "topo", "$(-m)")

    return make


class TestRunCommand:
    def test_an_answer(self, tool: Tool) -> None:
        """No shell reads the arguments, and the locale is C."""
        assert run_command(tool('echo "$2 $LC_ALL"; echo failed >&2')) == "$(-m) C\nfailed\n"

    def test_a_failure(self, tool: Tool) -> None:
        with pytest.raises(NoAnswer, match=r"exit code 9: no\s+driver"):
            run_command(tool("echo no; echo driver; exit 9"))

    def test_no_such_tool(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for path in ("", str(tmp_path), str(tmp_path / "none"), "/dev/null"):
            monkeypatch.setenv("PATH", path)
            with pytest.raises(FileNotFoundError):
                run_command(("acme-smi",))

    def test_may_not_be_run(self, tool: Tool, tmp_path: Path) -> None:
        command = tool("echo")
        (tmp_path / "acme-smi").chmod(0o644)
        with pytest.raises(NoAnswer, match="may not be run by this user"):
            run_command(command)

    def test_no_program(self, tool: Tool, tmp_path: Path) -> None:
        command = tool("echo")
        (tmp_path / "acme-smi").write_text("junk")
        with pytest.raises(NoAnswer, match="Exec format error"):
            run_command(command)

    def test_no_answer_leaves_nothing(self, tool: Tool, tmp_path: Path) -> None:
        """Not even what the tool itself has started."""
        with pytest.raises(Hangs, match=r"no answer in 0\.3 s"):
            run_command(tool(f"sleep 60 & echo $! > {tmp_path}/pid; sleep 60"), 0.3)
        child = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
        deadline = time.monotonic() + patient(5)
        while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def test_no_end(self, tool: Tool) -> None:
        with pytest.raises(NoAnswer, match="it prints more than 1048576 bytes"):
            run_command(tool("exec yes"))


def test_a_tool_that_hangs_is_asked_once() -> None:
    asked: list[tuple[str, ...]] = []

    def run(command: tuple[str, ...]) -> str:
        asked.append(command)
        raise Hangs("no answer in 10 s") if command[0] == "nvidia-smi" else FileNotFoundError

    notes = [str(note) for facts in probe.probe(run) for note in facts.notes if "nvidia-smi" in str(note)]
    assert [command[0] for command in asked].count("nvidia-smi") == 1
    assert [command[0] for command in asked].count("npu-smi") == 3
    assert notes[0] == "nvidia-smi topo -m: no answer in 10 s"
    assert notes[1] == "nvidia-smi nvlink -s: not asked: nvidia-smi did not answer before"
