"""`auto` with an error that a wire format may add: bytes, errors, one plan on all ranks, and what is refused."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from oracle import relative_error
from ranks import Here, RankPools

import tokenring as tr
from tokenring.backends.codecs import blocks, trial
from tokenring.ir.schedule_data import PASSES
from tokenring.planner.interconnects.interconnect import full_mesh

LENGTH, HEADS, DIM = 256, 4, 64
SLOW, FAST = 0.001, 1000.0  # GB/s of a link
Found = tuple[str, dict[str, str], str, dict[str, float], int]


def tensors() -> tuple[torch.Tensor, ...]:
    """q, k, v and the gradient of out: [1, T, H, D]."""
    random = torch.Generator().manual_seed(3)
    return tuple(torch.randn(1, LENGTH, HEADS, DIM, generator=random).bfloat16() for _ in range(4))


def unsplit() -> list[torch.Tensor]:
    q, k, v, dout = (each.double().transpose(1, 2) for each in tensors())
    of = [each.requires_grad_() for each in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return [each.transpose(1, 2).contiguous() for each in (out.detach(), *torch.autograd.grad(out, of, dout))]


def attended(here: Here, gbs: float, max_error: float | None) -> Found:
    """The plan, the errors of this rank's results, and the bytes that it sent."""
    assert here.base.transport is not None
    counter = here.base.transport.sent_bytes
    with here.cp(schedule="auto", topology=full_mesh(here.world_size, gbs), max_error=max_error) as cp:
        q, k, v, dout = (tr.shard(each, cp, dim=1).detach() for each in tensors())
        of = [each.requires_grad_() for each in (q, k, v)]
        tr.plan(q, k, v, cp, is_causal=True)
        counter.clear()
        out = tr.attention(q, k, v, cp, is_causal=True)
        made = [out.detach(), *torch.autograd.grad(out, of, dout)]
        sent, plan = sum(counter.values()), tr.plan(q, k, v, cp, is_causal=True)
        right = [tr.shard(each, cp, dim=1) for each in unsplit()]
        errors = {name: relative_error(a, b) for name, a, b in zip(("out", "dq", "dk", "dv"), made, right, strict=True)}
        links = [plan.schedule.link_bytes(plan.workload, each) for each in PASSES]
        assert sent == sum(n for each in links for (src, _), n in each.items() if src == here.rank)
        again = tr.Plan.from_json(plan.to_json())
        assert again.schedule.formats == plan.schedule.formats
        with here.cp(schedule=again) as kept:
            assert torch.equal(tr.attention(q, k, v, kept, is_causal=True), out)
    return plan.name, plan.schedule.formats, plan.reason, errors, sent


@pytest.mark.parametrize(("max_error", "form"), [(0.05, "mxint8"), (0.3, "mxfp4")])
def test_a_format_is_taken_on_slow_links(ranks: RankPools, max_error: float, form: str) -> None:
    """On all ranks the same; errors keep to what is allowed, and fewer bytes go."""
    plain, found = (ranks(3)(attended, SLOW, each) for each in (None, max_error))
    for (_, formats, reason, errors, sent), (_, before, _, alone, more) in zip(found, plain, strict=True):
        assert formats == {"kv": form, "q": form} and not before
        assert reason == found[0][2] and f"in {form} on the wire" in reason
        assert max(errors.values()) <= max_error and max(errors.values()) > 1.5 * max(alone.values())
        assert sent < 0.85 * more


def small_gradients(here: Here) -> tuple[dict[str, str], float]:
    """The formats of a call in fp32 whose gradient of out is 1e-9 in size, and the error of dk."""
    with here.cp(schedule="auto", topology=full_mesh(here.world_size, SLOW), max_error=0.0045) as cp:
        q, k, v, dout = (tr.shard(each.float(), cp, dim=1).detach() for each in tensors())
        out = tr.attention(q, k.requires_grad_(), v, cp, is_causal=True)
        (dk,) = torch.autograd.grad(out, k, 1e-9 * dout)
        return tr.plan(q, k, v, cp, is_causal=True).schedule.formats, relative_error(
            1e9 * dk, tr.shard(unsplit()[2], cp, dim=1)
        )


def test_small_gradients_are_not_lost(ranks: RankPools) -> None:
    """Not so in fp16, which has fewer exponents than tensors in fp32."""
    for formats, error in ranks(2)(small_gradients):
        assert formats == {"kv": "bf16", "q": "bf16"} and error <= 0.0045


def test_none_is_taken_on_fast_links(ranks: RankPools) -> None:
    for _, formats, reason, _, _ in ranks(2)(attended, FAST, 0.25):
        assert not formats and "no wire format within an error of 0.25 makes it faster" in reason


@pytest.mark.parametrize("given", [0, -1.0, float("nan"), float("inf"), "0.1", True])
def test_numbers_that_are_refused(given: object) -> None:
    with pytest.raises(tr.ConfigurationError, match=r"max_error=.*: give a number above 0, as 0\.05"):
        tr.ContextParallel("self", max_error=given)  # type: ignore[arg-type]


def fraction(here: Here) -> bool:
    x = torch.ones(1, 8, 2, 64)
    with here.cp(schedule="auto", topology=full_mesh(2, SLOW), max_error=Fraction(1, 20)) as cp:
        return bool(tr.attention(x, x, x, cp).eq(1).all()) and "0.05 allowed" in tr.plan(x, x, x, cp).reason


def test_any_real_number_is_taken(ranks: RankPools) -> None:
    assert all(ranks(2)(fraction))


def test_named_schedules_take_a_format_by_name() -> None:
    with pytest.raises(tr.ConfigurationError, match=r"max_error=0\.1 goes with schedule='auto'"):
        tr.ContextParallel("self", schedule="ring", max_error=0.1)
    with pytest.raises(tr.UnsupportedError, match="or say max_error, within which a format is chosen"):
        tr.ContextParallel("self", schedule="auto", wire="mxint8")


def differing(here: Here, what: str) -> str:
    """The error of a call in which rank 1 allows another error, or cannot encode on its device; the group lives on."""

    def missing(*given: object) -> None:
        raise RuntimeError("no such operator")

    x, net = torch.ones(1, 8, 2, 64), full_mesh(here.world_size, SLOW)
    with pytest.MonkeyPatch.context() as patch:
        if what == "device":
            patch.setattr(trial, "TRUSTED", frozenset())
            if here.rank:
                patch.setattr(blocks.Int8, "_write", missing)
        trial._fault.cache_clear()
        allowed = 0.06 if here.rank and what == "budget" else 0.05
        with here.cp(schedule="auto", topology=net, max_error=allowed) as cp, pytest.raises(tr.TokenRingError) as found:
            tr.attention(x, x, x, cp)
    trial._fault.cache_clear()
    with here.cp(schedule="auto", topology=net, max_error=0.05) as cp:
        assert tr.attention(x, x, x, cp).eq(1).all()
    return str(found.value)


def test_ranks_that_differ(ranks: RankPools) -> None:
    assert all("within an error of 0.05; rank 1: auto, formats" in text for text in ranks(2)(differing, "budget"))
    assert all("mxint8 on the wire was tried on cpu" in text for text in ranks(2)(differing, "device"))


def test_one_rank_and_widths_that_blocks_do_not_divide(ranks: RankPools) -> None:
    with tr.ContextParallel("self", max_error=0.5) as cp:
        x = torch.ones(1, 8, 2, 64)
        assert tr.attention(x, x, x, cp).eq(1).all()
    assert all(ranks(2)(of_width_48))


def of_width_48(here: Here) -> bool:
    x = torch.ones(1, 8, 2, 48)
    with here.cp(schedule="auto", topology=full_mesh(2, SLOW), max_error=0.012) as cp:
        done = bool(tr.attention(x, x, x, cp).eq(1).all())
        return done and set(tr.plan(x, x, x, cp).schedule.formats.values()) <= {"bf16"}
