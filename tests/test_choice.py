"""Which transport moves CUDA tensors: every point of the table, what goes before it, and what is not there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from tokenring.backends import nccl, symmetric
from tokenring.backends.choice import DOMAINS, MIB, RULES, Domain, Operation, Rule, choose, domain_of
from tokenring.doctor.probes import _choice

ALL = {"symm": None, "nccl": None}
SIZES = (None, 0, 1, 512 << 10, 16 * MIB - 1, 16 * MIB, 16 * MIB + 1, 1 << 30)


def wanted(domain: str, operation: str, nbytes: int | None) -> str:
    """By hand, as the sources say it."""
    if domain in ("none", "across"):
        return "nccl"
    if operation == "send":
        return "symm"
    return "symm" if domain == "link" and nbytes is not None and nbytes <= 16 * 2**20 else "nccl"


def source_of(domain: str, operation: str) -> str:
    """By hand: words of who says so."""
    if domain == "link":
        return "NVSHMEM inside one NVLink domain"
    if domain == "pcie":
        return "copy engines" if operation == "send" else "TensorRT-LLM"
    return "memory that peers reach"


@pytest.mark.parametrize(("domain", "operation", "nbytes"), [*product(DOMAINS, ("send", "collective"), SIZES)])
def test_every_point(domain: Domain, operation: Operation, nbytes: int | None) -> None:
    found = choose(domain, ALL, nbytes, operation)
    assert found.transport == wanted(domain, operation, nbytes)
    assert found.reason.startswith(DOMAINS[domain])
    assert source_of(domain, operation) in found.reason


@pytest.mark.parametrize(("domain", "operation"), [*product(DOMAINS, ("send", "collective"))])
def test_no_point_is_left_out(domain: Domain, operation: Operation) -> None:
    """The last rule of each is for any size, and limits grow towards it."""
    limits = [each.most_bytes for each in RULES if (each.domain, each.operation) == (domain, operation)]
    assert limits[-1] is None and None not in limits[:-1]
    assert limits[:-1] == sorted(limits[:-1], key=int)  # type: ignore[arg-type]


@pytest.mark.parametrize("domain", DOMAINS)
def test_what_is_not_there(domain: Domain) -> None:
    """NCCL instead of symmetric memory, with the reason; never the other way round."""
    found = choose(domain, {"symm": "rank 3: no driver", "nccl": None})
    assert found.transport == "nccl"
    if domain in ("link", "pcie"):
        assert found.reason == "symm cannot be used: rank 3: no driver"
    neither = choose(domain, {"symm": "no driver", "nccl": "not built"})
    assert neither.transport is None and "symm: no driver; nccl: not built" in neither.reason
    alone = choose(domain, {"symm": None, "nccl": "not built"})
    assert alone.transport == ("symm" if domain in ("link", "pcie") else None)
    assert choose("across", {}).transport is None


def test_measured_rules_go_before() -> None:
    measured = (Rule("pcie", "send", 64 << 10, "nccl", "measured: 12 µs against 15 µs"),)
    small, large = (choose("pcie", ALL, nbytes, measured=measured) for nbytes in (64 << 10, 65 << 10))
    assert (small.transport, large.transport) == ("nccl", "symm")
    assert small.reason.endswith("measured: 12 µs against 15 µs")
    assert choose("pcie", ALL, None, measured=measured).transport == "symm"  # for all sizes a limited rule says nothing
    assert choose("link", ALL, 1, measured=measured).transport == "symm"


@pytest.mark.parametrize(
    ("kinds", "hosts", "domain"),
    [
        (["nvlink", "nvlink", "nvlink"], ["a"] * 3, "link"),
        (["nvlink", "pix", "nvlink"], ["a"] * 3, "pcie"),
        (["xgmi"], ["a"] * 2, "link"),
        (["sys"], ["a"] * 2, "pcie"),
        (["nvlink", None, "nvlink"], ["a"] * 3, "none"),
        (["network"], ["a"] * 2, "none"),
        (["nvlink", None, None], ["a", "a", "b"], "across"),
        ([], ["a"], "link"),
    ],
)
def test_domains(kinds: list[str | None], hosts: list[str], domain: str) -> None:
    assert domain_of(kinds, hosts) == domain


# ---------- what doctor says


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, reach: Callable[[int, int], bool]) -> None:
    """A process that sees so many GPUs, whose torch and driver have everything."""
    for module in (symmetric, nccl):
        monkeypatch.setattr(module, "unavailable", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reach)


def test_doctor_on_gpus_that_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 4, lambda a, b: True)
    said = _choice("cuda")
    assert said["transport"]["name"] == "symm" and said["transport"]["why"].endswith("; nccl between machines")
    assert {"name": "nccl", "why": "can be asked for: ContextParallel(transport='nccl')"} in said["others"]


def test_doctor_on_gpus_of_which_one_is_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 4, lambda a, b: 2 not in (a, b))
    said = _choice("cuda")
    assert said["transport"]["name"] == "nccl"
    assert "(GPU 0 does not reach GPU 2)" in said["transport"]["why"]


def test_doctor_without_a_driver_library(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2, lambda a, b: True)
    monkeypatch.setattr(symmetric, "unavailable", lambda: "the driver's library has no cuStreamWaitValue32")
    said = _choice("cuda")
    assert said["transport"] == {
        "name": "nccl",
        "why": "symm cannot be used: the driver's library has no cuStreamWaitValue32; nccl between machines",
    }
    assert {"name": "symm", "why": "the driver's library has no cuStreamWaitValue32"} in said["others"]


def test_doctor_where_nothing_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (symmetric, nccl):
        monkeypatch.setattr(module, "unavailable", lambda: "it is missing")
    said = _choice("cuda")
    assert said["transport"] is None
    assert said["others"][0]["name"] == "transport" and "symm: it is missing; nccl: it is missing" in str(said)
