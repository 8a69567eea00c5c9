"""What one rank refuses, every rank hears at once: none is left to wait, and life goes on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from machines import APART, transport_name
from ranks import PEER_SECONDS, Here, RankPools

import tokenring as tr
from tokenring import ConfigurationError, ContextParallel, PeerLost, UnsupportedError
from tokenring.backends import registry
from tokenring.backends.devices import Cpu
from tokenring.backends.interfaces import Transport
from tokenring.backends.registry import make_transport
from tokenring.integrations.megatron.contexts import Contexts
from tokenring.launch.groups import held
from tokenring.runtime.agreement import Disagreement

WORLD_SIZE = 3
ODD = 1
transports = pytest.mark.parametrize("name", ["gloo", APART, "shm"])
Q, KV = torch.ones(1, 8, 4, 16), torch.ones(1, 8, 2, 16)


def tensors() -> tuple[torch.Tensor, ...]:
    return Q.clone().requires_grad_(), KV.clone().requires_grad_(), KV.clone().requires_grad_()


def attend(cp: ContextParallel, *qkv: Any, **options: Any) -> Any:
    return tr.attention(*(qkv or tensors()), cp, **options)  # type: ignore[call-overload]


def backward_twice(cp: ContextParallel, twice: bool) -> None:
    out = attend(cp)
    torch.autograd.backward(out.sum(), retain_graph=not twice)
    torch.autograd.backward(out.sum())


def in_megatron(cp: ContextParallel, q: torch.Tensor) -> None:
    assert dist.group.WORLD is not None
    contexts = Contexts(held(dist.group.WORLD), {"transport": cp.transport})
    contexts.attend("ring", q, KV, KV, tr.Causal(), 0.25, False)


def compiled(cp: ContextParallel, *qkv: torch.Tensor, sinks: Any = None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of its own parts
        import torch._dynamo as dynamo

        dynamo.reset()
        made: Any = torch.compile(lambda *x: attend(cp, *x, sinks=sinks), backend="aot_eager", fullgraph=True)
        out = made(*(qkv or tensors()))
        if not qkv:
            torch.autograd.backward(out.sum())


Refusal = tuple[Callable[[ContextParallel], object], Callable[[ContextParallel], object], type[Exception], str]
# What the odd one does, what the others do, what it raises.
REFUSALS: dict[str, Refusal] = {
    "an empty shard": (lambda cp: attend(cp, Q[:, :0], KV, KV), attend, ConfigurationError, "holds no token of q"),
    "float64": (lambda cp: attend(cp, *(x.double() for x in tensors())), attend, UnsupportedError, "torch.float64"),
    "a number": (lambda cp: attend(cp, Q, KV, 3), attend, ConfigurationError, "one is of type int"),
    "a mask": (lambda cp: attend(cp, mask=3), attend, ConfigurationError, "mask is of type int; use Full()"),
    "a scale": (lambda cp: attend(cp, scale=math.nan), attend, ConfigurationError, "scale is nan; give a finite"),
    "a number that is too large": (lambda cp: attend(cp, scale=10**400), attend, ConfigurationError, "beyond what a"),
    "dropout": (lambda cp: attend(cp, dropout_p=0.1), attend, UnsupportedError, "attention with dropout_p is not"),
    "a dtype of k": (lambda cp: attend(cp, Q, KV.half(), KV), attend, ConfigurationError, "must share dtype"),
    "a meta tensor": (lambda cp: attend(cp, Q.to("meta"), KV, KV), attend, UnsupportedError, "of a meta tensor is not"),
    "sinks": (
        lambda cp: attend(cp, sinks=torch.zeros(3)),
        lambda cp: attend(cp, sinks=torch.zeros(4)),
        ConfigurationError,
        "sinks are [3], and q has 4 heads here",
    ),
    "sinks in float64": (
        lambda cp: attend(cp, sinks=torch.zeros(4).double()),
        attend,
        UnsupportedError,
        "sinks in torch.float64 are not supported",
    ),
    "a number for sinks": (lambda cp: attend(cp, sinks=3), attend, ConfigurationError, "sinks are of type int; give a"),
    "sinks without data": (
        lambda cp: attend(cp, sinks=torch.zeros(4, device="meta")), attend, UnsupportedError, "of a meta tensor is not"
    ),
    "a graph that is gone": (
        lambda cp: backward_twice(cp, True),
        lambda cp: backward_twice(cp, False),
        RuntimeError,
        "backward through the graph a second time",
    ),
    "a dim": (
        lambda cp: tr.unshard(KV, cp, 9),
        lambda cp: tr.unshard(KV, cp),
        ConfigurationError,
        "unshard along dim=9",
    ),
    "no tensor": (
        lambda cp: tr.unshard([1], cp),  # type: ignore[arg-type]
        lambda cp: tr.unshard(KV, cp),
        ConfigurationError,
        "unshard expects a tensor; got one of type list",
    ),
    "in Megatron": (
        lambda cp: in_megatron(cp, Q[:, :0]),
        lambda cp: in_megatron(cp, Q),
        ConfigurationError,
        "holds no token of q",
    ),
    "compiled": (
        lambda cp: compiled(cp, *(x.double() for x in (Q, KV, KV))),
        lambda cp: compiled(cp, Q, KV, KV),
        UnsupportedError,
        "torch.float64",
    ),
    "compiled, three dimensions": (
        lambda cp: compiled(cp, Q[0], KV[0], KV[0]),
        lambda cp: compiled(cp, Q, KV, KV),
        ConfigurationError,
        "attention expects q, k and v as [B, T, H, D]",
    ),
    "compiled, sinks": (
        lambda cp: compiled(cp, sinks=torch.zeros(3)),
        compiled,
        ConfigurationError,
        "sinks are [3], and q has 4 heads here",
    ),
    "compiled, a number for sinks": (
        lambda cp: compiled(cp, sinks=3), compiled, ConfigurationError, "sinks are of type int; give a"
    ),
}
SLOW = tuple(name for name in REFUSALS if name.startswith("compiled"))


def opened(here: Here, name: str) -> Transport:
    """The pool's transport of that name, kept: what was refused must do it no harm."""
    key = f"transport {name}"
    if key not in here.memory:
        assert dist.group.WORLD is not None
        with transport_name(name) as known:
            here.memory[key] = make_transport(known, dist.group.WORLD, PEER_SECONDS)
    transport: Transport = here.memory[key]
    return transport


def said(call: Callable[[], object]) -> tuple[str, str]:
    """The type of what a call raises, and its text."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, " ".join(str(error).split())
    return "nothing", ""


def works(cp: ContextParallel) -> None:
    """All tensors are ones, and so is the result."""
    q, k, v = tensors()
    out = attend(cp, q, k, v)
    torch.autograd.backward(out.sum())
    assert torch.allclose(out, torch.ones(())) and v.grad is not None
    assert torch.equal(tr.unshard(KV, cp)[:, :8], KV)


def one_refuses(here: Here, name: str, what: str, schedule: str) -> tuple[str, str]:
    cp = ContextParallel(schedule=schedule, transport=opened(here, name))
    odd, usual, *_ = REFUSALS[what]
    found = said(lambda: (odd if here.rank == ODD else usual)(cp))
    works(cp)
    assert said(lambda: (odd if here.rank == ODD else usual)(cp)) == found  # nothing is remembered of it
    works(cp)
    return found


def check_heard(found: list[tuple[str, str]], kind: type[Exception], says: str) -> None:
    """The odd one raises what it found; the others name it."""
    for rank, (name, text) in enumerate(found):
        assert says in text, text
        if rank == ODD:
            assert name == kind.__name__, (name, text)
        else:
            assert name == Disagreement.__name__ and text.startswith(f"rank {ODD} refused: "), (name, text)
            assert text.endswith("So no rank made the call")


@pytest.mark.sampled(30)
@transports
@pytest.mark.parametrize("what", [each for each in REFUSALS if each not in SLOW])
def test_one_rank_refuses(what: str, name: str, ranks: RankPools) -> None:
    *_, kind, says = REFUSALS[what]
    check_heard(ranks(WORLD_SIZE)(one_refuses, name, what, "tokenring"), kind, says)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", SLOW)
def test_one_rank_refuses_what_is_compiled(what: str, ranks: RankPools) -> None:
    *_, kind, says = REFUSALS[what]
    check_heard(ranks(WORLD_SIZE)(one_refuses, APART, what, "tokenring"), kind, says)


@transports
def test_one_rank_refuses_before_a_plan(name: str, ranks: RankPools) -> None:
    *_, kind, says = REFUSALS["an empty shard"]
    check_heard(ranks(WORLD_SIZE)(one_refuses, name, "an empty shard", "auto"), kind, says)


def capturing(here: Here) -> tuple[str, str]:
    """Over a transport and on a device that seem to be capturable: nothing comes to be captured."""
    transport: Any = opened(here, "shm")
    cp = ContextParallel(schedule="ring", transport=transport)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(transport, "target", replace(transport.target, capturable=True))
        patched.setattr(Cpu, "new_stream", lambda *_: object())
        q, k, v = (x.detach() for x in tensors())
        found = said(lambda: tr.capture(q[:, :0] if here.rank == ODD else q, k, v, cp))
    works(cp)
    return found


def test_one_rank_refuses_to_capture(ranks: RankPools) -> None:
    check_heard(ranks(WORLD_SIZE)(capturing), ConfigurationError, "holds no token of q")


# ---------- before anybody has met


def at_first(here: Here, what: str, name: str) -> tuple[str, str]:
    """In a context whose transport is not made yet."""
    odd, usual, *_ = REFUSALS[what]
    with ContextParallel(schedule="ring", transport=name, timeout_seconds=PEER_SECONDS) as cp:
        found = said(lambda: (odd if here.rank == ODD else usual)(cp))
        works(cp)
    return found


@pytest.mark.parametrize("name", ["auto", "gloo"])
@pytest.mark.parametrize("what", ["a number", "a mask", "no tensor"])
def test_at_the_first_call(what: str, name: str, ranks: RankPools) -> None:
    *_, kind, says = REFUSALS[what]
    check_heard(ranks(WORLD_SIZE)(at_first, what, name), kind, says)


def elsewhere(here: Here, calls_before: int, refused: bool) -> tuple[str, str]:
    """One rank has tensors for which "auto" is another transport, as on another kind of device."""
    cp = ContextParallel(schedule="ring", timeout_seconds=PEER_SECONDS)
    for _ in range(calls_before):
        works(cp)
    with pytest.MonkeyPatch.context() as patched:
        if here.rank == ODD:
            patched.setattr(registry, "automatic", lambda group, device: "gloo")
        odd = here.rank == ODD
        found = said(lambda: attend(cp, scale=(math.nan if refused else 0.5) if odd else 0.25))
    works(cp)
    cp.close()
    return found


@pytest.mark.parametrize("refused", [False, True])
def test_tensors_on_another_device_later(refused: bool, ranks: RankPools) -> None:
    for rank, (kind, text) in enumerate(ranks(WORLD_SIZE)(elsewhere, 1, refused)):
        if refused:
            assert text == "scale is nan; give a finite number, or None for 1/√D" or rank != ODD
            assert text.startswith(f"rank {ODD} refused: scale is nan") or rank == ODD, text
        else:
            assert kind == "Disagreement" and "scale: ranks 0, 2: 0.25; rank 1: 0.5." in text, text


@pytest.mark.parametrize("refused", [False, True])
def test_tensors_on_another_device_at_first(refused: bool, ranks: RankPools) -> None:
    for rank, (kind, text) in enumerate(ranks(WORLD_SIZE)(elsewhere, 0, refused)):
        if refused and rank == ODD:
            assert text.startswith("scale is nan"), text
        else:
            assert kind == "ConfigurationError" and "'gloo'" in text, text


def on_two_kinds_of_devices(here: Here) -> bool:
    """All ranks come to tensors for which "auto" is another transport."""
    cp = ContextParallel(schedule="auto", timeout_seconds=PEER_SECONDS)
    works(cp)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(registry, "automatic", lambda group, device: "gloo")
        out = attend(cp, Q, KV, KV, mask=tr.Causal())
        works(cp)
    works(cp)
    made = len(cp._made_here)
    cp.close()
    return made == 2 and torch.allclose(out, torch.ones(()))


def test_all_come_to_another_device(ranks: RankPools) -> None:
    assert all(ranks(WORLD_SIZE)(on_two_kinds_of_devices))


# ---------- several that refuse


def several_refuse(here: Here, name: str, scales: list[float]) -> tuple[str, str]:
    cp = ContextParallel(schedule="ring", transport=opened(here, name))
    found = said(lambda: attend(cp, scale=scales[here.rank]))
    works(cp)
    return found


@transports
def test_all_refuse_alike(name: str, ranks: RankPools) -> None:
    own = ("ConfigurationError", "scale is nan; give a finite number, or None for 1/√D")
    assert ranks(WORLD_SIZE)(several_refuse, name, [math.nan] * 3) == [own] * 3


@transports
def test_each_refuses_something_else(name: str, ranks: RankPools) -> None:
    found = ranks(WORLD_SIZE)(several_refuse, name, [math.nan, 0.25, math.inf])
    assert [kind for kind, _ in found] == ["ConfigurationError", "Disagreement", "ConfigurationError"]
    advice = "give a finite number, or None for 1/√D"
    assert [text for _, text in found] == [
        f"scale is nan; {advice}",
        f"rank 0 refused: scale is nan; {advice}; rank 2 refused: scale is inf; {advice}. So no rank made the call",
        f"scale is inf; {advice}",
    ]


def closed_guest(here: Here) -> list[tuple[str, str]]:
    """A context over a transport of another one, closed on one rank alone."""
    transport = opened(here, "shm")
    cp = ContextParallel(schedule="ring", transport=transport)
    works(cp)
    if here.rank == ODD:
        cp.close()
    found = said(lambda: attend(cp))
    works(ContextParallel(schedule="ring", transport=transport))
    return [found]


def test_a_context_that_one_rank_has_closed(ranks: RankPools) -> None:
    found = [each for (each,) in ranks(WORLD_SIZE)(closed_guest)]
    check_heard(found, ConfigurationError, "this ContextParallel was closed")


# ---------- what it costs


def exchanges(here: Here, refuses: bool) -> int:
    """How often the ranks speak in a call of both passes."""
    transport = opened(here, "shm")
    cp = ContextParallel(schedule="ring", transport=transport)
    works(cp)
    control = transport.control  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patched:
        count: list[str] = []
        ask = control.ask

        def counted(payload: bytes, what: str) -> Any:
            count.append(what)
            return ask(payload, what)

        patched.setattr(control, "ask", counted)
        if refuses:
            said(lambda: attend(cp, scale=math.nan))
        else:
            torch.autograd.backward(attend(cp).sum())
    return len(count)


def test_a_call_that_passes_costs_one_exchange_a_pass(ranks: RankPools) -> None:
    assert ranks(WORLD_SIZE)(exchanges, False) == [2] * WORLD_SIZE
    assert ranks(WORLD_SIZE)(exchanges, True) == [1] * WORLD_SIZE


def test_a_rank_alone_tells_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    cp = ContextParallel()
    monkeypatch.setattr(ContextParallel, "speaker", lambda *_: pytest.fail("there is nobody to speak to"))
    for scale, kind in ((math.nan, "ConfigurationError"), (0.5, "nothing")):
        assert said(lambda scale=scale: attend(cp, scale=scale))[0] == kind  # type: ignore[misc]


def unheard(here: Here) -> tuple[str, str]:
    """The others make no call at all."""
    cp = ContextParallel(schedule="ring", timeout_seconds=5.0)
    works(cp)
    found = said(lambda: attend(cp, scale=math.nan)) if here.rank == ODD else ("", "")
    assert here.rank != ODD or said(lambda: attend(cp))[0] == PeerLost.__name__
    return found


def test_who_is_not_heard_raises_its_own_error(ranks: RankPools) -> None:
    with ranks.expendable(2) as some:
        assert some(unheard)[ODD] == ("ConfigurationError", "scale is nan; give a finite number, or None for 1/√D")
