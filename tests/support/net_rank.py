"""Do what a rank does in tests of emulated links: python -m net_rank WHAT."""

from __future__ import annotations

import os
import sys
import time


def main(what: str) -> int:
    rank = int(os.environ["RANK"])
    if what == "fail" and rank == 2:
        print("rank 2 has had enough", file=sys.stderr)
        return 3
    if what == "die" and rank == 1:
        os.kill(os.getpid(), 9)
    if what == "stop" and rank == 1:
        os.kill(os.getpid(), 19)
    if what != "meet":
        time.sleep(60.0)
    print(f"sum {everyone(rank)}")
    print("a second line")
    return 0


def everyone(rank: int) -> int:
    """The sum over ranks, through Gloo."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(rank)
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    return int(total)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
