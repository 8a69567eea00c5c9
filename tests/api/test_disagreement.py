"""Ranks that make different calls: every rank says who differs in what, before anything is used, and life goes on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from machines import APART, transport_name
from patience import patient
from ranks import PEER_SECONDS, Here, RankPools

from tokenring import Causal, ConfigurationError, ContextParallel, Documents, Full, Mask, SlidingWindow, attention
from tokenring.backends.interfaces import Transport
from tokenring.backends.registry import make_transport
from tokenring.backends.transports.gloo import GlooTransport

WORLD_SIZE = 4


@dataclass(frozen=True)
class Call:
    """One rank's side of an attention call."""

    tokens: int = 16
    kv_tokens: int = 16
    batch: int = 2
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    mask: Mask = Full()  # noqa: RUF009 (frozen)
    scale: float = 0.25
    layout: str = "zigzag"
    schedule: str = "tokenring"
    pieces: int | None = None
    gradients: bool = True
    kernel: str = "auto"

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = torch.ones(self.batch, self.tokens, self.q_heads, self.head_dim, dtype=self.dtype)
        kv = torch.ones(self.batch, self.kv_tokens, self.kv_heads, self.head_dim, dtype=self.dtype)
        return q.requires_grad_(), kv.clone().requires_grad_(), kv.requires_grad_()

    def context(self, transport: Transport) -> ContextParallel:
        return ContextParallel(None, self.layout, self.schedule, transport, pieces=self.pieces, kernel=self.kernel)

    def run(self, cp: ContextParallel) -> torch.Tensor:
        with torch.set_grad_enabled(self.gradients):
            q, k, v = self.tensors()
            return attention(q, k, v, cp, self.mask, self.scale)


NO_NPU = "kernel 'npu-fusion' takes NPU tensors; these are on cpu: use 'auto'"
LONG = Documents(range(0, 65, 2))  # prints longer than one exchange takes
# What differs at the odd rank → the field that the error names, what the others have, what the odd one has.
DIFFERENCES = {
    "tokens": (Call(tokens=32), "q_length", "64", "128"),
    "kv tokens": (Call(kv_tokens=32), "kv_length", "64", "128"),
    "batch": (Call(batch=1), "batch", "2", "1"),
    "q heads": (Call(q_heads=8), "q_heads", "4", "8"),
    "kv heads": (Call(kv_heads=1), "kv_heads", "2", "1"),
    "head dim": (Call(head_dim=32), "head_dim", "16", "32"),
    "dtype": (Call(dtype=torch.bfloat16), "dtype", "torch.float32", "torch.bfloat16"),
    "mask": (Call(mask=Causal()), "mask", "full", "causal"),
    "window": (Call(mask=SlidingWindow(5, 3)), "mask", "full", "window(5,3)"),
    "documents": (Call(mask=LONG), "mask", "full", str(LONG)),
    "scale": (Call(scale=0.5), "scale", "0.25", "0.5"),
    "layout": (Call(layout="striped"), "layout", "zigzag", "striped"),
    "schedule": (Call(schedule="ring"), "schedule", "tokenring", "ring"),
    "pieces": (Call(pieces=2), "pieces", "None", "2"),
    "gradient mode": (Call(gradients=False), "gradients enabled", "True", "False"),
    "kernel": (Call(kernel="npu-fusion"), "kernel", "computes it", NO_NPU),
}
transports = pytest.mark.parametrize("name", ["gloo", APART, "shm"])


def opened(here: Here, name: str) -> Transport:
    """The pool's transport of that name, kept: what it has refused must do it no harm."""
    key = f"transport {name}"
    if key not in here.memory:
        assert dist.group.WORLD is not None
        with transport_name(name) as known:
            here.memory[key] = make_transport(known, dist.group.WORLD, patient(PEER_SECONDS))
    transport: Transport = here.memory[key]
    return transport


def refused(cp: ContextParallel, call: Call) -> str:
    """What the call raises; it sends nothing, but between machines."""
    assert cp.transport is not None
    before = dict(cp.transport.sent_bytes)
    with pytest.raises(ConfigurationError) as caught:
        call.run(cp)
    assert apart(cp) or dict(cp.transport.sent_bytes) == before, "sent before the ranks agreed"
    return str(caught.value)


def apart(cp: ContextParallel) -> bool:
    transport = cp.transport
    return isinstance(transport, GlooTransport) and transport.control.shared is None


def works(cp: ContextParallel) -> None:
    """All tensors are ones, and so is the result; a gradient of ones reaches the ones of v."""
    call = Call(mask=Causal())
    q, k, v = call.tensors()
    out = attention(q, k, v, cp, call.mask)
    assert torch.allclose(out, torch.ones(()))
    torch.autograd.backward(out.sum())
    assert v.grad is not None and torch.isfinite(v.grad).all()
    total = v.grad.sum()
    dist.all_reduce(total)
    assert abs(float(total) / (out.numel() * WORLD_SIZE) - 1) < 1e-5


def differ(here: Here, name: str, odd: dict[int, Call], earlier_calls: int) -> str:
    """Some ranks make calls of their own, before or after calls in common."""
    usual, mine = Call(), odd.get(here.rank, Call())
    transport = opened(here, name)
    same = usual.context(transport)
    cp = same if _fits(mine) else mine.context(transport)
    for _ in range(earlier_calls):
        works(same)
    text = refused(cp, mine)
    works(same)
    assert refused(cp, mine) == text  # nothing is remembered of it
    works(same)
    return text


def _fits(call: Call) -> bool:
    """Whether it can be made in the usual context."""
    usual = Call()
    return all(getattr(call, name) == getattr(usual, name) for name in ("layout", "schedule", "pieces", "kernel"))


@pytest.mark.sampled(32)
@transports
@pytest.mark.parametrize("earlier_calls", [0, 2], ids=["first call", "later call"])
@pytest.mark.parametrize("what", DIFFERENCES)
def test_one_rank_differs(what: str, earlier_calls: int, name: str, ranks: RankPools) -> None:
    odd_call, field, usual, odd = DIFFERENCES[what]
    rank = list(DIFFERENCES).index(what) % WORLD_SIZE
    others = ", ".join(str(each) for each in range(WORLD_SIZE) if each != rank)
    for text in ranks(WORLD_SIZE)(differ, name, {rank: odd_call}, earlier_calls):
        assert text.startswith("the ranks disagree, so the call was not made. "), text
        assert f" {field}: ranks {others}: {usual}; rank {rank}: {odd}. " in text, text
        assert text.count(": rank") == 1, text  # it names nothing else


@transports
def test_one_rank_has_no_kernel_to_plan_for(name: str, ranks: RankPools) -> None:
    """It raises before the others begin to plan."""
    for text in ranks(WORLD_SIZE)(kernels_differ, name, 2):
        assert f" kernel: ranks 0, 1, 3: computes it; rank 2: {NO_NPU}. " in text, text


def kernels_differ(here: Here, name: str, odd: int) -> str:
    transport = opened(here, name)
    call = Call(schedule="auto", kernel="npu-fusion") if here.rank == odd else Call(schedule="auto")
    text = refused(call.context(transport), call)
    works(Call().context(transport))
    return text


@transports
def test_several_ranks_differ(name: str, ranks: RankPools) -> None:
    odd = {1: Call(scale=1.0), 2: Call(mask=Causal()), 3: Call(scale=0.5, batch=1)}
    for text in ranks(WORLD_SIZE)(differ, name, odd, 1):
        for each in (
            "batch: ranks 0, 1, 2: 2; rank 3: 1.",
            "mask: ranks 0, 1, 3: full; rank 2: causal.",
            "scale: ranks 0, 2: 0.25; rank 1: 1.0; rank 3: 0.5.",
        ):
            assert each in text, text


def passes_differ(here: Here, name: str, odd: int) -> str:
    """One rank goes back while the others go forward; then all go back."""
    cp = Call().context(opened(here, name))
    q, k, v = Call().tensors()
    out = attention(q, k, v, cp)
    assert cp.transport is not None
    before = dict(cp.transport.sent_bytes)
    with pytest.raises(ConfigurationError) as caught:
        if here.rank == odd:
            torch.autograd.backward(out.sum(), retain_graph=True)
        else:
            attention(q, k, v, cp)
    assert apart(cp) or dict(cp.transport.sent_bytes) == before
    assert all(x.grad is None for x in (q, k, v))
    torch.autograd.backward(out.sum())
    assert v.grad is not None and torch.allclose(v.grad, torch.full((), 2.0))  # q heads for each kv head
    works(cp)
    return str(caught.value)


@transports
@pytest.mark.parametrize("odd", [0, 2])
def test_passes_differ(odd: int, name: str, ranks: RankPools) -> None:
    others = ", ".join(str(each) for each in range(WORLD_SIZE) if each != odd)
    for text in ranks(WORLD_SIZE)(passes_differ, name, odd):
        assert f" pass: ranks {others}: forward; rank {odd}: backward. " in text, text


def test_the_differences() -> None:
    """Each call differs from the usual one in one field, and every field is tried."""
    fields = set(Call.__dataclass_fields__)
    tried = set()
    for call, *_ in DIFFERENCES.values():
        changed = {field for field in fields if getattr(call, field) != getattr(Call(), field)}
        assert len(changed) == 1
        assert replace(Call(), **{field: getattr(call, field) for field in changed}) == call
        tried |= changed
    assert tried == fields
