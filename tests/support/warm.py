"""Pythons that have torch already, for tests that start many: forks of one process that has imported it.

    monkeypatch.setattr(sys, "executable", warm)  # the fixture `warm` is the path of a file that is run as a Python is

What takes it for Python (`-c CODE`, `-m MODULE` or a file, with arguments; `-u` before it) gets a process with its own
arguments, environment, folder and streams, but not its pid: that of a client, which ends as the process does, and takes
it along. It lives in its client's namespaces of network and host name. What is started with -I or -S is a real Python.
A test whose subject is how a process starts or how the interpreter ends needs a real one.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib.abc
import io
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, TextIO

IMPORTED = (
    "numpy", "torch", "torch.distributed", "torch.utils.checkpoint", "tokenring.runtime.executor",
    "tokenring.backends.kernels.cpu_flash", "tokenring.planner.choosing.auto", "tokenring.proof.verify",
    "tokenring.cli.bench.reference", "tokenring.proof.replay", "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor", "torch._dynamo", "torch._functorch.aot_autograd", "torch._inductor.compile_fx",
)  # fmt: skip
BARE = ("numpy", "torch", "torch.distributed", "torch.utils.checkpoint")  # and nothing of tokenring
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
NAMESPACES = {"net": 0x40000000, "uts": 0x04000000}  # CLONE_NEW..., of linux/sched.h
F_SETSIG = 10  # of fcntl.h
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
if sys.argv[1] in ("-I", "-S"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({path!r})
    socket.send_fds(server, [b"."], [0, 1, 2])
    server.sendall(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode() + b"\\n")
    said = server.recv(16)
status = int(said or b"1")
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@contextmanager
def warm_python(bare: bool = False) -> Iterator[str]:
    """The path of what to run instead of Python. What it has started ends with it. Who comes early waits for it.

    bare: torch is still to be imported, which loads torch_npu or whatever is installed for it, but takes no time.
    """
    with tempfile.TemporaryDirectory(prefix="warm-") as folder, socket.socket(socket.AF_UNIX) as listener:
        path, client = f"{folder}/socket", Path(folder, "python")
        client.write_text(CLIENT.format(python=sys.executable, path=path), encoding="utf-8")
        client.chmod(0o755)
        listener.bind(path)
        listener.listen(64)
        number = listener.fileno()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        command = [sys.executable, __file__, str(number), str(os.getpid()), str(client), *(["bare"] if bare else [])]
        nothing = subprocess.DEVNULL
        with subprocess.Popen(command, stdin=nothing, stdout=nothing, env=environment, pass_fds=(number,)) as server:
            listener.close()  # where the server fails, nobody waits for it
            try:
                yield str(client)
            finally:
                server.terminate()


# ---------- in the process that is forked


class Asked:
    """One client: the connection, and the process that does what it asked for."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.server = connection, os.getpid()
        self.client = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        _, self.streams, _, _ = socket.recv_fds(connection, 1, 3)
        with connection.makefile("rb") as lines:
            self.arguments, self.environment, self.folder = json.loads(lines.readline())

    def started(self) -> int:
        """Its process; in that itself, 0."""
        process = os.fork()
        for each in self.streams if process else ():
            os.close(each)
        return process

    def become(self) -> None:
        """In the new process: what a Python that was started so has; it ends with its client, and with the server."""
        _end_with(self.server)
        os.setpriority(os.PRIO_PROCESS, 0, _niceness_of(self.client))
        fcntl.fcntl(self.connection, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self.connection, F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(self.connection, fcntl.F_SETFL, fcntl.fcntl(self.connection, fcntl.F_GETFL) | os.O_ASYNC)
        signal.set_wakeup_fd(-1)
        for name in NAMESPACES:
            _enter(name, self.client)
        for to, each in enumerate(self.streams):
            os.dup2(each, to)
            os.close(each)
        at_once = bool(self.environment.get("PYTHONUNBUFFERED"))
        sys.stdout, sys.stderr = _writing_to(1, sys.stdout, at_once), _writing_to(2, sys.stderr, at_once)
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        first = [path for path in self.environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path[:] = [*first, *(path for path in sys.path if path not in first)]
        warnings.resetwarnings()


def serve(number: int) -> Asked:
    """Fork for each client of this socket, and tell it how its process ended. Returns in the forks."""
    with socket.socket(fileno=number) as listener, selectors.DefaultSelector() as ready:
        ready.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.data is None:
                    asked = Asked(listener.accept()[0])
                    process = asked.started()
                    if not process:
                        return asked
                    ready.register(os.pidfd_open(process), selectors.EVENT_READ, (asked, process))
                else:
                    ready.unregister(key.fd)
                    os.close(key.fd)
                    _tell(*key.data)


def _tell(asked: Asked, process: int) -> None:
    _, status = os.waitpid(process, 0)
    with asked.connection as connection, suppress(OSError):  # the client was killed
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _niceness_of(process: int) -> int:
    """Return that of the process, or ours where that is larger, or it is gone."""
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(ProcessLookupError):
        return max(ours, os.getpriority(os.PRIO_PROCESS, process))
    return ours


def _writing_to(number: int, before: TextIO, at_once: bool) -> TextIO:
    """A stream as Python makes it at its start: one that was made for something else may not be reconfigured."""
    raw: Any = io.FileIO(number, "w", closefd=False)
    by_line = number == 2 or os.isatty(number)
    binary = raw if at_once else io.BufferedWriter(raw)
    return io.TextIOWrapper(binary, before.encoding, before.errors, None, by_line, at_once)


def _enter(name: str, process: int) -> None:
    """Go into that namespace of the process, where it is not ours already."""
    path = f"/proc/{process}/ns/{name}"
    with suppress(FileNotFoundError, ProcessLookupError), open(path, "rb") as namespace:  # a client that is gone
        if not os.path.samefile(path, f"/proc/self/ns/{name}"):
            library = ctypes.CDLL(None, use_errno=True)
            assert library.setns(namespace.fileno(), NAMESPACES[name]) == 0, os.strerror(ctypes.get_errno())


class Unimported(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """torch before its import, the last step of which is still to be done: to load what is installed for it."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @classmethod
    def hide(cls, module: Any) -> None:
        del sys.modules[module.__name__]
        sys.meta_path.insert(0, cls(module))

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != self.module.__name__:
            return None
        return ModuleSpec(name, self, origin=self.module.__file__, is_package=True)

    def create_module(self, spec: ModuleSpec) -> Any:
        return self.module

    def exec_module(self, module: Any) -> None:
        if module._is_device_backend_autoload_enabled():
            module._import_device_backends()


def ended(arguments: list[str]) -> int:
    """Run it; the exit code. What a module leaves to the interpreter's own end, but for atexit, is not done: slow."""
    code: object = 0
    try:
        run(arguments)
    except SystemExit as left:
        code = left.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 0


def run(arguments: list[str]) -> None:
    """As Python does with these arguments."""
    while arguments[0] == "-u":  # streams end up whole in any case
        arguments = arguments[1:]
    flag, *rest = arguments
    if flag == "-c":
        sys.argv = ["-c", *rest[1:]]
        main: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
        exec(rest[0], main)
    elif flag == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(flag).resolve().parent))
        runpy.run_path(flag, run_name="__main__")


if __name__ == "__main__":
    sys.path.pop(0)  # the tests' folder: no module of a script is to be found there
    number, parent, client, *bare = sys.argv[1:]
    _end_with(int(parent))
    for name in BARE if bare else IMPORTED:
        import_module(name)
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is there stays shared by all
    asked = serve(int(number))
    asked.become()
    if bare:
        Unimported.hide(torch)
    sys.executable = client  # what it starts is warm too
    os._exit(ended(asked.arguments) & 0xFF)
