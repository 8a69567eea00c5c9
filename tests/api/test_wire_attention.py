"""Attention whose q, k and v travel in wire formats: errors, gradients and bytes, and what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from copies import copied_as_one
from oracle import relative_error
from ranks import Here, RankPools

import tokenring as tr
from tokenring.backends.codecs import blocks, trial
from tokenring.backends.interfaces import Transport
from tokenring.ir.schedule_data import PASSES
from tokenring.ir.wire_formats import encoded
from tokenring.schedule.families.registry import parse
from tokenring.schedule.names import make_schedule
from tokenring.sequence.layout import make_layout

LENGTH, HEADS, DIM = 128, 4, 64
NAMES = ("out", "dq", "dk", "dv")
POINTS = ((4, "ring"), (4, "ring/keep"), (4, "tokenring"), (2, "ulysses"), (3, "direct-kv"))
SCHEME = parse("ring").make(1)
Links = dict[tuple[int, int], int]


def given(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k, v and the gradient of out: [1, T, H, D]."""
    random = torch.Generator().manual_seed(3)
    return tuple(torch.randn(1, LENGTH - LENGTH % 6, HEADS, DIM, generator=random).to(dtype) for _ in range(4))


def unsplit(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Causal attention of what this dtype holds, in float64."""
    q, k, v, dout = (each.double() for each in given(dtype))
    q, k, v = of = [each.transpose(1, 2).requires_grad_() for each in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    grads = torch.autograd.grad(out, of, dout.transpose(1, 2))
    made = (out.detach(), *grads)
    return dict(zip(NAMES, (each.transpose(1, 2) for each in made), strict=True))


def transport_of(here: Here) -> Transport:
    assert here.base.transport is not None
    return here.base.transport


def attended(here: Here, name: str, dtype: torch.dtype, wire: str | None) -> tuple[dict[str, float], list[Links], bool]:
    """The squared errors of this rank's parts, the bytes that it sent in each pass, and whether they are as planned."""
    with tr.ContextParallel(schedule=name, transport=transport_of(here), wire=wire) as cp:
        q, k, v, dout = (tr.shard(each, cp, dim=1).detach() for each in given(dtype))
        of, sent = [each.requires_grad_() for each in (q, k, v)], list[Links]()
        counter = transport_of(here).sent_bytes
        for pass_ in PASSES:
            counter.clear()
            if pass_ == "forward":
                out = tr.attention(q, k, v, cp, is_causal=True)
            else:
                grads = torch.autograd.grad(out, of, dout)
            sent.append({(here.rank, dst): n for dst, n in counter.items() if n})
        plan = tr.plan(q, k, v, cp, is_causal=True)
        planned = [plan.schedule.link_bytes(plan.workload, each) for each in PASSES]
        own = [{link: n for link, n in each.items() if link[0] == here.rank} for each in planned]
        wanted = unsplit(dtype)
        made = zip(NAMES, (out.detach(), *grads), strict=True)
        errors = {each: relative_error(part, tr.shard(wanted[each], cp, dim=1)) for each, part in made}
    said = f"on the wire: kv, q in {wire}, 1.031 bytes an element; each is encoded once"
    assert (said in str(plan)) == (wire is not None)
    return errors, sent, own == sent


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize(("world", "name"), POINTS)
def test_errors_and_bytes(ranks: RankPools, world: int, name: str, dtype: torch.dtype) -> None:
    """MXFP8: some encodings' error, and not that of bf16 alone; bytes to the byte, and fewer."""
    plain = ranks(world)(attended, name, dtype, None)
    wired = ranks(world)(attended, name, dtype, "mxfp8")
    for (alone, more, _), (found, fewer, planned) in zip(plain, wired, strict=True):
        assert planned
        for each in NAMES:
            assert found[each] <= 3 * 0.0266 + 2 * alone[each], each
        assert max(found.values()) > 0.01 > max(alone.values())
        assert sum(fewer[0].values()) < sum(more[0].values())
        if name in ("ring", "ring/keep", "direct-kv"):
            assert sum(more[0].values()) >= (1.93 if dtype == torch.bfloat16 else 3.8) * sum(fewer[0].values())


def beside_a_mean(here: Here, name: str, mean: float) -> dict[str, float]:
    """The errors of this rank's out and dq in MXFP8, where all keys have a mean of so many spreads in common."""
    q, k, v, dout = given(torch.float32)
    random = torch.Generator().manual_seed(5)
    k = k + mean * torch.randn(1, 1, HEADS, DIM, generator=random)
    own = [each.double().transpose(1, 2).requires_grad_() for each in (q, k, v)]
    whole = torch.nn.functional.scaled_dot_product_attention(own[0], own[1], own[2])
    (dq,) = torch.autograd.grad(whole, own[:1], dout.double().transpose(1, 2))
    with tr.ContextParallel(schedule=name, transport=transport_of(here), wire="mxfp8") as cp:
        q, k, v, dout = (tr.shard(each, cp, dim=1).detach() for each in (q, k, v, dout))
        out = tr.attention(q.requires_grad_(), k, v, cp)
        (found,) = torch.autograd.grad(out, q, dout)
        made = {"out": (out.detach(), whole.detach()), "dq": (found, dq)}
        return {each: relative_error(a, tr.shard(b.transpose(1, 2), cp, dim=1)) for each, (a, b) in made.items()}


@pytest.mark.parametrize("world", (2, 4))
def test_a_mean_that_keys_have_in_common_adds_no_error_where_q_moves(ranks: RankPools, world: int) -> None:
    """Each row has one q and one dout in all its tiles, so that rounding moves all its scores alike."""
    plain, beside = (ranks(world)(beside_a_mean, "tokenring", mean) for mean in (0.0, 16.0))
    for before, after in zip(plain, beside, strict=True):
        assert all(after[each] <= 1.5 * before[each] for each in before)


def computed(here: Here, name: str, together: bool) -> tuple[torch.Tensor, ...]:
    """This rank's results in MXFP8. together: with copies made as one, as on a device."""
    copied = copied_as_one() if together else nullcontext()
    with copied, tr.ContextParallel(schedule=name, transport=transport_of(here), wire="mxfp8") as cp:
        q, k, v, dout = (tr.shard(each, cp, dim=1).detach() for each in given(torch.bfloat16))
        of = [each.requires_grad_() for each in (q, k, v)]
        out = tr.attention(q, k, v, cp, is_causal=True)
        return out.detach(), *torch.autograd.grad(out, of, dout)


@pytest.mark.parametrize("name", ("ring", "ulysses", "tokenring"))
def test_copies_made_as_one_give_the_same_bits(ranks: RankPools, name: str) -> None:
    alone, together = (ranks(2)(computed, name, each) for each in (False, True))
    for one, other in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def refused_by_a_device(here: Here) -> str:
    """The error of each kind of call where rank 1's device has no copies to FP8, and both are tried; then none."""

    def missing(*given: object) -> None:
        raise RuntimeError("copy_ is not implemented for Float8_e4m3fn")

    texts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "TRUSTED", frozenset())
        if here.rank == 1:
            patch.setattr(blocks.E4M3, "_write", missing)
        trial._fault.cache_clear()
        for call in (attend_once, multiply_once):
            with pytest.raises(tr.TokenRingError) as found:
                call(here)
            texts.append(str(found.value))
    trial._fault.cache_clear()
    assert all(call(here).isfinite().all() for call in (attend_once, multiply_once))
    assert texts[0] == texts[1]
    return texts[0]


def attend_once(here: Here) -> torch.Tensor:
    x = torch.ones(1, 4, 2, 64)
    with tr.ContextParallel(schedule="ring", transport=transport_of(here), wire="mxfp8") as cp:
        return tr.attention(x, x, x, cp)


def multiply_once(here: Here) -> torch.Tensor:
    with tr.TensorParallel(schedule="direct-q", transport=transport_of(here), wire="mxfp8") as tp:
        return tr.column_linear(torch.ones(1, 4, 64), torch.ones(2, 64), tp)


def refusal(here: Here, what: str) -> str:
    odd, transport = here.rank == 1, transport_of(here)
    wire = "mxint8" if odd and what == "format" else None if odd and what == "none" else "mxfp8"
    wire = "bf16" if what == "dtype" else wire
    if what == "device":
        return refused_by_a_device(here)
    cp = tr.ContextParallel(schedule="ring", transport=transport, wire=wire)
    with cp, pytest.raises(tr.TokenRingError) as found:
        if what == "engines":
            tr.gather_queries(torch.ones(1, 2, 32), cp)
        elif what == "cache":
            tr.KVCache(cp, layers=1, kv_heads=1, head_dim=32, capacity=256)
        else:
            dim = 48 if what == "width" else 64
            x = torch.ones(1, 4, 2, dim, dtype=torch.float16 if what == "dtype" else torch.float32)
            tr.attention(x, x, x, cp)
    return str(found.value)


REFUSED = {
    "width": "mxfp8 on the wire has blocks of 32 elements, which do not divide rows of 48",
    "dtype": "bf16 on the wire has 16 bits an element, and saves nothing over torch.float16 of the tensors",
    "device": "mxfp8 on the wire was tried on cpu in torch.float32, and it fails there (",
    "format": "ring, mxint8 on the wire of ring",
    "none": "rank 0: ring, mxfp8 on the wire of ring; rank 1: ring",
    "engines": "gather_queries in a wire format is not supported, and its ContextParallel has wire='mxfp8'",
    "cache": "attention over a KVCache in a wire format is not supported",
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_on_all_ranks(ranks: RankPools, what: str) -> None:
    for text in ranks(2)(refusal, what):
        assert REFUSED[what] in text


def test_options_that_are_refused() -> None:
    with pytest.raises(tr.UnsupportedError, match=r"wire='mxfp8' with a schedule that is planned .* name one"):
        tr.ContextParallel("self", wire="mxfp8")
    with pytest.raises(tr.ConfigurationError, match=r"wire='fp8': use one of bf16"):
        tr.ContextParallel("self", schedule="ring", wire="fp8")
    q, latent, rope, weight = (torch.ones(*shape) for shape in ((1, 4, 2, 64), (1, 4, 32), (1, 4, 32), (128, 32)))
    cp = tr.ContextParallel("self", schedule="ring", wire="mxfp8")
    with cp, pytest.raises(tr.UnsupportedError, match="latent_attention in a wire format is not supported"):
        tr.latent_attention(q, latent, rope, weight, cp)


def test_formats_of_its_own_and_wire() -> None:
    whole = make_layout("contiguous", 1, 8)
    made = encoded(make_schedule("ring", whole, whole, tr.Full()), (("kv", "bf16"),))
    for schedule in (made, replace(SCHEME, codecs=(("kv", "bf16"),))):
        with pytest.raises(tr.ConfigurationError, match=r"formats of its own \(kv in bf16\): leave one of them out"):
            tr.ContextParallel("self", schedule=schedule, wire="mxfp8")


def test_proofs_of_schedules_with_a_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a name has its codecs checked alone; one that is given is proved once, with them."""
    proved, checked = list[dict[str, str]](), list[dict[str, str]]()
    monkeypatch.setattr("tokenring.proof.verify.verify", lambda made: proved.append(made.formats))
    monkeypatch.setattr("tokenring.proof.encodings.check_codecs", lambda made: checked.append(made.formats))
    x, formats = torch.ones(1, 8, 2, 64), {"kv": "mxfp8", "q": "mxfp8"}
    with tr.ContextParallel("self", schedule="ring", wire="mxfp8") as cp:
        assert tr.plan(x, x, x, cp).schedule.formats == formats
    assert (proved, checked) == ([], [formats])
    with tr.ContextParallel("self", schedule=SCHEME, wire="mxfp8") as cp:
        assert tr.plan(x, x, x, cp).schedule.formats == formats
    assert (proved, checked) == ([formats], [formats])


def test_latents_are_refused_in_a_schedule_that_is_given() -> None:
    whole = make_layout("contiguous", 2, 8)
    made = encoded(make_schedule("ring", whole, whole, tr.Full()), (("kv", "mxfp8"),))
    size = tr.Workload(1, 8, 8, 2, 1, 64, torch.bfloat16, value_dim=32, latent_dim=32)
    with pytest.raises(tr.UnsupportedError, match="latents in a wire format are not supported"):
        made.link_bytes(size)
