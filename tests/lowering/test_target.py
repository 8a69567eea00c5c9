"""Targets: what of them programs depend on, and that transports have what theirs promise, whatever their class."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import Case, check_exact, compute
from families import make
from programs import size_of
from ranks import Here, RankPools

from tokenring import Causal, ConfigurationError, ContextParallel
from tokenring.backends.interfaces import ALWAYS, PROMISED, Transport, faults_of
from tokenring.backends.transports.auto import AutoTransport
from tokenring.backends.transports.auto_cuda import CudaTransport
from tokenring.ir.schedule_data import PASSES
from tokenring.lowering.backend_names import TRANSPORTS, transport_class, transport_target
from tokenring.lowering.lower import lower
from tokenring.lowering.target import IDEAL, LOWERED, Target

BASES = (
    IDEAL,
    Target(early_receives=False),
    Target(early_receives=False, collectives=True),
    Target(bundle_bytes=1 << 20, ahead_bytes=1 << 20),
)


# ---------- what programs depend on


def other_value(name: str) -> object:
    """A value of a flag that it does not have by itself."""
    default = getattr(IDEAL, name)
    if isinstance(default, bool):
        return not default
    known = {"most_connections": 16, "advised_connections": 60, "why_few_connections": "no room"}
    return known.get(name, 1 if default else 1 << 20)


@pytest.mark.parametrize("name", [field.name for field in fields(Target) if field.name not in LOWERED])
def test_programs_are_the_same_whatever_else_a_transport_can_do(name: str) -> None:
    schedule = make("ulysses", 4, "zigzag", Causal(), 64)
    for base in BASES:
        other = replace(base, **{name: other_value(name)})  # type: ignore[arg-type]
        assert other != base and other.lowered == base.lowered
        for direction in PASSES:
            programs = [lower(schedule, 1, direction, size_of(schedule), each) for each in (base, other)]
            assert programs[0] == programs[1]


@pytest.mark.parametrize("name", LOWERED)
def test_and_others_by_what_the_lowering_reads(name: str) -> None:
    schedule = make("ulysses" if name != "ahead_bytes" else "ring", 4, "zigzag", Causal(), 64)
    base = Target(early_receives=name != "collectives")
    other = replace(base, **{name: other_value(name)})  # type: ignore[arg-type]
    programs = [lower(schedule, 1, "forward", size_of(schedule), each) for each in (base, other)]
    assert programs[0] != programs[1]


def test_nothing_said_is_ideal() -> None:
    schedule = make("ring", 4, "zigzag", Causal(), 64)
    assert Target() == IDEAL
    assert lower(schedule, 1, "forward", size_of(schedule)) == lower(schedule, 1, "forward", size_of(schedule), IDEAL)


# ---------- what transports have


@pytest.mark.parametrize("name", TRANSPORTS)
def test_ours_have_what_their_targets_promise(name: str) -> None:
    """Methods of their own: what `Transport` does by itself is nothing."""
    made, target = transport_class(name), transport_target(name)
    assert issubclass(made, Transport) and not made.__abstractmethods__
    promised = [each for flag, names in PROMISED.items() if getattr(target, flag) for each in names if each != "pool"]
    assert all(getattr(made, each) is not getattr(Transport, each) for each in promised)


def test_promises_are_flags_and_methods() -> None:
    assert PROMISED.keys() <= {field.name for field in fields(Target)}
    assert all(hasattr(Transport, each) for names in PROMISED.values() for each in names)


def test_those_that_fall_back() -> None:
    """What is bound before goes on over the second: so as a group where that one groups, and settled at once."""
    now: Any = SimpleNamespace(target=Target(deferring=True))
    auto, cuda = AutoTransport.__new__(AutoTransport), CudaTransport.__new__(CudaTransport)
    assert auto._target(now) == Target()
    assert cuda._target(now) == Target(grouping=True)


class Plain:
    """A transport of somebody else's: it derives from nothing, and has what all transports have, and no more."""

    def __init__(self, moved: Transport) -> None:
        self._moved, self.target = moved, Target()
        self.rank, self.world_size, self.sent_bytes = moved.rank, moved.world_size, moved.sent_bytes

    def __getattr__(self, name: str) -> Any:
        if name not in ALWAYS:
            raise AttributeError(f"a plain transport has no {name}")
        return getattr(self._moved, name)


def both(here: Here, case: Case) -> tuple[Any, Any]:
    """The case over Gloo, and over a plain class that moves by Gloo."""
    moved = here.transport("gloo")
    assert moved is not None
    plain: Any = Plain(moved)
    assert not isinstance(plain, Transport)
    found = []
    for transport in (moved, plain):
        cp = ContextParallel(**case.options, transport=transport)
        found.append(compute(cp, case))
    return found[0], found[1]


@pytest.mark.parametrize("schedule", ["ring", "ulysses"])
def test_a_plain_class_will_do(ranks: RankPools, schedule: str) -> None:
    case = Case(2, schedule, "zigzag", "causal", 2, 2, 1, 16, torch.float32, None, given_length=64)
    parts = ranks(2)(both, case)
    check_exact(case.whole([plain for _, plain in parts]), case.whole([gloo for gloo, _ in parts]))


class Stub:
    """Something with some names."""

    def __init__(self, target: object, *names: str) -> None:
        vars(self).update(dict.fromkeys(names, print), target=target, rank=0, world_size=1, sent_bytes={})


def stub(target: object, *names: str) -> Any:
    return Stub(target, *names)


METHODS = tuple(sorted(Transport.__abstractmethods__))


@pytest.mark.parametrize("flag", PROMISED)
def test_what_a_target_promises_must_be_there(flag: str) -> None:
    target = Target(**{flag: True})  # type: ignore[arg-type]
    bare, whole = stub(target, *METHODS), stub(target, *METHODS, *PROMISED[flag])
    assert faults_of(whole) == [] and faults_of(stub(Target(), *METHODS)) == []
    assert faults_of(bare) == [f"{name} (which target.{flag} promises)" for name in PROMISED[flag]]
    says = rf"transport is of type Stub, which has no {PROMISED[flag][0]} \(which target.{flag} promises\)"
    with pytest.raises(ConfigurationError, match=says):
        ContextParallel(transport=bare)
    assert ContextParallel(transport=whole).transport is whole


def test_what_all_transports_have_must_be_there() -> None:
    assert faults_of(stub(Target(), *METHODS[1:])) == [METHODS[0]]
    with pytest.raises(ConfigurationError, match=r"has no target: give it what backends\.interfaces\.Transport asks"):
        ContextParallel(transport=stub("anything", *METHODS))
    with pytest.raises(ConfigurationError, match="transport is of type float; choose one of auto, gloo"):
        ContextParallel(transport=0.5)  # type: ignore[arg-type]
