"""Calls of the tools that a plan names, and errors that say what a machine lacks."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from tokenring.emulate.guardian import NAMESPACES, tool_path
from tokenring.emulate.plan import OPTIONAL, Batch, EmulationPlan
from tokenring.errors import BackendUnavailable

TOOL_SECONDS = 30.0
CLONE_NEWNET = 0x40000000
# What a line asks of the kernel, and the modules that have it.
KERNEL_PARTS = {
    "type veth": "veth",
    "type bridge": "bridge",
    "type ifb": "ifb",
    " tbf ": "sch_tbf",
    " clsact": "sch_ingress",
    " u32 ": "cls_u32 act_mirred",
}


def check_machine() -> None:
    """Raise BackendUnavailable if links cannot be emulated here, saying what is missing and what to do."""
    if sys.platform != "linux":
        raise BackendUnavailable(f"emulated links need Linux's network namespaces; this is {sys.platform}")
    if os.geteuid() != 0:
        raise BackendUnavailable(f"emulated links need root, and this is user {os.geteuid()}: run it with sudo")
    for name in ("ip", "tc"):
        tool(name)


def tool(name: str) -> str:
    """Return the path of `ip` or `tc`. Raises BackendUnavailable if the command is not installed."""
    if (path := shutil.which(name, path=tool_path())) is None:
        raise BackendUnavailable(f"emulated links need the command {name!r}: install iproute2 (the package's name)")
    return path


def build(plan: EmulationPlan) -> None:
    """Make all of a plan. Raises BackendUnavailable; what was made until then stays, for the guardian."""
    call(plan.namespaces)
    for line in plan.namespaces.lines:
        path = NAMESPACES / line.split()[-1]
        in_namespace(path, lambda: write_settings(plan.settings))
    for batch in plan.batches:
        call(batch)


def call(batch: Batch) -> None:
    """Run one tool over its lines, in a session of its own: Ctrl-C is ours to handle. Raises BackendUnavailable."""
    inside = [] if batch.namespace is None else ["-n", batch.namespace]
    command = [tool(batch.tool), *inside, "-batch", "-"]
    text = "".join(line + "\n" for line in batch.lines)
    try:
        done = subprocess.run(
            command, input=text, text=True, capture_output=True, timeout=TOOL_SECONDS, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        raise BackendUnavailable(f"'{' '.join(command)}' did not end within {TOOL_SECONDS:.0f} s") from None
    if done.returncode:
        raise BackendUnavailable(explain(batch, done.stderr))


def explain(batch: Batch, said: str) -> str:
    """Say which line of a batch failed, with the tool's reason, and what to do."""
    failed = re.search(r"Command failed -:(\d+)", said)
    line = batch.lines[int(failed[1]) - 1] if failed else batch.lines[0]
    reason = " ".join(text for text in said.splitlines() if not text.startswith("Command failed")) or "no reason given"
    asked = f"emulated links: '{batch.tool} {line}' failed: {reason}"
    for part, modules in KERNEL_PARTS.items():
        if part in line:
            each = " ".join(f"'modprobe {module}'" for module in modules.split())
            return f"{asked}: if the kernel lacks it, load it with {each}, or take a kernel that has it"
    return f"{asked}: it takes root with CAP_SYS_ADMIN and CAP_NET_ADMIN (in a container: --privileged)"


def in_namespace(path: Path, do: Callable[[], None]) -> None:
    """Call `do` in a network namespace: in a thread, for a namespace is a thread's. Raises BackendUnavailable."""
    problems: list[OSError] = []

    def enter() -> None:
        try:
            with open(path) as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                    number = ctypes.get_errno()
                    raise OSError(number, os.strerror(number), str(path))
            do()
        except OSError as error:
            problems.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if problems:
        raise BackendUnavailable(f"emulated links: cannot set up {path.name}: {problems[0]}")


def write_settings(settings: Mapping[str, str]) -> None:
    """Write files below /proc/sys; those below net are the namespace's own."""
    for name, value in settings.items():
        path = Path("/proc/sys") / name
        if path.exists() or not name.startswith(OPTIONAL):
            path.write_text(value)
