"""What a call loads: the first one of a named schedule little, and nothing of the planner; a later one nothing."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from patience import patient

pytestmark = pytest.mark.waits  # it starts processes
REPO = Path(__file__).resolve().parents[2]
MOST_MODULES = 75  # of a first forward call on CPUs, packages included
ROOMS_APART = ("cli", "display", "emulate", "integrations", "planner", "proof", "topology")
MODULES_APART = (  # for other calls than this one
    "api.capture", "backends.transports.gloo", "ir.json", "ir.text", "lowering.exchanges",
    "lowering.footprint", "runtime.streams", "runtime.trace", "schedule.families.nodes", "tables.transport_times",
)  # fmt: skip
RANKS = """
import builtins, json, os, sys
import torch, torch.distributed as dist

rank, folder = 0 if os.fork() else 1, sys.argv[1]
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(f"{folder}/store", 2))
import tokenring as tr

def loaded():
    return sorted(name for name in sys.modules if name.partition(".")[0] == "tokenring")

def imports(call):
    found, real = [], builtins.__import__

    def spy(name, scope=None, *more):
        if (scope or {}).get("__name__", "").startswith("tokenring"):
            found.append(f"{scope['__name__']} imports {name}")
        return real(name, scope, *more)

    builtins.__import__ = spy
    try:
        call()
    finally:
        builtins.__import__ = real
    return found

with tr.ContextParallel(schedule="ring") as cp:
    q, k, v = (torch.randn(1, 64, heads, 16) for heads in (4, 2, 2))

    def both():
        x = q.clone().requires_grad_()
        tr.attention(x, k, v, cp, mask=tr.Causal()).sum().backward()

    tr.attention(q, k, v, cp, mask=tr.Causal())
    first = loaded()
    both(), both()
    found = {"first": first, "later": imports(both), "plan": str(tr.plan(q, k, v, cp, mask=tr.Causal()))}
    dist.barrier()
dist.destroy_process_group()
if rank:
    os._exit(0)
os.wait()
print(json.dumps(found))
"""


def said_by(python: str, code: str, *arguments: str) -> str:
    """What a process says that ends well."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("TOKENRING_")}
    given["PYTHONPATH"] = os.pathsep.join([str(REPO), *filter(None, [given.get("PYTHONPATH")])])
    ran = subprocess.run(
        [python, "-c", code, *arguments], capture_output=True, text=True, env=given, timeout=patient(100)
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def found(warm_torch: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks load, as rank 0 sees it, in processes that have torch alone before."""
    folder = tmp_path_factory.mktemp("ranks")
    told: dict[str, Any] = json.loads(said_by(warm_torch, RANKS, str(folder)))
    return told


def test_a_first_call_loads_few_modules(found: dict[str, Any]) -> None:
    assert "tokenring.runtime.executor" in found["first"]
    assert len(found["first"]) <= MOST_MODULES, "\n".join(found["first"])


@pytest.mark.parametrize("apart", [*ROOMS_APART, *MODULES_APART])
def test_and_none_of_what_other_calls_need(apart: str, found: dict[str, Any]) -> None:
    assert [name for name in found["first"] if f"{name}.".startswith(f"tokenring.{apart}.")] == []


def test_a_later_call_imports_nothing(found: dict[str, Any]) -> None:
    assert found["later"] == []


def test_its_plan_is_there_when_asked_for(found: dict[str, Any]) -> None:
    assert found["plan"] == "ring: requested by name: ring"
