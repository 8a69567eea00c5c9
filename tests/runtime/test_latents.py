"""Latents in place of keys and values: exact against float64 in every family that takes them, and nothing else moves.

A seeded sample of the grid; TOKENRING_FULL_GRID=1 runs all of it.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from oracle import allowed, attention64, relative_error
from ranks import Here, RankPools
from sampling import FULL_GRID

import tokenring as tr
from tokenring import (
    Causal,
    ConfigurationError,
    ContextParallel,
    Documents,
    Full,
    Mask,
    SlidingWindow,
    UnsupportedError,
    attention,
    shard,
)
from tokenring.planner.simulation.predict import predict
from tokenring.runtime.latent_kernel import Expansion, LatentKernel
from tokenring.schedule.families import variants
from tokenring.schedule.names import named_schedule
from tokenring.sequence.layout import make_layout
from tokenring.sequence.workload import Workload

latent_attention: Any = tr.latent_attention  # of operands in a list
NAMES = ("out", "lse", "dq", "dlatent", "drope", "dweight")
LIMITS = dict(zip(NAMES, (2e-6, 2e-6, 5e-6, 5e-6, 5e-6, 5e-6), strict=True))
LENGTH, HEADS, NOPE, ROPE, VALUE, LATENT = 288, 6, 16, 8, 16, 24
MASKS: dict[str, Mask] = {
    "full": Full(),
    "causal": Causal(),
    "window": SlidingWindow(49, 25),
    "documents": Causal() & Documents([0, 41, 42, 145, 250]),
    "short window": Causal() & SlidingWindow(3, 0),
}


class Case(NamedTuple):
    """One point of the grid."""

    ranks: int
    schedule: str
    layout: str
    mask: str
    dtype: torch.dtype = torch.float32
    heads: int = HEADS

    @property
    def workload(self) -> Workload:
        sizes = LENGTH, LENGTH, self.heads, 1, NOPE + ROPE
        return Workload(1, *sizes, self.dtype, VALUE, LATENT + ROPE)

    def inputs(self) -> list[torch.Tensor]:
        """q, latent, rope, weight, dout and the gradient of lse, of the whole sequence."""
        random = torch.Generator().manual_seed(self.ranks)
        shapes = (
            (1, LENGTH, self.heads, NOPE + ROPE), (1, LENGTH, LATENT), (1, LENGTH, ROPE),
            (self.heads * (NOPE + VALUE), LATENT), (1, LENGTH, self.heads, VALUE),
        )  # fmt: skip
        made = [torch.randn(shape, generator=random) for shape in shapes]
        made[3] *= LATENT**-0.5
        return [x.to(self.dtype) for x in made]


Made = dict[str, torch.Tensor]


def expanded(latent: torch.Tensor, rope: torch.Tensor, weight: torch.Tensor, heads: int) -> tuple[Any, Any]:
    """k and v as a model makes them."""
    made = (latent @ weight.t()).view(*latent.shape[:2], heads, -1)
    k = torch.cat([made[..., :NOPE], rope[:, :, None].expand(-1, -1, heads, -1)], -1)
    return k, made[..., NOPE:]


def reference(case: Case) -> Made:
    """In float64, from attention's own oracle and the chain rule."""
    q, latent, rope, weight, dout = (x.double() for x in case.inputs())
    leaves = [x.requires_grad_() for x in (latent, rope, weight)]
    k, v = expanded(leaves[0], leaves[1], leaves[2], case.heads)
    found = attention64(q, k.detach(), v.detach(), dout, allowed(MASKS[case.mask], LENGTH, LENGTH))
    grads = torch.autograd.grad((k, v), leaves, (found.dk, found.dv))
    return dict(zip(NAMES, (found.out, found.lse, found.dq, *grads), strict=True))


def run(here: Here, case: Case) -> tuple[Made, dict[str, dict[int, int]]]:
    """Both passes on one rank, in a pool that held NaN before; and the bytes sent in each."""
    transport = here.transport("shm")
    cp = here.cp(layout=case.layout, schedule=case.schedule, transport=transport)
    q, latent, rope, weight, dout = case.inputs()
    leaves = [shard(x, cp, dim=1).requires_grad_() for x in (q, latent, rope)] + [weight.requires_grad_()]
    counter: dict[int, int] = {} if transport is None else transport.sent_bytes
    for _ in range(2):
        for pool in cp._pools.values():
            pool.data.fill_(255)  # NaN in every dtype
        counter.clear()
        out, lse = latent_attention(*leaves, cp, MASKS[case.mask], return_lse=True)
        sent = {"forward": dict(counter)}
        counter.clear()
        grads = torch.autograd.grad(out, leaves, shard(dout, cp, dim=1))
        sent["backward"] = dict(counter)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True)), sent


def whole(case: Case, parts: list[Made]) -> Made:
    """The ranks' parts in sequence order; gradients of the weight added up."""
    layout, found = make_layout(case.layout, case.ranks, LENGTH), {}
    order = torch.tensor([position for rank in range(case.ranks) for position in layout.positions(rank)])
    for name in NAMES[:-1]:
        dim = 2 if name == "lse" else 1
        joined = torch.cat([part[name] for part in parts], dim)
        found[name] = joined.index_select(dim, torch.argsort(order))
    return found | {"dweight": torch.stack([part["dweight"].float() for part in parts]).sum(0)}


@lru_cache
def members(ranks: int) -> tuple[str, ...]:
    """Names worth trying on so many ranks, and options of some."""
    size = Case(ranks, "", "", "full").workload
    plain = dict.fromkeys(name for local in (1, ranks) for name in variants(ranks, size, local))
    return (*plain, "tokenring/keep", "tokenring/late", "ring/keep", "direct-q/keep")


GRID = [
    Case(ranks, name, layout, mask)
    for ranks in (2, 3, 4)
    for name, layout, mask in product(members(ranks), ("zigzag", "contiguous", "striped"), MASKS)
]


KEPT = ("tokenring/late", "ring/keep")  # of options, beside one member of each family


def sample() -> list[Case]:
    """Each family once, and some options, on three or four ranks; with a layout and mask by lot, each of these met."""
    chosen, families = random.Random(2), dict.fromkeys(case.schedule.partition("/")[0] for case in GRID)
    wanted = [[case for case in GRID if case.schedule.partition("/")[0] == family] for family in families]
    wanted += [[case for case in GRID if case.schedule == name] for name in KEPT]
    return [chosen.choice([case for case in cases if case.ranks > 2]) for cases in wanted]


def test_the_sample_meets_all() -> None:
    for of in ("ranks", "layout", "mask"):
        assert {getattr(case, of) for case in sample()} == {getattr(case, of) for case in GRID if case.ranks > 2}


@pytest.mark.parametrize("case", GRID if FULL_GRID else sample(), ids=str)
def test_exact(case: Case, ranks: RankPools) -> None:
    """All results and gradients, the weight's too; bytes on every link as the schedule says."""
    found = ranks(case.ranks)(run, case)
    made, wanted = whole(case, [part for part, _ in found]), reference(case)
    errors = {name: relative_error(made[name], wanted[name]) for name in NAMES}
    assert all(error <= LIMITS[name] for name, error in errors.items()), errors
    layout = make_layout(case.layout, case.ranks, LENGTH)
    schedule = named_schedule(case.schedule, case.workload, layout, layout, MASKS[case.mask])
    for direction in ("forward", "backward"):
        counted = {(src, dst): n for src, (_, sent) in enumerate(found) for dst, n in sent[direction].items()}
        assert counted == schedule.link_bytes(case.workload, direction), direction


def test_no_family_that_splits_heads_is_tried() -> None:
    names = {name.partition("/")[0] for ranks in (2, 3, 4) for name in members(ranks)}
    assert {"ring", "direct-kv", "tokenring", "tiles"} <= names and not names & {"ulysses", "usp", "uneven", "packed"}


@pytest.mark.parametrize("schedule", ["ring", "auto"])
def test_half_precision(schedule: str, ranks: RankPools) -> None:
    """No worse than keys and values that were expanded once, in one process."""
    case = Case(3, schedule, "zigzag", "documents", torch.bfloat16)
    made, wanted = whole(case, [part for part, _ in ranks(3)(run, case)]), reference(case)
    alone = one_process(case)
    errors = {name: relative_error(made[name].double(), wanted[name]) for name in NAMES}
    limits = {name: max(1.5 * relative_error(alone[name].double(), wanted[name]), 1e-6) for name in NAMES}
    assert all(error <= limits[name] for name, error in errors.items()), (errors, limits)


def one_process(case: Case) -> Made:
    q, latent, rope, weight, dout = case.inputs()
    leaves = [x.requires_grad_() for x in (q, latent, rope, weight)]
    cp = ContextParallel(group="self", schedule="ring")
    k, v = expanded(leaves[1], leaves[2], leaves[3], case.heads)
    out, lse = attention(leaves[0], k, v, cp, MASKS[case.mask], return_lse=True)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)), strict=True))


# ---------- bytes


def test_a_ring_sends_latents_alone(ranks: RankPools) -> None:
    """Forward one latent a token and step; backward it and its gradient, in fp32 as wide."""
    case = Case(4, "ring", "contiguous", "full")
    token = (LATENT + ROPE) * 4
    for src, (_, sent) in enumerate(ranks(4)(run, case)):
        assert sent["forward"] == {(src + 1) % 4: 3 * (LENGTH // 4) * token}
        assert sent["backward"] == {(src + 1) % 4: 2 * 3 * (LENGTH // 4) * token}


def test_deepseek_on_eight_ranks_sends_a_tenth_at_most() -> None:
    """128 heads of 192 and 128, latents of 512 + 64: schedule by schedule, and the least against Ulysses' bytes too."""
    tokens, ranks = 8192, 8
    today = Workload(1, tokens, tokens, 128, 128, 192, torch.bfloat16, 128)
    latents = replace(today, kv_heads=1, latent_dim=512 + 64)
    layout = make_layout("zigzag", ranks, tokens)
    for direction in ("forward", "backward"):
        sent = {
            (name, size.latent_dim): sum(
                named_schedule(name, size, layout, layout, Causal()).link_bytes(size, direction).values()
            )
            for name, size in product(("ring", "direct-kv"), (today, latents))
        }
        for name in ("ring", "direct-kv"):
            assert sent[name, 576] * (128 * 320) == sent[name, None] * 576
        ulysses = named_schedule("ulysses", today, layout, layout, Causal()).link_bytes(today, direction)
        assert min(sent.values()) * 10 <= sum(ulysses.values())


def moved(here: Here) -> dict[int, int]:
    """Of one head: keys and values are fewer bytes than latents."""
    transport, case = here.transport("shm"), Case(2, "ring", "contiguous", "full", heads=1)
    cp = here.cp(layout=case.layout, schedule="ring", transport=transport)
    q, latent, rope, weight, _ = case.inputs()
    assert transport is not None
    transport.sent_bytes.clear()
    weight = weight[: NOPE + 4].contiguous()  # values of 4: 24 + 4 elements of a token for 32
    out = latent_attention(*(shard(x, cp, dim=1) for x in (q, latent, rope)), weight, cp)
    assert out.shape == (1, LENGTH // 2, 1, 4)
    return dict(transport.sent_bytes)


def test_keys_and_values_travel_where_they_are_fewer_bytes(ranks: RankPools) -> None:
    assert [sum(each.values()) for each in ranks(2)(moved)] == [LENGTH // 2 * (NOPE + ROPE + 4) * 4] * 2


def test_plans_count_what_expansion_costs() -> None:
    """As a tile of its own products, at the rate of the kernel."""
    from nets import setting  # the simulator's own

    from tokenring.planner.interconnects.interconnect import full_mesh

    size = Workload(1, 4096, 4096, 16, 1, 192, torch.bfloat16, 128, 576)
    layout = make_layout("contiguous", 4, 4096)
    asked = setting(full_mesh(4, 100.0), size, ("forward",), tflops=1.0)
    with_expansion = predict(named_schedule("ring", size, layout, layout, Full()), asked).compute_seconds
    pairs, tokens = 4096 * 1024, 4096
    wanted = 16 * (2 * 320 * pairs + 2 * 576 * 320 * tokens) / 1e12
    assert with_expansion == pytest.approx(wanted, rel=1e-6)


# ---------- gradients of lse, and what is refused


def of_lse(here: Here, case: Case) -> Made:
    cp = here.cp(layout=case.layout, schedule=case.schedule)
    q, latent, rope, weight, dout = case.inputs()
    leaves = [shard(x, cp, dim=1).requires_grad_() for x in (q, latent, rope)] + [weight.requires_grad_()]
    out, lse = latent_attention(*leaves, cp, MASKS[case.mask], return_lse=True)
    loss = (out * shard(dout, cp, dim=1)).sum() + lse.square().sum() * (here.rank == 0)  # on one rank only
    return dict(zip(NAMES, (out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)), strict=True))


def test_gradients_of_lse(ranks: RankPools) -> None:
    case = Case(2, "ring", "contiguous", "causal")
    made = whole(case, ranks(2)(of_lse, case))
    q, latent, rope, weight, dout = (x.double().requires_grad_() for x in case.inputs())
    k, v = expanded(latent, rope, weight, case.heads)
    scores = torch.einsum("bthd,bshd->bhts", q, k) / (NOPE + ROPE) ** 0.5
    scores = scores.masked_fill(~allowed(Causal(), LENGTH, LENGTH), float("-inf"))
    loss = (torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v) * dout.detach()).sum()
    loss = loss + scores.logsumexp(-1)[..., : LENGTH // 2].square().sum()
    wanted = dict(zip(NAMES[2:], torch.autograd.grad(loss, (q, latent, rope, weight)), strict=True))
    assert all(relative_error(made[name], wanted[name]) <= LIMITS[name] for name in wanted)


def refusals(here: Here) -> list[str]:
    case = Case(2, "ring", "contiguous", "full")
    given = [shard(x, here.cp(layout="contiguous"), dim=1) for x in case.inputs()[:3]]
    weight, said = case.inputs()[3], []
    for schedule, other in (("ulysses", weight), ("ring", weight[:-1] if here.rank else weight), ("ring", weight)):
        try:
            latent_attention(*given, other, here.cp(layout="contiguous", schedule=schedule))
            said.append("made")
        except ConfigurationError as error:
            said.append(str(error))
    return said


def test_what_is_refused_all_ranks_hear(ranks: RankPools) -> None:
    first, second = ranks(2)(refusals)
    assert first[0] == second[0] and "splits heads into 2 groups, and latents are of all heads: choose one" in first[0]
    assert second[1].startswith("weight is [191, 24], and with q [1, 144, 6, 24]")
    assert first[1].startswith("rank 1 refused: weight is [191, 24]")
    assert first[2] == second[2] == "made"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({0: torch.ones(1, 8, 6)}, "expects q as a tensor of 4 dimensions; it is [1, 8, 6]"),
        ({1: torch.ones(1, 4, 24)}, "latent and rope must have the same tokens"),
        ({2: torch.ones(1, 8, 8, dtype=torch.bfloat16)}, "rope is torch.bfloat16 on cpu, and q torch.float32"),
        ({2: torch.ones(1, 8, 24)}, "the rows of each head's key without its last 24 elements"),
        ({3: torch.ones(6 * 16, 24)}, r"it must be [6 · (16 + Dv), 24]"),
        ({3: 7}, "expects weight as a tensor of 2 dimensions; it is of type int"),
    ],
)
def test_sizes_that_do_not_fit(change: dict[int, Any], says: str) -> None:
    given: list[Any] = [torch.ones(1, 8, 6, 24), torch.ones(1, 8, 24), torch.ones(1, 8, 8), torch.ones(6 * 32, 24)]
    for at, other in change.items():
        given[at] = other
    with pytest.raises(ConfigurationError) as found:
        latent_attention(*given, ContextParallel(group="self"))
    assert says in str(found.value)


def test_compiled_calls_and_second_derivatives_are_refused() -> None:
    case, cp = Case(1, "ring", "contiguous", "full"), ContextParallel(group="self", schedule="ring")
    q, latent, rope, weight, _ = (x.requires_grad_() for x in case.inputs())
    (dq,) = torch.autograd.grad(latent_attention(q, latent, rope, weight, cp).sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        torch.autograd.grad(dq.sum(), latent)
    with pytest.raises(ConfigurationError, match="latent_dim=8 with kv_heads=2"):
        Workload(1, 8, 8, 4, 2, 16, latent_dim=8)


def test_a_program_has_no_weights() -> None:
    kernel = LatentKernel(ContextParallel(group="self").kernel(torch.device("cpu")))
    with pytest.raises(TypeError, match="weights of a call"):
        kernel.forward(torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4, 0))
    assert kernel.of(Expansion(torch.ones(8, 4), 1, 4)).supports(8, torch.float32) is None
