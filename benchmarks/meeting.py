"""Measure how long many ranks take to meet at the store of their group: threads stand for the ranks, in few processes.

    python benchmarks/meeting.py [--ranks 64 256 1024] [--processes 4] [--text 300]

A first call meets three times so: who they are, whether they share memory, where they listen. The store is torch's own
TCP store in the first process, which answers all ranks, as in a job; the ranks' own time is shared by the cores of this
machine, which a job's are not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from tokenring.backends.control import store_gather
from tokenring.backends.control.store_gather import StoreGather

LIMIT_SECONDS = 600.0


class Rank:
    """A stand-in for a group, as far as a meeting asks it."""

    def __init__(self, rank: int, world_size: int, port: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIMIT_SECONDS),
                                    wait_for_workers=False)  # fmt: skip

    def store(self) -> Any:
        """Return the connection of this rank to the store."""
        return self._store


def some_ranks(mine: range, world_size: int, port: int, text: str, end: Connection) -> None:
    """Be some of the ranks: connect, say so, and meet once all have connected."""
    store_gather.held = lambda each: each  # type: ignore[assignment, return-value]
    ranks = [Rank(each, world_size, port) for each in mine]
    end.send(len(ranks))
    end.recv()
    right: list[bool] = []

    def meet(rank: Any) -> None:
        right.append(len(StoreGather(rank, LIMIT_SECONDS).gather("who they are", text)) == world_size)

    threads = [threading.Thread(target=meet, args=(each,)) for each in ranks]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    end.send(right.count(True))


def meeting_seconds(world_size: int, processes: int, text: str) -> float:
    """Return the seconds from when all are connected to when all have heard of all."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fresh, ends, some = multiprocessing.get_context("spawn"), [], []
    for number in range(processes):
        mine = range(number * world_size // processes, (number + 1) * world_size // processes)
        end, other = fresh.Pipe()
        some.append(fresh.Process(target=some_ranks, args=(mine, world_size, server.port, text, other)))
        ends.append(end)
        some[-1].start()
    for end in ends:
        end.recv()
    began = time.perf_counter()
    for end in ends:
        end.send(True)
    met = sum(end.recv() for end in ends)
    seconds = time.perf_counter() - began
    for each in some:
        each.join()
    if met != world_size:
        raise SystemExit(f"{met} of {world_size} ranks met")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--text", type=int, default=300, help="bytes that each rank brings")
    options = parser.parse_args()
    for ranks in options.ranks:
        print(f"{ranks:6} ranks {meeting_seconds(ranks, options.processes, 'x' * options.text):8.2f} s", flush=True)


if __name__ == "__main__":
    main()
