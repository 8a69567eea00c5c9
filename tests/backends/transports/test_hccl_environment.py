"""Environment variables under which HCCL's communicators would wait for each other for ever, or are no known thing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ascend import module
from ascend.hccl_ledger import ledger
from ascend.hccl_ranks import fresh, run_case, small_case
from ascend.ranks import NpuPools
from cases import check_exact
from ranks import Here
from test_hccl_modes import call, context

from tokenring import BackendUnavailable, ConfigurationError, PeerLost
from tokenring.backends.transports import hccl, hccl_environment
from tokenring.backends.transports.hccl import HcclTransport
from tokenring.backends.transports.hccl_batches import HcclBatchTransport
from tokenring.backends.transports.hccl_environment import check_environment, most_communicators, retries
from tokenring.ir.schedule_data import REQUESTS
from tokenring.lowering.backend_names import transport_target
from tokenring.lowering.footprint import most_connected

RETRY = "HCCL_OP_RETRY_ENABLE"
A3, A2 = "Ascend910_9392", "Ascend910B3"
ON = "L1:1, L2:0"


@contextmanager
def machine(product: str, **variables: str) -> Iterator[None]:
    """An emulated one of this product, with these variables."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "NAME", product)
        for name, value in variables.items():
            patched.setenv(name, value)
        yield


# ---------- refusals


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (
            {"RANK_TABLE_FILE": "/etc/ranks.json"},
            ("RANK_TABLE_FILE=/etc/ranks.json", "the same id", "unset it", "torchrun"),
        ),
        ({"HCCL_OP_EXPANSION_MODE": "AIV"}, ("does not serve send and receive: unset it", "hccl_op_expansion_mode")),
        ({"HCCL_OP_EXPANSION_MODE": " aiv"}, ("does not serve send and receive",)),
        ({"P2P_HCCL_BUFFSIZE": "0"}, ("one queue", "unset it")),
    ],
)  # fmt: skip
def test_refused(variables: dict[str, str], says: tuple[str, ...]) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        check_environment("hccl", variables)
    assert all(each in str(caught.value) for each in says), caught.value


@pytest.mark.parametrize("variables", [{}, {"RANK_TABLE_FILE": ""}, {"HCCL_OP_EXPANSION_MODE": "AI_CPU"}])
def test_taken(variables: dict[str, str]) -> None:
    check_environment("hccl", variables)


def with_rank_table(here: Here, checks: bool) -> str:
    """Refused before any communicator is made; without the check the emulation finds two of one id."""
    fresh()
    here.memory.pop("hccl", None)
    with machine(A2, RANK_TABLE_FILE=__file__), pytest.MonkeyPatch.context() as patched:
        if not checks:
            patched.setattr(hccl, "check_environment", lambda *_: None)
        with pytest.raises((BackendUnavailable, PeerLost, RuntimeError)) as caught:
            run_case(here, small_case(2, "direct-q"), "hccl")
    here.memory.pop("hccl", None)
    return f"{type(caught.value).__name__}: {caught.value}; {len(ledger.communicators)}"


def test_rank_tables_are_refused(npus: NpuPools) -> None:
    for text in npus(2)(with_rank_table, True):
        assert text.startswith("BackendUnavailable: transport 'hccl': with RANK_TABLE_FILE=") and text.endswith("; 0")


def test_without_the_refusal_communicators_have_one_id(npus: NpuPools) -> None:
    with npus.expendable(2) as some:
        for text in some(with_rank_table, False):
            assert "have a sub-communicator of one id" in text


# ---------- retries


@pytest.mark.parametrize(
    ("variables", "on"),
    [
        ({RETRY: "L1:1,L2:0"}, True), ({RETRY: "L1:0, L2:1"}, True), ({RETRY: "L0:1,L1:0,L2:0"}, True),
        ({RETRY: "L1:0,L2:0"}, False), ({RETRY: ""}, False), ({}, False),
        ({RETRY: "L1:1", "HCCL_OP_EXPANSION_MODE": "AI_CPU"}, True),
        ({RETRY: "L1:1", "HCCL_OP_EXPANSION_MODE": "HOST_TS"}, False),
    ],
)  # fmt: skip
def test_when_retries_are_on(variables: dict[str, str], on: bool) -> None:
    assert retries(variables) is on


@pytest.mark.parametrize(("product", "most"), [(A3, 5), (A2, None), ("Ascend910A", None), (None, 5)])
def test_products_that_retry(monkeypatch: pytest.MonkeyPatch, product: str | None, most: int | None) -> None:
    monkeypatch.setattr(hccl_environment, "_product", lambda: product)
    assert most_communicators({RETRY: ON}) == most
    assert most_communicators({RETRY: "L1:0,L2:0"}) is None


def test_nobody_asks_for_the_product_without_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> None:
        raise AssertionError

    monkeypatch.setattr(hccl_environment, "_product", never)
    assert most_communicators({}) is None
    assert transport_target("hccl").most_connections is None


CASE = small_case(8, "auto")


def ran(here: Here, schedule: str, product: str, retry: str = ON) -> tuple[Any, str, str | None, str, int]:
    """By auto, or by name over transport "auto"."""
    fresh()
    with machine(product, **{RETRY: retry}), context(CASE, None, schedule=schedule) as cp:
        local, plan = call(cp, CASE)
        assert cp.transport_for(torch.device("npu")) is not None
        return local, plan.name, plan.transport, plan.reason, len(ledger.communicators)


def test_auto_takes_what_keeps_to_the_limit(npus: NpuPools) -> None:
    """Eight ranks on a mesh, where direct schedules would be faster; the emulated A3 refuses a sixth communicator."""
    found = npus(8)(ran, "auto:direct-q,direct-kv,ring", A3)
    check_exact(CASE.whole([each[0] for each in found]), CASE.reference())
    for _, name, _, reason, made in found:
        assert name.startswith("ring") and made <= 5
        assert reason == found[0][3]


def test_without_retries_nothing_is_limited(npus: NpuPools) -> None:
    for _, name, transport, _, made in npus(8)(ran, "auto:direct-q,direct-kv,ring", A2):
        assert name.startswith("direct") and transport is None and made > 5


def test_a_schedule_by_name_takes_a_mode_that_keeps_to_the_limit(npus: NpuPools) -> None:
    """Over `hccl` double rings have neighbours in two rings, each in its lanes."""
    found = npus(8)(ran, "double-ring/4", A3)
    check_exact(CASE.whole([each[0] for each in found]), CASE.reference())
    for _, _, transport, reason, made in found:
        assert transport in ("hccl/channel", "hccl/pair") and made <= 5
        assert f"over transport {transport!r}: {RETRY} is on" in reason


def refused(here: Here, schedule: str, transport: str) -> str:
    fresh()
    with machine(A3, **{RETRY: ON}), context(CASE, None, schedule=schedule, transport=transport) as cp:
        with pytest.raises(ConfigurationError) as caught:
            call(cp, CASE)
        assert ledger.communicators == []
    return str(caught.value)


@pytest.mark.parametrize(("schedule", "transport"), [("direct-q", "hccl/pair"), ("direct-q", "hccl")])
def test_what_cannot_keep_to_it_is_refused_by_all(npus: NpuPools, schedule: str, transport: str) -> None:
    found = npus(8)(refused, schedule, transport)
    assert len(set(found)) == 1
    assert "communicators on a rank for these schedules: HCCL_OP_RETRY_ENABLE is on" in found[0]
    assert 'Set HCCL_OP_RETRY_ENABLE="L1:0,L2:0", or take transport' in found[0]


def connected_to_own(here: Here) -> str:
    """Rank 0 alone is an end of all links; each rank knows only those of which it is an end."""
    fresh()
    others = range(1, here.world_size)
    own = [(0, peer, REQUESTS) for peer in others if here.rank in (0, peer)]
    with machine(A3, **{RETRY: ON}), context(CASE, None, transport="hccl") as cp:
        transport = cp.transport_for(torch.device("npu"))
        assert transport is not None
        with pytest.raises(ConfigurationError) as caught:
            transport.prepare(own, torch.device("npu:0"))
        assert ledger.communicators == []
    return str(caught.value)


def test_all_refuse_what_is_too_much_at_one_rank(npus: NpuPools) -> None:
    found = npus(8)(connected_to_own)
    assert len(set(found)) == 1 and "would take 7 communicators on a rank" in found[0]


@pytest.mark.parametrize("schedule", ["direct-q", "auto:direct-q"])
def test_what_fits_in_no_other_mode_goes_in_batches(npus: NpuPools, schedule: str) -> None:
    """By name and by auto. The emulated A3 then works pairs of a batch off one after another."""
    found = npus(8)(ran, schedule, A3)
    check_exact(CASE.whole([each[0] for each in found]), CASE.reference())
    for _, name, transport, reason, made in found:
        assert (name, transport, made) == ("direct-q", "hccl/batch", 2) and f"{RETRY} is on" in reason


@pytest.mark.parametrize("variables", [{"P2P_HCCL_BUFFSIZE": "0"}, {"RANK_TABLE_FILE": "/etc/ranks.json"}])
def test_batches_need_no_communicators_of_pairs(variables: dict[str, str]) -> None:
    check_environment("hccl/batch", variables, HcclBatchTransport.by_pairs)
    with pytest.raises(BackendUnavailable, match="or take transport 'hccl/batch'"):
        check_environment("hccl", variables, HcclTransport.by_pairs)
    with pytest.raises(BackendUnavailable, match="does not serve send and receive"):
        check_environment("hccl/batch", {"HCCL_OP_EXPANSION_MODE": "AIV"}, False)


def test_counts_are_those_of_the_ledger() -> None:
    made = small_case(8, "direct-q").make_schedule()
    assert most_connected(made, transport_target("hccl/pair")) == 7
    assert most_connected(made, transport_target("hccl")) == 28
    assert os.environ.get(RETRY) is None
