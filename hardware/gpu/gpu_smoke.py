"""What transports rest on, in some seconds, for hardware/gpu/gpu_transports: of two ranks on one GPU, least first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from gpu_messages import whole_messages
from gpu_programs import worst_error

from tokenring import Causal, ContextParallel, attention, capture
from tokenring.backends.devices import device_of
from tokenring.errors import one_line


def smoked(make: Callable[[], Any], device: str, captures: Callable[..., str] | None = None) -> str:
    """What went well, with the seconds that it took. make: a transport.

    Raises AssertionError for the first step that fails, with its cause and what went well before it.
    """
    done: list[str] = []

    def step(name: str, act: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        try:
            made = act()
        except Exception as error:
            before = ", ".join(done) or "nothing"
            text = f"{name}: {type(error).__name__}: {one_line(error, 140)}; before it went well: {before}"
            raise AssertionError(text) from error
        done.append(f"{name} {time.perf_counter() - began:.1f} s")
        return made

    made = step("rendezvous", make)
    step("a message each way", lambda: whole_messages(made, device, count=1))
    made.close()
    made = step("another rendezvous", make)
    step("a program", lambda: worst_error(made, device, ("ring",)))
    step("a captured call", lambda: (captures or captured_calls)(made, ("ring",), 2))
    made.close()
    return ", ".join(done)


def captured_calls(made: Any, schedules: Sequence[str], turns: int) -> str:
    """Both passes, launched before and behind a call on other streams: the same to the bit. made: the transport."""
    rank, world, device = made.rank, dist.get_world_size(), device_of("cuda")
    for schedule in schedules:
        with ContextParallel(schedule=schedule, transport=made, kernel="reference") as cp:
            q, k, v = (torch.zeros(1, 256, 4, 64, device="cuda", requires_grad=True) for _ in range(3))
            graphs = capture(q, k, v, cp, Causal())
            streams = [device.new_stream() for _ in range(3)]
            for turn in range(turns):
                generator = torch.Generator().manual_seed(turn * world + rank)
                given = [torch.randn(1, 256, 4, 64, generator=generator).cuda() for _ in range(4)]
                torch.cuda.synchronize()
                results = []
                for at, launches in enumerate((True, False, True)):
                    with device.on(streams[at]):
                        q, k, v = (x.clone().requires_grad_() for x in given[:3])
                        out = graphs(q, k, v)[0] if launches else attention(q, k, v, cp, Causal())
                        grads = torch.autograd.grad(out, (q, k, v), given[3])
                        results.append([x.detach().clone() for x in (out, *grads)])
                torch.cuda.synchronize()
                for each in results:
                    same = [torch.equal(x, y) for x, y in zip(each, results[1], strict=True)]
                    assert all(same), (schedule, turn, same)
    told = f"{len(schedules)} schedules, both passes: {2 * turns} launches each"
    return f"{told}, to the bit what calls between them give"
