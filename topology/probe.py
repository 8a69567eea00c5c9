"""Ask the tools of this machine: each command once, without a shell, with a time limit, in the C locale."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable

from tokenring.errors import TopologyError
from tokenring.topology.facts import Facts, Note, Origin
from tokenring.topology.nvml import read_nvml
from tokenring.topology.sources import REGISTRY, Source, parser_of
from tokenring.topology.sysfs import read_sysfs

TIMEOUT_SECONDS = 10.0
Run = Callable[[tuple[str, ...]], str]


class NoAnswer(Exception):
    """A command that is not here, failed or took too long; the text says which."""


def probe(
    run: Run | None = None, sources: Iterable[Source] = REGISTRY, nvml: Callable[[], Facts | None] | None = None
) -> list[Facts]:
    """What NVML and the tools say, and the PCI tree; a tool that does not answer is a note.

    NVML, where it works, says all that nvidia-smi would. The tree's devices have bus ids alone: it is taken where
    others name some too, or name no device at all; else nothing would tell that its devices are theirs.
    With a `run` that is given, this machine's NVML is not asked.
    """
    if nvml is None and run is None:
        nvml = read_nvml
    library = nvml() if nvml else None
    known = library is not None and bool(library.accelerators)
    wanted = [source for source in sources if source.command and not (known and source.command[0] == "nvidia-smi")]
    asked = [library, *(_ask(source, run or run_command) for source in wanted)]
    found = [facts for facts in asked if facts is not None]
    named = [device for facts in found for device in facts.accelerators]
    return [*found, read_sysfs()] if not named or any(device.bus_id for device in named) else found


def _ask(source: Source, run: Run) -> Facts | None:
    """None where the tool is not installed: that is no fact about the machine."""
    origin = Origin(source.name)
    command = " ".join(source.command)
    try:
        return parser_of(source).parse(run(source.command)).of(origin)
    except FileNotFoundError:
        return None
    except (NoAnswer, TopologyError) as error:
        return Facts("devices", notes=(Note(f"{command}: {error}"),), origin=origin)


def run_command(command: tuple[str, ...]) -> str:
    """What a command prints. FileNotFoundError where there is none."""
    environment = dict(os.environ, LC_ALL="C", LANG="C")
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_SECONDS,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"no answer in {TIMEOUT_SECONDS:g} s") from None
    except PermissionError:
        raise NoAnswer("may not be run by this user") from None
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise NoAnswer(str(error.strerror)) from None
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        raise NoAnswer(f"exit code {done.returncode}: {' '.join(text.split())[:200]}")
    return text
