"""An ordinary script: some calls, destroy_process_group, exit. `run` starts it with all its ranks, in each variant.

    WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 python tests/support/exit_ranks.py FOLDER "left open" 29511 closed 29512

One process imports what they need, and is then forked: each rank ends as any Python does, by itself. What rank r says
of the first variant goes to FOLDER/0-r, and its exit codes to standard output, in a line of their own.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

RANKS = 3
IMPORTED = (
    "torch.distributed", "tokenring.runtime.executor", "tokenring.backends.kernels.cpu_flash",
    "tokenring.planner.choosing.auto", "tokenring.proof.verify", "torch.fx.experimental.symbolic_shapes",
)  # fmt: skip
LIMIT_SECONDS = 240.0  # for a whole script in one variant, on a busy machine
ROOT = Path(__file__).resolve().parents[2]
KEPT: list[Any] = []  # what a module of a user's has
LATE_US = 20_000  # by how much threads of torch's Gloo groups are held up, where they are
HOLD_UP = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

/* A collective's thread wakes who waits for it, and is then not scheduled for a while, as on a busy machine. */
int pthread_cond_broadcast(pthread_cond_t *condition) {
    static int (*real)(pthread_cond_t *);
    char name[16] = "";
    if (real == NULL) real = (int (*)(pthread_cond_t *))dlsym(RTLD_NEXT, "pthread_cond_broadcast");
    int result = real(condition);
    prctl(PR_GET_NAME, name);
    if (strncmp(name, "pt_gloo_runloop", 15) == 0) usleep(LATE_US);
    return result;
}
"""


def left_open(tr: Any, x: Any) -> None:
    KEPT.append(tr.ContextParallel())
    calls(tr, x, KEPT[0])


def closed(tr: Any, x: Any) -> None:
    left_open(tr, x)
    KEPT[0].close()


def dropped(tr: Any, x: Any) -> None:
    calls(tr, x, tr.ContextParallel())


def not_collected(tr: Any, x: Any) -> None:
    gc.disable()
    left_open(tr, x)


def collected(tr: Any, x: Any) -> None:
    left_open(tr, x)
    gc.collect()


def after_refusal(tr: Any, x: Any) -> None:
    """Ranks that disagree, and an error that is kept with all its frames."""
    KEPT.append(tr.ContextParallel())
    try:
        tr.attention(x, x, x, KEPT[0], scale=1.0 + int(os.environ["RANK"]))
    except tr.ConfigurationError as error:
        KEPT.append(error)
    calls(tr, x, KEPT[0])


def over_gloo(tr: Any, x: Any) -> None:
    KEPT.append(tr.ContextParallel(transport="gloo"))
    calls(tr, x, KEPT[0])


def shared_transport(tr: Any, x: Any) -> None:
    left_open(tr, x)
    KEPT.append(tr.ContextParallel(layout="contiguous", transport=KEPT[0].transport))
    calls(tr, x, KEPT[1])


VARIANTS: dict[str, Callable[[Any, Any], None]] = {
    "left open": left_open,
    "closed": closed,
    "dropped": dropped,
    "not collected": not_collected,
    "collected": collected,
    "after a refusal": after_refusal,
    "over gloo": over_gloo,
    "shared transport": shared_transport,
}


def calls(tr: Any, x: Any, cp: Any) -> None:
    """Attention both ways, and the collective of the user's group last: its last work is what aborted processes."""
    q = x.clone().requires_grad_()
    out = tr.attention(q, x, x, cp)
    tr.unshard(out, cp).sum().backward()
    tr.unshard(out.detach(), cp)


def held_up(folder: Path) -> Path | None:
    """A library that, loaded first, holds up the threads of torch's Gloo groups; None without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    source, made = folder / "hold_up.c", folder / "hold_up.so"
    source.write_text(HOLD_UP)
    command = [compiler, "-shared", "-fPIC", f"-DLATE_US={LATE_US}", "-o", str(made), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=LIMIT_SECONDS)
    return made


def main(folder: str, variants: dict[str, str], busy: bool) -> None:
    """In the process that imports, and then in each rank's. variants: with the port of each."""
    for name in IMPORTED:
        import_module(name)
    # No gc.freeze(): an interpreter that ends sooner is gone before a late thread comes, and nobody sees it abort.
    for number, (variant, port) in enumerate(variants.items()):
        ranks = []
        for rank in range(int(os.environ["WORLD_SIZE"])):
            process = os.fork()
            if not process:
                os.environ |= {"RANK": str(rank), "MASTER_PORT": port}
                said = os.open(f"{folder}/{number}-{rank}", os.O_WRONLY | os.O_CREAT)
                os.dup2(said, 1)
                os.dup2(said, 2)
                script(variant, busy)
            ranks.append(process)
        print(*(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks), flush=True)


def script(variant: str, busy: bool) -> None:
    """A rank's."""
    import torch
    import torch.distributed as dist

    import tokenring as tr

    dist.init_process_group("gloo")
    if busy:
        sys.setswitchinterval(100)  # so that nobody gets the interpreter from this thread for the asking
    VARIANTS[variant](tr, torch.ones(1, 12, 2, 16))
    dist.destroy_process_group()
    if busy:
        sum(range(3_000_000))  # for longer than a thread that is held up
    sys.exit(0)


def run(variants: Sequence[str], first: Path | None = None) -> list[list[tuple[int | None, str]]]:
    """Of each variant, one after another: what each rank's process ended with, and the last that it said.

    None where they had to be killed. first: a library that holds up threads, while the main one is busy.
    """
    with ExitStack() as taken:  # together, so that they differ
        free = [taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in variants]
        ports = [str(each.getsockname()[1]) for each in free]
    shared = {
        **os.environ, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, folder, *chain(*zip(variants, ports, strict=True))]
        if first is not None:
            shared["LD_PRELOAD"] = str(first)
            command.append("busy")
        codes = _codes(command, shared, len(variants))
        texts = [[_last(Path(folder, f"{number}-{rank}")) for rank in range(RANKS)] for number in range(len(variants))]
    return [list(zip(*each, strict=True)) for each in zip(codes, texts, strict=True)]


def _last(said: Path) -> str:
    return said.read_text(errors="replace")[-2000:] if said.exists() else ""


def _codes(command: list[str], environment: dict[str, str], count: int) -> list[list[int | None]]:
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True) as made:
        try:
            told, _ = made.communicate(timeout=count * LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(made.pid, signal.SIGKILL)
            told, _ = made.communicate()
        else:
            assert made.returncode == 0, f"the process to fork ended with {made.returncode}"
    ended: list[list[int | None]] = [[int(code) for code in line.split()] for line in told.splitlines()]
    return ended + [[None] * RANKS] * (count - len(ended))


if __name__ == "__main__":
    folder, *plays = sys.argv[1:]
    main(folder, dict(zip(plays[::2], plays[1::2], strict=False)), len(plays) % 2 == 1)
