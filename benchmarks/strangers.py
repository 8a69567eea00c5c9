"""Measure by how much connections that are none of ours delay ranks that connect.

    python benchmarks/strangers.py [--strangers 1000] [--ranks 3] [--times 5]

The connections of some ranks, threads of this process, are made with so many strangers at each listener: none,
silent ones, slow ones (a byte now and then) and noisy ones. Prints the seconds until all are connected.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / each) for each in (".", "tests/support", "tests/fakes")]
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

from tokenring.backends.control.listener import RankListener  # noqa: E402
from tokenring.backends.control.sockets import PeerSockets  # noqa: E402

SECONDS = 60.0
NAME = "0123456789abcdef"


class Alone:
    """A control of one rank, as far as its connections ask."""

    name, timeout_seconds = NAME, SECONDS

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.world_size = rank, ranks

    def lost(self, peer: int, what: str, found: str) -> Exception:
        return RuntimeError(f"rank {self.rank} {what} from rank {peer}: {found}")


def connect(listeners: list[RankListener]) -> float:
    """How long all ranks take to connect, each with its listener."""
    ranks, failed = len(listeners), []

    def one(rank: int) -> None:
        made = PeerSockets.__new__(PeerSockets)
        made._control, made._connections = Alone(rank, ranks), {}  # type: ignore[assignment]
        try:
            made._connect(listeners[rank], [list(listener.place) for listener in listeners])
        except Exception as error:
            failed.append(error)
        for connection in made._connections.values():
            connection.close()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    began = time.perf_counter()
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if failed:
        raise failed[0]
    return time.perf_counter() - began


def measured(ranks: int, strangers: int, says: bytes, again: bool) -> float:
    """With so many at each listener, of whom each says this once, or again and again."""
    over = threading.Event()
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(RankListener("127.0.0.1", ranks)) for _ in range(ranks)]
        places = [listener.place for listener in listeners for _ in range(strangers)]
        there = [stack.enter_context(socket.create_connection(place)) for place in places]

        def speak() -> None:
            while not over.wait(0.01):
                for each in there:
                    with contextlib.suppress(OSError):
                        each.send(says)
                if not again:
                    return

        speaking = threading.Thread(target=speak if says else over.wait)
        speaking.start()
        try:
            return connect(listeners)
        finally:
            over.set()
            speaking.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strangers", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    kinds: dict[str, Callable[[], float]] = {
        "none": lambda: measured(options.ranks, 0, b"", False),
        "silent": lambda: measured(options.ranks, options.strangers, b"", False),
        "slow": lambda: measured(options.ranks, options.strangers, b"t", True),
        "noisy": lambda: measured(options.ranks, options.strangers, b"GET / HTTP/1.1\r\n" * 20, True),
    }
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(options.times):
        for kind, measure in kinds.items():
            found[kind].append(measure())
    print(f"{options.ranks} ranks, {options.strangers} strangers at each listener, {options.times} times")
    print("strangers  median s  slowest s")
    for kind, times in found.items():
        print(f"{kind:9} {median(times):9.3f} {max(times):10.3f}")


if __name__ == "__main__":
    main()
