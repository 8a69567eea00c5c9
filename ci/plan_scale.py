"""How long planning takes, and how much memory, by the number of hosts; and where the straight line is checked.

    python ci/plan_scale.py [--preset hgx-h100] [--hosts 4 8 ... 512] [--tokens 4096]

Each plan is made in a process of its own: seconds include starting Python and importing torch.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="hgx-h100")
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--tokens", type=int, default=4096, help="a rank")
    parser.add_argument("--ranks-a-host", type=int, default=8)
    options = parser.parse_args()
    print(f"{'hosts':>6} {'ranks':>6} {'seconds':>8} {'MB':>6}  plan")
    for hosts in options.hosts:
        ranks = hosts * options.ranks_a_host
        command = [sys.executable, "-m", "tokenring", "plan", "--topology", f"preset:{options.preset}*{hosts}"]
        command += ["--seq", str(options.tokens * ranks), "--heads", "64", "--kv-heads", "8", "--json"]
        began = time.perf_counter()
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=590)
        seconds = time.perf_counter() - began
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3  # of the largest so far
        if done.returncode:
            print(f"{hosts:6} {ranks:6} {seconds:8.1f} {memory:6.0f}  failed: {done.stderr.strip()}")
            continue
        print(f"{hosts:6} {ranks:6} {seconds:8.1f} {memory:6.0f}  {json.loads(done.stdout)['reason'][:90]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
