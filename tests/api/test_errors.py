"""What is refused, and in which words: each error says what was asked, what was found and what to do."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import patient
from ranks import Here, RankError, RankPools
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tokenring as tr
from tokenring import ConfigurationError, ContextParallel, PeerLost, UnsupportedError

# One rank needs no group, and refuses as many do.
ALONE = ContextParallel(layout="zigzag")
SCHEDULES = (
    "ring, tokenring, bidirectional, direct-kv, direct-q, all-gather-kv, ulysses[/K], packed/G, uneven/G, usp/U, "
    "tiles/AxB, sub-sharded/UxAxB, mixed[/GxH], double-ring/L, case-iii/L, case-iii-direct/L, reduced/L, relay/L, "
    "relay-q/L, mesh-kv/AxBx..., mesh-q/AxBx..., multi-ring, multi-ring-q"
)


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


Q, KV = tensor(2, 8, 4, 16), tensor(2, 8, 2, 16)


def call(q: torch.Tensor = Q, k: torch.Tensor = KV, v: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    made: torch.Tensor = tr.attention(q, k, k if v is None else v, ALONE, **options)
    return made


def test_what_fits_is_taken() -> None:
    assert call().shape == Q.shape
    assert call(dropout_p=0.0, softcap=0.0, sinks=None, bias=None).shape == Q.shape
    assert call(Q, tensor(2, 16, 2, 16), mask=tr.Full()).shape == Q.shape
    assert call(mask=tr.Documents([0, 8])).shape == Q.shape
    assert call(*(x.to(torch.float16) for x in (Q, KV))).dtype == torch.float16


HALVES = "q [2, 8, 4, 16], k [2, 8, 2, 8], v [2, 8, 2, 8]"
KV_SHAPES = "k and v must have one shape but for their head dimensions, and q the same batch"
Refusal = tuple[Callable[[], object], type[Exception], str]
CALLS: dict[str, Refusal] = {
    "dropout": (
        lambda: call(dropout_p=0.1),
        UnsupportedError,
        "attention with dropout_p is not supported: its mask cannot be the same under every split; set it to 0",
    ),
    "sinks of other heads": (
        lambda: call(sinks=tensor(2)),
        ConfigurationError,
        "sinks are [2], and q has 4 heads here: give a logit for each, [4]",
    ),
    "sinks in float64": (
        lambda: call(sinks=tensor(4).double()),
        UnsupportedError,
        "sinks in torch.float64 are not supported; give them in float32, or as q is",
    ),
    "sinks elsewhere": (
        lambda: call(sinks=tensor(4).to("meta")),
        UnsupportedError,
        "attention of a meta tensor is not supported: it has no data; give tensors on the device that is to compute",
    ),
    "sinks in a list": (
        lambda: call(sinks=[0.0] * 4),
        ConfigurationError,
        "sinks are of type list; give a tensor with a logit for each query head, or None",
    ),
    "bias": (
        lambda: call(bias=tensor(8, 8)),
        UnsupportedError,
        "attention with bias is not supported: only masks of positions are supported: Causal, SlidingWindow, Documents",
    ),
    "float64": (
        lambda: call(Q.double(), KV.double()),
        UnsupportedError,
        "attention in torch.float64 is not supported; use one of float32, bfloat16, float16",
    ),
    "integers": (
        lambda: call(Q.int(), KV.int()),
        UnsupportedError,
        "attention in torch.int32 is not supported; use one of float32, bfloat16, float16",
    ),
    "sparse tensors": (
        lambda: call(Q, KV.to_sparse()),
        UnsupportedError,
        "attention of torch.sparse_coo tensors is not supported; make q, k and v dense and padded",
    ),
    "head dims that differ": (
        lambda: call(Q, tensor(2, 8, 2, 8)),
        UnsupportedError,
        f"q and k must have one head dimension (only that of v may differ); got {HALVES}",
    ),
    "a v without elements": (
        lambda: call(Q, KV, tensor(2, 8, 2, 0)),
        ConfigurationError,
        "value_dim=0: every size must be a positive integer",
    ),
    "a narrower v of other heads": (
        lambda: call(Q, KV, tensor(2, 8, 1, 8)),
        ConfigurationError,
        f"{KV_SHAPES}; got q [2, 8, 4, 16], k [2, 8, 2, 16], v [2, 8, 1, 8]",
    ),
    "batches that differ": (
        lambda: call(Q, tensor(1, 8, 2, 16)),
        ConfigurationError,
        f"{KV_SHAPES}; got q [2, 8, 4, 16], k [1, 8, 2, 16], v [1, 8, 2, 16]",
    ),
    "a v of another length": (
        lambda: call(Q, KV, tensor(2, 4, 2, 16)),
        ConfigurationError,
        f"{KV_SHAPES}; got q [2, 8, 4, 16], k [2, 8, 2, 16], v [2, 4, 2, 16]",
    ),
    "dtypes that differ": (
        lambda: call(Q, KV.bfloat16()),
        ConfigurationError,
        "q, k and v must share dtype and device; got torch.float32/torch.bfloat16/torch.bfloat16 on cpu/cpu/cpu",
    ),
    "three dimensions": (
        lambda: call(tensor(8, 4, 16), tensor(8, 2, 16)),
        ConfigurationError,
        "attention expects q, k and v as [B, T, H, D]; got q [8, 4, 16], k [8, 2, 16], v [8, 2, 16]",
    ),
    "uneven heads": (
        lambda: call(tensor(2, 8, 5, 16), KV),
        ConfigurationError,
        "5 query heads are not a multiple of 2 kv heads: "
        "repeat or drop kv heads so that each serves equally many query heads",
    ),
    "an empty shard": (
        lambda: call(tensor(2, 0, 4, 16), tensor(2, 0, 2, 16)),
        ConfigurationError,
        "rank 0 holds no token of q, and layout 'zigzag' makes no parts such as the ranks hold: "
        "take each rank's part from tr.shard, or by tr.positions",
    ),
    "no heads": (
        lambda: call(tensor(2, 8, 0, 16), tensor(2, 8, 0, 16)),
        ConfigurationError,
        "every size must be a positive integer",
    ),
    "a tensor as mask": (
        lambda: call(mask=torch.ones(8, 8, dtype=torch.bool)),
        ConfigurationError,
        "mask is of type Tensor; use Full(), Causal(), SlidingWindow or Documents",
    ),
    "a mask without its brackets": (
        lambda: call(mask=tr.SlidingWindow),
        ConfigurationError,
        "mask=SlidingWindow has no sizes: write SlidingWindow(left, right); docs/masks.md has all masks",
    ),
    "documents beyond the sequence": (
        lambda: call(mask=tr.Documents([0, 5, 9])),
        ConfigurationError,
        "Documents end at 9, but the sequence has 8 positions: "
        "cu_seqlens counts positions of the whole sequence, over all ranks",
    ),
    "causal over different lengths": (
        lambda: call(Q, tensor(2, 16, 2, 16), mask=tr.Causal()),
        UnsupportedError,
        "mask causal numbers one sequence, but q has 8 positions and kv 16: only Full takes both",
    ),
    "documents over different lengths": (
        lambda: call(Q, tensor(2, 16, 2, 16), mask=tr.Documents([0, 8])),
        UnsupportedError,
        "mask documents(0,8) numbers one sequence, but q has 8 positions and kv 16: only Full takes both",
    ),
}
CONTEXTS: dict[str, Refusal] = {
    "layout": (
        lambda: ContextParallel(layout="zag"),
        ConfigurationError,
        "unknown layout 'zag'; choose one of contiguous, zigzag, striped, or cut one finer, as in 'zigzag/2'",
    ),
    "cuts": (
        lambda: ContextParallel(layout="zigzag/0"),
        ConfigurationError,
        "unknown layout 'zigzag/0'; choose one of contiguous, zigzag, striped, or cut one finer, as in 'zigzag/2'",
    ),
    "schedule": (
        lambda: ContextParallel(schedule="rong"),
        ConfigurationError,
        f"unknown schedule 'rong' in 'rong'; choose auto, one of {SCHEDULES}, "
        "or restrict the choice, as in 'auto:ring,tokenring'",
    ),
    "schedule in a choice": (
        lambda: ContextParallel(schedule="auto:ring,rong"),
        ConfigurationError,
        f"unknown schedule 'rong' in 'auto:ring,rong'; choose auto, one of {SCHEDULES}, "
        "or restrict the choice, as in 'auto:ring,tokenring'",
    ),
    "a choice of nothing": (
        lambda: ContextParallel(schedule="ring:tokenring"),
        ConfigurationError,
        f"unknown schedule 'ring:tokenring' in 'ring:tokenring'; choose auto, one of {SCHEDULES}, "
        "or restrict the choice, as in 'auto:ring,tokenring'",
    ),
    "transport": (
        lambda: ContextParallel(transport="mpi"),
        ConfigurationError,
        "unknown transport 'mpi'; choose one of auto, gloo, shm",
    ),
    "kernel": (
        lambda: ContextParallel(kernel="flash3"),
        ConfigurationError,
        "unknown kernel 'flash3'; choose one of auto, cpu-flash, reference, npu-fusion, torch-flash, torch-cudnn",
    ),
    "group": (
        lambda: ContextParallel([0, 1]),  # type: ignore[arg-type]
        ConfigurationError,
        "group is of type list; give a ProcessGroup, a one-dimensional DeviceMesh or None",
    ),
    "schedule for another world": (
        lambda: ContextParallel(schedule=tr.schedule("ring", 4)),
        ConfigurationError,
        "the schedule is for 4 ranks, the group has 1",
    ),
}


@pytest.mark.parametrize("name", CALLS | CONTEXTS)
def test_refusals(name: str) -> None:
    make, kind, says = (CALLS | CONTEXTS)[name]
    with pytest.raises(kind) as caught:
        make()
    assert says in str(caught.value)
    assert isinstance(caught.value, tr.TokenRingError) and caught.value.__cause__ is None


def test_errors_are_also_what_python_calls_them() -> None:
    assert issubclass(ConfigurationError, ValueError) and issubclass(UnsupportedError, NotImplementedError)
    assert issubclass(PeerLost, RuntimeError) and issubclass(tr.BackendUnavailable, RuntimeError)
    for name in ("ConfigurationError", "UnsupportedError", "ScheduleError", "PeerLost", "BackendUnavailable"):
        assert issubclass(getattr(tr, name), tr.TokenRingError)


# ---------- a schedule made for another call


MADE = tr.schedule("ring", 1, "zigzag", tr.Causal(), length=8)
FOR_ANOTHER: dict[str, tuple[dict[str, Any], str]] = {
    "length": (
        {"q": tensor(2, 16, 4, 16), "k": tensor(2, 16, 2, 16), "mask": tr.Causal()},
        "schedule 'ring' was made for q layout zigzag of 8, but the call has zigzag of 16",
    ),
    "kv length": (
        {"k": tensor(2, 16, 2, 16)},
        "schedule 'ring' was made for kv layout zigzag of 8, but the call has zigzag of 16",
    ),
    "mask": ({}, "schedule 'ring' was made for mask causal, but the call has full"),
    "layout": (
        {"mask": tr.Causal(), "layout": "striped"},
        "schedule 'ring' was made for q layout zigzag of 8, but the call has striped of 8",
    ),
}


@pytest.mark.parametrize("name", FOR_ANOTHER)
def test_schedule_for_another_call(name: str) -> None:
    options, says = FOR_ANOTHER[name]
    cp = ContextParallel(layout=options.get("layout", "zigzag"), schedule=MADE)
    k = options.get("k", KV)
    with pytest.raises(ConfigurationError) as caught:
        tr.attention(options.get("q", Q), k, k, cp, options.get("mask"))
    advice = ": make it for this call, or give its Scheme, which is built for each"
    assert str(caught.value) == says + advice
    assert tr.attention(Q, KV, KV, ContextParallel(schedule=MADE), tr.Causal()).shape == Q.shape


def test_schedule_that_does_not_compute_everything() -> None:
    broken = MADE.replace(tiles=())
    with pytest.raises(tr.ScheduleError, match=r"ring.*"):
        tr.attention(Q, KV, KV, ContextParallel(schedule=broken), tr.Causal())


def test_pieces_that_do_not_divide() -> None:
    says = (
        "schedule 'direct-q': 3 pieces do not divide chunks of 4 tokens (layout 'zigzag' of 8); "
        "use fewer pieces or another length"
    )
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        tr.attention(Q, KV, KV, ContextParallel(schedule="direct-q", pieces=3))


# ---------- errors that need ranks


def said(make: Callable[[], object]) -> str:
    try:
        make()
    except tr.TokenRingError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def about_groups(here: Here) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    pair = dist.new_group([0, 1])
    return {
        "mesh": said(lambda: ContextParallel(mesh)),
        "slice": said(lambda: ContextParallel(mesh["cp"])),
        "transport": said(lambda: ContextParallel(mesh["cp"], transport=here.base.transport or "")),
        "schedule": said(lambda: ContextParallel(mesh["cp"], schedule=tr.schedule("ring", 4))),
        "member": said(lambda: ContextParallel(pair)),
        "number": said(lambda: ContextParallel(3)),  # type: ignore[arg-type]
        "mesh of others": said(lambda: ContextParallel(DeviceMesh("cpu", [0, 1]))),
        "layout": said(lambda: tr.attention(Q, KV, KV, here.cp(layout=tr.schedule("ring", 2).q_layout))),
    }


def test_groups(ranks: RankPools) -> None:
    for rank, found in enumerate(ranks(4)(about_groups)):
        not_one = "ConfigurationError: this rank is not a member of the group; only members make a context of it"
        member = "nothing" if rank < 2 else not_one
        assert found == {
            "mesh": "ConfigurationError: a DeviceMesh of 2 dimensions was given; name one of them, as mesh['cp']",
            "slice": "nothing",
            "transport": f"ConfigurationError: in the transport this is rank {rank} of 4, in the group "
            f"rank {rank % 2} of 2: give a transport of the same group",
            "schedule": "ConfigurationError: the schedule is for 4 ranks, the group has 2",
            "member": member,
            "number": "ConfigurationError: group is of type int; give a ProcessGroup, a one-dimensional DeviceMesh "
            "or None",
            "mesh of others": member,
            "layout": "ConfigurationError: layout 'zigzag' is for 2 ranks and 256 positions; "
            "the group has 4 ranks and the tensors 32 positions",
        }


# ---------- a peer that is silent

TIMEOUT_SECONDS = 2.0


def without_rank(here: Here, silent: int, schedule: str, direction: str) -> str:
    """What a rank sees whose peer goes no further."""
    cp = ContextParallel(layout="contiguous", schedule=schedule, timeout_seconds=patient(TIMEOUT_SECONDS))
    x = torch.randn(1, 64, 2, 16).requires_grad_()
    out = tr.attention(x, x, x, cp)  # all of them: the transport is there
    dist.barrier()
    if here.rank == silent:
        return "silent"  # its process goes on, and answers nobody
    again: dict[str, Callable[[], object]] = {
        "forward": lambda: tr.attention(x, x, x, cp),
        "backward": lambda: torch.autograd.backward(out.sum()),
    }
    return said(again[direction])


@pytest.mark.parametrize(
    ("schedule", "direction"),
    [("ring", "forward"), ("direct-q", "forward"), ("tokenring", "backward")],
)
def test_silent_peer(schedule: str, direction: str, ranks: RankPools) -> None:
    """Every other rank raises PeerLost, and names a rank, a block and what to do."""
    with ranks.expendable(3) as some:
        found = some(without_rank, 1, schedule, direction)
    for rank, text in enumerate(found):
        if rank != 1:
            assert re.match(r"PeerLost: rank 1 of 3 is lost: it is silent: no answer within [0-9.]+ s", text), text
            assert f"Rank {rank} waited to hear of the call" in text
            assert "raise timeout_seconds" in text and "Look at the log of rank 1 first" in text


def with_dead_rank(here: Here, dead: int) -> None:
    cp = ContextParallel(schedule="ring", timeout_seconds=patient(TIMEOUT_SECONDS))
    x = torch.randn(1, 64, 2, 16)
    for _ in range(1000):
        tr.attention(x, x, x, cp)
        if here.rank == dead:
            os.kill(os.getpid(), signal.SIGKILL)


def test_dead_peer(ranks: RankPools) -> None:
    with ranks.expendable(3) as some, pytest.raises(RankError) as caught:
        some(with_dead_rank, 1)
    text = str(caught.value)
    assert "rank 1: died with exit code -9" in text
    assert len(re.findall(r"PeerLost: rank 1 of 3 is lost: its process \(pid \d+ on .+?\) is gone", text)) == 2, text
