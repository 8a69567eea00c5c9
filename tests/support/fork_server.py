"""One fork server for all workers of pytest-xdist: each would import torch and all else that ranks need by itself.

The process that starts the workers starts it, and tells them where it is; it ends with that process.
"""

from __future__ import annotations

import os
import sys
from multiprocessing import forkserver, resource_tracker
from typing import Any

CAN_SHARE = sys.platform == "linux" and sys.version_info < (3, 14)  # from then on it wants a key as well
Given = tuple[Any, int, int]  # the address; the process that holds the server's life, and by which descriptor


def start(preloaded: list[str]) -> Given | None:
    """Start it with these modules; what `adopt` wants in other processes, or None where it cannot be shared."""
    if not CAN_SHARE:
        return None
    server: Any = forkserver._forkserver
    server.set_forkserver_preload(preloaded)
    server.ensure_running()
    return server._forkserver_address, os.getpid(), server._forkserver_alive_fd


def adopt(given: Given) -> None:
    """Have this process use that server, for all that it starts by the start method "forkserver"."""
    address, holder, descriptor = given
    server: Any = forkserver._forkserver
    server._forkserver_address = address
    server._forkserver_alive_fd = os.open(f"/proc/{holder}/fd/{descriptor}", os.O_WRONLY)
    server.ensure_running = resource_tracker.ensure_running  # it is no child of this process, which cannot ask for it
