"""A running emulation: created, used for any number of runs, and removed, however the process ends."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from tokenring.emulate import guardian
from tokenring.emulate.build import build, check_machine
from tokenring.emulate.plan import make_plan
from tokenring.emulate.processes import RankProcesses
from tokenring.emulate.shapes import Shape, rank_node
from tokenring.errors import ConfigurationError

POLL_SECONDS = 0.02
GUARDIAN_SECONDS = 60.0
RUN_SECONDS = 600.0
NUMBERS = itertools.count()  # an emulation's within its process


class Emulated:
    """An emulation of a shape, for the duration of the context: one namespace a rank, joined by shaped links.

    The arguments are those of Shape. Raises ConfigurationError for an impossible shape, and on entering
    BackendUnavailable if this machine cannot create it. At the end, and if this process dies in any way, all processes
    in the namespaces are killed and the namespaces removed. Entering also removes leftovers of dead processes.
    """

    def __init__(self, kind: str, ranks: int, link_gbit: float, **options: Any) -> None:
        self.shape = Shape(kind, ranks, link_gbit, **options)
        self._prefix: str | None = None
        self._guardian: subprocess.Popen[bytes] | None = None

    @property
    def namespaces(self) -> list[str]:
        """The ranks' namespaces, by rank; none unless the emulation is running."""
        if self._prefix is None:
            return []
        return [self._prefix + rank_node(rank) for rank in range(self.shape.ranks)]

    def __enter__(self) -> Emulated:
        check_machine()
        if self._prefix is not None:
            raise ConfigurationError("this emulation is up already: make another Emulated for a second one")
        guardian.remove(guardian.leftovers())
        self._prefix = guardian.prefix_of(os.getpid(), next(NUMBERS))
        try:
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__, self._prefix],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
            build(make_plan(self.shape.fabric, self._prefix))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything; closing twice is fine."""
        if self._guardian is not None and self._guardian.stdin is not None:
            self._guardian.stdin.close()  # now it removes all
            with suppress(subprocess.TimeoutExpired):
                self._guardian.wait(GUARDIAN_SECONDS)
        if self._prefix is not None:
            guardian.remove(guardian.names(self._prefix))  # the guardian may have been killed
        self._guardian = self._prefix = None

    def start(
        self,
        module: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        all_speak: bool = False,
    ) -> RankProcesses:
        """Return a context with `python -m module arguments` in every rank's namespace; see RankProcesses.

        Raises ConfigurationError if the emulation is not up.
        """
        if self._prefix is None:
            raise ConfigurationError("this emulation is not up: use it inside its 'with'")
        return RankProcesses(self.namespaces, module, arguments, environment or {}, all_speak)

    def run(
        self,
        module: str,
        arguments: Sequence[str] = (),
        timeout_seconds: float = RUN_SECONDS,
        *,
        environment: Mapping[str, str] | None = None,
        show: Callable[[str], None] = print,
    ) -> list[str]:
        """Run `python -m module arguments` at every rank until all have ended; return rank 0's lines.

        show: gets each line as it comes. environment: variables beside tokenring's and torchrun's. Raises PeerLost,
        whose `rank` failed or did not end in time.
        """
        with self.start(module, arguments, environment) as ranks:
            lines = []
            for line in _until_the_end(ranks, timeout_seconds):
                show(line)
                lines.append(line)
        return lines


def _until_the_end(ranks: RankProcesses, timeout_seconds: float) -> Iterator[str]:
    deadline = time.monotonic() + timeout_seconds
    while True:
        code = ranks.exit_code()  # asked first: what they wrote before is still read below
        while lines := ranks.read(POLL_SECONDS if code is None else 0.0):
            yield from lines
            if code is None:
                break
        if code is not None:
            break
        if time.monotonic() > deadline and not any(code for _, code in ranks.ended):
            raise ranks.hung(timeout_seconds)
    if code:
        raise ranks.failure()
