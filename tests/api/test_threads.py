"""Two threads on one context are told apart at once, by name; the call that was first goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import PEER_SECONDS, Here, RankPools

import tokenring as tr
from tokenring import ConfigurationError, ContextParallel
from tokenring.api.inputs import make_request
from tokenring.backends.kernels.cpu_flash import CpuFlash

X = torch.ones(1, 8, 2, 16)
SECONDS = 50.0  # for what must happen; no test waits for it where all is well


class Inside:
    """Holds a thread inside of its call: in a kernel of one pass, until it is let go."""

    def __init__(self, direction: str) -> None:
        self.direction, self.entered, self.go = direction, threading.Event(), threading.Event()

    def __enter__(self) -> Inside:
        self._patched = pytest.MonkeyPatch()
        kernel: Callable[..., Any] = getattr(CpuFlash, self.direction)

        def held(*args: Any, **kwargs: Any) -> Any:
            if not self.entered.is_set():
                self.entered.set()
                assert self.go.wait(SECONDS)
            return kernel(*args, **kwargs)

        self._patched.setattr(CpuFlash, self.direction, held)
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        self._patched.undo()


class Other(threading.Thread):
    """Calls a function, and keeps what it gave or raised."""

    def __init__(self, name: str, call: Callable[[], Any]) -> None:
        super().__init__(name=name, daemon=True)
        self.call = call
        self.made: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.made = self.call()
        except BaseException as error:
            self.error = error

    def ended(self) -> Other:
        self.join(SECONDS)
        assert not self.is_alive(), f"{self.name} does not come to an end"
        return self


def both_passes(cp: ContextParallel) -> torch.Tensor:
    x = X.clone().requires_grad_()
    out = tr.attention(x, x, x, cp)
    torch.autograd.backward(out.sum())
    assert torch.allclose(out, X) and x.grad is not None
    return x.grad


def calls(cp: ContextParallel, guest: ContextParallel) -> dict[str, Callable[[], object]]:
    """What a second thread may try."""
    request = make_request(X, X, X, cp, None, None)
    return {
        "attention": lambda: tr.attention(X, X, X, cp),
        "a context with its transport": lambda: tr.attention(X, X, X, guest),
        "unshard": lambda: tr.unshard(X, cp),
        "agreed_plan": lambda: cp.agreed_plan(request),
    }


SECOND = ("attention", "a context with its transport", "unshard", "agreed_plan")


def second_thread(here: Here, direction: str, second: str, everywhere: bool) -> list[str]:
    """While the thread "first" is in a call, "second" makes one: on all ranks, or on rank 1 alone."""
    cp = here.cp(schedule="ring")
    guest = here.cp(schedule="tokenring")
    expected = both_passes(cp)
    said = []
    with Inside(direction) as inside:
        first = Other("first", lambda: both_passes(cp))
        assert inside.entered.wait(SECONDS)
        if everywhere or here.rank == 1:
            other = Other("second", calls(cp, guest)[second]).ended()
            assert isinstance(other.error, ConfigurationError), other.error
            said.append(str(other.error))
        dist.barrier()  # all ranks are in the first call
        inside.go.set()
        assert first.ended().error is None, first.error
    assert torch.equal(first.made, expected)
    assert torch.equal(both_passes(cp), expected)  # the group is unharmed
    tr.unshard(X, guest)
    return said


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_second_thread(direction: str, second: str, everywhere: bool, ranks: RankPools) -> None:
    found = ranks(2)(second_thread, direction, second, everywhere)
    assert [len(each) for each in found] == [1 if everywhere or rank == 1 else 0 for rank in range(2)]
    for text in (each for said in found for each in said):
        if direction == "forward":  # a backward pass may run in a thread of autograd's
            assert text.startswith("thread 'first' is in a call on this context"), text
        assert "thread 'second' made a second one" in text and "a context and a group of its own" in text, text


def in_turn(here: Here) -> bool:
    """Threads that do not overlap: each makes one call after another, and backward runs in a third."""
    cp = here.cp(schedule="ring")
    x = X.clone().requires_grad_()
    forward = Other("forward", lambda: tr.attention(x, x, x, cp)).ended()
    assert forward.error is None, forward.error
    backward = Other("backward", lambda: torch.autograd.backward(forward.made.sum())).ended()
    assert backward.error is None, backward.error
    return x.grad is not None and bool(torch.isfinite(both_passes(cp)).all())


def test_threads_that_take_turns(ranks: RankPools) -> None:
    assert all(ranks(2)(in_turn))


def several(cp: ContextParallel) -> list[torch.Tensor]:
    return [both_passes(cp) for _ in range(5)]


def own_contexts(here: Here) -> bool:
    """A context with a transport of its own for each thread."""
    cps = [ContextParallel(schedule="ring", transport="shm", timeout_seconds=PEER_SECONDS) for _ in range(2)]
    expected = [both_passes(cp) for cp in cps]
    threads = [Other(f"thread {n}", partial(several, cp)) for n, cp in enumerate(cps)]
    for each in threads:
        assert each.ended().error is None, each.error
    for cp in cps:
        cp.close()
    return all(torch.equal(made, expected[0]) for each in threads for made in each.made)


def test_a_context_for_each_thread(ranks: RankPools) -> None:
    assert all(ranks(2)(own_contexts))


def test_threads_of_one_rank_wait_for_each_other() -> None:
    """There is no order to keep to, and the buffers are shared."""
    cp = ContextParallel()
    expected = both_passes(cp)
    with Inside("forward") as inside:
        first = Other("first", lambda: both_passes(cp))
        assert inside.entered.wait(SECONDS)
        second = Other("second", lambda: both_passes(cp))
        second.join(0.2)
        assert second.is_alive()
        inside.go.set()
        for each in (first, second):
            assert each.ended().error is None, each.error
            assert torch.equal(each.made, expected)


def recomputed(here: Here) -> bool:
    """A call inside of another one's backward, as checkpoints make it, is of the same thread."""
    from torch.utils.checkpoint import checkpoint

    cp = here.cp(schedule="ring")
    x = X.clone().requires_grad_()
    for reentrant in (False, True):
        out = checkpoint(lambda x: tr.attention(x, x, x, cp), x, use_reentrant=reentrant)
        torch.autograd.backward(out.sum())
    return x.grad is not None


def test_calls_within_calls(ranks: RankPools) -> None:
    assert all(ranks(2)(recomputed))
