"""One rank: `python -m npu_smoke.rank JSON`, started by `team`. It does tasks in order, and tells of each on a line."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from datetime import timedelta
from typing import Any, NoReturn

MARK = "@npu-smoke "
STORE_SECONDS = 90.0


def main(argument: str) -> None:
    """Run the tasks of one start, as far as the time goes.

    A task that fails on any rank ends this start: the ranks are out of step then.
    """
    asked = json.loads(argument)
    try:
        here = _join(asked)
        _say("joined", None, {"device": here.device.name})
    except BaseException as error:
        _failed(asked["rank"], None, error)
    for task in asked["tasks"]:
        if _time_is_up(here, asked["until"]):
            if here.rank == 0:
                _say("up", None, None)
            break
        if here.rank == 0:
            _say("begun", task, None)
        try:
            found = _do(here, task)
            ends = bool(found.get("ends"))  # on all ranks or on none: what the device has under way has no end
            if not ends:
                here.device.synchronize()
            here.meet()
        except BaseException as error:
            _failed(here.rank, task, error)
        if here.rank == 0:
            _say("done", task, found)
        if ends:
            _end(0)
    _end(0)


def _time_is_up(here: Any, until: float) -> bool:
    """By rank 0's clock, so that all ranks agree."""
    import torch
    import torch.distributed as dist

    found = torch.tensor([time.monotonic() >= until])
    dist.broadcast(found, 0)
    return bool(found)


def _failed(rank: int, task: str | None, error: BaseException) -> NoReturn:
    traceback.print_exception(type(error), error, error.__traceback__)
    _say("failed", task, f"rank {rank}: {type(error).__name__}: {' '.join(str(error).split())[:600]}")
    _end(1)


def _end(code: int) -> NoReturn:
    """At once: HCCL's threads, or a device that hangs, would hold up an ordinary end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _say(what: str, task: str | None, value: Any) -> None:
    os.write(1, f"{MARK}{json.dumps([what, task, value])}\n".encode())


def _join(asked: dict[str, Any]) -> Any:
    if asked["emulate"]:
        _emulate(asked["emulate"], asked["ranks"])
    import torch

    if asked["kind"] == "npu" and not asked["emulate"]:
        import torch_npu  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    import torch.distributed as dist

    from npu_smoke import schedules, shapes, traffic  # noqa: F401  (not in the time of the first task)
    from npu_smoke.here import Here

    here = Here(asked["rank"], asked["ranks"], asked["kind"], bool(asked["emulate"]), lambda text: None)
    if here.kind == "npu":
        torch.npu.set_device(here.rank % here.device_count)  # type: ignore[attr-defined,unused-ignore]
    else:
        torch.set_num_threads(1)
    limit = timedelta(seconds=STORE_SECONDS)
    dist.init_process_group("gloo", f"file://{asked['store']}", rank=here.rank, world_size=here.ranks, timeout=limit)
    here.meet()
    here.say = lambda text: _say("step", None, text) if here.rank == 0 else None
    return here


def _emulate(folder: str, ranks: int) -> None:
    """The emulated NPU of the project's tests, which lie in this folder."""
    sys.path[:0] = [f"{folder}/fakes", f"{folder}/support"]
    from ascend import device, fused_linears, hccl, operators  # type: ignore[import-not-found,unused-ignore]

    device.install(ranks)
    operators.register("2.13.0")
    fused_linears.install()
    hccl.install()


def _do(here: Any, task: str) -> Any:
    from npu_smoke import costs, kernel, linears, links, operators, schedules, shapes, traffic, training

    name, _, argument = task.partition(":")
    for module in (links, operators, kernel, shapes, traffic, costs, training, linears):
        if hasattr(module, name):
            return getattr(module, name)(here)
    return schedules.schedule(here, argument)


if __name__ == "__main__":
    main(sys.argv[1])
