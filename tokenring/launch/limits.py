"""The limit on processes that a command starts: what would take minutes in silence is refused at once."""

from __future__ import annotations

import os

from tokenring.errors import ConfigurationError

MOST_PROCESSES = 256  # on one machine: torchrun starts some five a second on two cores
PROCESS_BYTES = 128 << 20  # what importing torch takes in each of them alone


def check_processes(ranks: int) -> None:
    """Raise ConfigurationError for more ranks than this machine can start as processes of its own."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    held = pages * page_bytes // PROCESS_BYTES
    most = min(MOST_PROCESSES, max(held, 1))
    if ranks <= most:
        return
    why = "" if most == MOST_PROCESSES else f", as it has {pages * page_bytes / 1e9:.3g} GB of memory"
    raise ConfigurationError(
        f"--ranks {ranks}: at most {most} are started on this machine{why}: use fewer, or start ranks on several "
        f"machines with torchrun"
    )
