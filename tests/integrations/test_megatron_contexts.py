"""What layers of a group share: how long it lives, and how it is given back."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mcore.stand_ins import config, layer, params, refusal
from patience import patient
from ranks import Here, RankPools

from tokenring import Causal
from tokenring.errors import ConfigurationError
from tokenring.integrations.megatron import release_contexts
from tokenring.integrations.megatron.contexts import Contexts, contexts_of
from tokenring.integrations.megatron.groups import SELF

LIMIT = {"timeout_seconds": 5}

# ---------- how long it lives


def models_one_after_another(here: Here) -> torch.Tensor:
    """Of the first layer, Python's collector has freed what rank 0 had, but not yet what others had."""
    x, options = torch.randn(4, 1, 4, 16), {"timeout_seconds": 5, "schedule": "ring"}
    group = SimpleNamespace(cp=dist.group.WORLD)
    gc.disable()
    try:
        for _ in range(2):
            made = layer(config(context_parallel_size=here.world_size), pg_collection=group, **options)
            made.config.made = [made]
            out: torch.Tensor = made(x, x, x, None)
            del made
            if here.rank == 0:
                gc.collect()
    finally:
        gc.enable()
    return out


def test_layers_of_a_former_model_may_be_freed_at_any_time(ranks: RankPools) -> None:
    """Ranks that still have what those shared must not meet others that have to make it."""
    assert len(ranks(2)(models_one_after_another)) == 2


def contexts_of_groups(here: Here) -> tuple[bool, bool]:
    """Whether what is shared is kept while its group lives, and is let go with it."""
    group = dist.new_group([0, 1])
    first = weakref.ref(contexts_of(group, {}))
    kept = contexts_of(group, {}) is first()
    dist.barrier(group)  # a peer may still be connecting
    dist.destroy_process_group(group)
    contexts_of(SELF, {"timeout_seconds": 7})
    return kept, first() is None


def test_what_layers_share_lives_as_long_as_their_group(ranks: RankPools) -> None:
    assert ranks(2)(contexts_of_groups) == [(True, True)] * 2


def pruned(here: Here) -> list[str]:
    """What becomes of two schedules and their transport when contexts of another group are asked for."""
    group = dist.new_group([0, 1])
    made = contexts_of(group, LIMIT)
    first, second = made.context("ring"), made.context("direct-q")
    assert first.transport is second.transport
    transport: Any = first.transport
    said = []
    for step in (lambda: contexts_of(SELF, {"timeout_seconds": 8}), lambda: dist.destroy_process_group(group),
                 lambda: contexts_of(SELF, {"timeout_seconds": 9})):  # fmt: skip
        step()
        said.append(f"{first._closed} {second._closed} {transport.control.closed}")
    said.append(refusal(ConfigurationError, lambda: made.context("ring").check_open()))
    return said


def test_what_a_former_group_shared_is_given_back(ranks: RankPools) -> None:
    """When contexts are made next, no sooner: buffers of both schedules, and the connections of the first."""
    for said in ranks(2)(pruned):
        assert said[:3] == ["False False False", "False False False", "True True True"]
        assert said[3].startswith("this ContextParallel was closed")


# ---------- given back on purpose


def contexts(made: Any) -> Contexts:
    found: Contexts = made._contexts
    return found


def step(made: Any, x: torch.Tensor, **more: Any) -> torch.Tensor:
    """out, and the gradient of x, of a call."""
    own = x.clone().requires_grad_()
    out = made(own, own, own, None, **more)
    return torch.stack([out.detach(), torch.autograd.grad(out.square().sum(), own)[0].flatten(-2)])


def released(here: Here) -> tuple[list[bool], bool]:
    """A step before and after; what was held in between, and what another group's layer still holds."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    mine, other = (
        layer(config(context_parallel_size=2), pg_collection=SimpleNamespace(cp=group), schedule="auto", **LIMIT)
        for group in groups
    )
    torch.manual_seed(here.rank)
    x = torch.randn(8, 1, 4, 16)
    before = step(mine, x), step(other, x)
    held = [contexts(each).context("auto") for each in (mine, other)]
    transports: Any = [each.transport for each in held]
    release_contexts(groups[0])
    found = [each._closed for each in held] + [each.control.closed for each in transports]
    after = step(mine, x), step(other, x)
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    found += [contexts(each).context("auto") is old for each, old in zip((mine, other), held, strict=True)]
    release_contexts()
    found += [bool(contexts(each)._by_schedule) for each in (mine, other)]
    return found, same


def test_contexts_can_be_given_back(ranks: RankPools) -> None:
    """Those of one group, then all; the next step makes them anew and computes the same bits."""
    for found, same in ranks(2)(released):
        assert found == [True, False, True, False, False, True, False, False]
        assert same


def released_packed(here: Here) -> tuple[bool, bool]:
    """Plans for sizes go with what planned them, and the packing that was read last with its tensors."""
    made = layer(config(context_parallel_size=2), pg_collection=SimpleNamespace(cp=dist.new_group([0, 1])), **LIMIT)
    documents = params([8, 16])
    ends = weakref.ref(documents.cu_seqlens_q)
    x = torch.randn(12, 4, 16)
    with torch.no_grad():
        before = made(x, x, x, None, packed_seq_params=documents)
        del documents
        release_contexts()
        gone = ends() is None
        return gone, torch.equal(made(x, x, x, None, packed_seq_params=params([8, 16])), before)


def test_contexts_of_packed_sequences_can_be_given_back(ranks: RankPools) -> None:
    assert ranks(2)(released_packed) == [(True, True)] * 2


@pytest.mark.parametrize("group", [None, SELF])
def test_one_rank_alone_gives_back_its_own(group: Any) -> None:
    made = layer(**LIMIT)
    x = torch.randn(4, 1, 4, 16)
    before = step(made, x)
    held = contexts(made).context("ring")
    release_contexts(group)
    assert held._closed and torch.equal(step(made, x), before)
    assert contexts(made).context("ring") is not held


def test_layers_made_before_and_after_share_again() -> None:
    made, later = layer(timeout_seconds=patient(6)), None
    release_contexts()
    later = layer(timeout_seconds=patient(6))
    assert contexts(made) is contexts(later)


# ---------- what it sends


def sent(here: Here) -> tuple[int, int, bool]:
    """Bytes that a rank sends forward, in training and in evaluation, and whether both give the same."""
    assert dist.group.WORLD is not None
    made = contexts_of(dist.group.WORLD, LIMIT)
    transport: Any = made.context("ulysses").transport
    x, nbytes, outs = torch.randn(1, 24, 4, 8, generator=torch.Generator().manual_seed(5)), [], []
    for training in (True, False):
        transport.sent_bytes.clear()
        outs.append(made.attend("ulysses", x, x, x, Causal(), 0.3, training))
        nbytes.append(sum(transport.sent_bytes.values()))
    return nbytes[0], nbytes[1], torch.equal(*outs)


def test_evaluation_sends_results_without_their_lse(ranks: RankPools) -> None:
    """Four bytes less of each row and head that another rank has computed."""
    for trained, evaluated, same in ranks(2)(sent):
        assert same and trained - evaluated == 4 * 24 * 2
