"""Questions to a process of its own, with a time limit: what it imports may raise, end the process, or never return."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenring.topology.probing.probe import Hangs, NoAnswer, ended_command

MARK = "@tokenring-doctor "
# The same import paths as here: it may be this checkout, or a folder of tests, that has what is asked for.
CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from tokenring.cli.doctor.probes import main; "
    "main(sys.argv[2])"
)


@dataclass
class Answer:
    """A probe's answer before it ended. failed: part → what went wrong there; ending: why the process ended early."""

    said: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    ending: str | None = None
    printed: str = ""


def ask(probe: str, environment: Mapping[str, str], seconds: float) -> Answer:
    """Run a probe of `probes` to its end, or to the time limit. Raises nothing that a probe can cause."""
    from tokenring.imports import ended_by

    command = (sys.executable, "-c", CODE, json.dumps(sys.path), probe)
    code, ending = 0, None
    try:
        code, text = ended_command(command, seconds, environment)
    except Hangs as error:
        text, ending = error.printed, f"it has not come back after {seconds:g} s"
    except (NoAnswer, OSError) as error:
        return Answer(ending=f"Python cannot be started: {error}")
    answer = Answer(ending=ended_by(code) if code else ending)
    others = []
    for line in text.splitlines():
        if line.startswith(MARK):
            _take(answer, line.removeprefix(MARK))
        else:
            others.append(line)
    answer.printed = "\n".join(others)
    return answer


def _take(answer: Answer, line: str) -> None:
    """Read one line: a part, whether it went well, and what it found or why not."""
    try:
        part, well, value = json.loads(line)
    except ValueError:  # cut by the time limit
        return
    (answer.said if well else answer.failed)[str(part)] = value
