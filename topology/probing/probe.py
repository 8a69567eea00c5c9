"""A probe of this machine's tools: each command once, without a shell, with a time limit, in the C locale."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import Facts, Note, SourceOrigin
from tokenring.topology.model.sanity import sound
from tokenring.topology.probing.nvml import read_nvml
from tokenring.topology.probing.sysfs import read_sysfs
from tokenring.topology.sources import REGISTRY, Source, facts_of

TIMEOUT_SECONDS = 10.0
MOST_BYTES = 1 << 20  # that a tool may print
Run = Callable[[tuple[str, ...]], str]


class NoAnswer(Exception):
    """A command that failed or may not be run; the text says which."""


class Hangs(NoAnswer):
    """A command that took too long: its tool is not asked again. printed: what it had said until then."""

    def __init__(self, message: str = "", printed: str = "") -> None:
        super().__init__(message)
        self.printed = printed


def probe(
    run: Run | None = None, sources: Iterable[Source] = REGISTRY, nvml: Callable[[], Facts | None] | None = None
) -> list[Facts]:
    """Return the facts of NVML, of the tools and of the PCI tree; a tool that does not answer is a note.

    NVML, where it works, says all that nvidia-smi would. The tree's devices have bus ids alone: it is taken
    where others name some too, or name no device at all; else nothing would show that its devices are theirs.
    With a `run` that is given, this machine's NVML is not asked.
    """
    if nvml is None and run is None:
        nvml = read_nvml
    library = nvml() if nvml else None
    known = library is not None and bool(library.accelerators)
    wanted = [source for source in sources if source.command and not (known and source.command[0] == "nvidia-smi")]
    silent: set[str] = set()
    asked = [library, *(_ask(source, run or run_command, silent) for source in wanted)]
    found = [sound(facts) for facts in asked if facts is not None]
    named = [device for facts in found for device in facts.accelerators]
    return [*found, sound(read_sysfs())] if not named or any(device.bus_id for device in named) else found


def _ask(source: Source, run: Run, silent: set[str]) -> Facts | None:
    """Ask one tool; return None if it is not installed: that is no fact about the machine. silent: tools that hang."""
    origin = SourceOrigin(source.name)
    tool, command = source.command[0], " ".join(source.command)
    try:
        if tool in silent:
            raise NoAnswer(f"not asked: {tool} did not answer before")
        return facts_of(source, run(source.command)).of(origin)
    except FileNotFoundError:
        return None
    except (NoAnswer, TopologyError) as error:
        if isinstance(error, Hangs):
            silent.add(tool)
        return Facts("devices", notes=(Note(f"{command}: {error}"),), origin=origin)


def run_command(command: tuple[str, ...], seconds: float = TIMEOUT_SECONDS) -> str:
    """Return what a command prints. Raises FileNotFoundError if there is none, NoAnswer if it fails."""
    code, text = ended_command(command, seconds)
    if code != 0:
        raise NoAnswer(f"exit code {code}: {' '.join(text.split())[:200]}")
    return text


def ended_command(
    command: tuple[str, ...], seconds: float, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Return the exit code of a command, and what it prints. Raises FileNotFoundError if there is none.

    Raises Hangs at the time limit, with what was printed until then in `printed`. Nothing of it is left running.
    """
    path = shutil.which(command[0]) or shutil.which(command[0], os.F_OK)
    if path is None:
        raise FileNotFoundError(command[0])
    try:
        process = subprocess.Popen(
            (path, *command[1:]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(os.environ if environment is None else environment, LC_ALL="C", LANG="C"),
            start_new_session=True,  # what it starts ends with it
        )
    except PermissionError:
        raise NoAnswer("may not be run by this user") from None
    except OSError as error:
        raise NoAnswer(str(error.strerror)) from None
    printed = bytearray()
    try:
        _read_all(process, seconds, printed)
        return process.wait(seconds), printed.decode("utf-8", "replace")
    except (Hangs, subprocess.TimeoutExpired):
        raise Hangs(f"no answer in {seconds:g} s", printed.decode("utf-8", "replace")) from None
    finally:
        _end(process)


def _read_all(process: subprocess.Popen[bytes], seconds: float, printed: bytearray) -> None:
    """Read all that a process prints. Raises Hangs after `seconds`, NoAnswer for more than MOST_BYTES."""
    assert process.stdout is not None  # it is a pipe
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while len(printed) <= MOST_BYTES:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise Hangs
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                return
            printed += piece
    raise NoAnswer(f"it prints more than {MOST_BYTES} bytes")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing of it; not even a process that the kernel cannot end is waited for."""
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    if process.stdout is not None:
        process.stdout.close()
