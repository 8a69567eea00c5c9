"""Which transport moves CUDA tensors: by what links the ranks, what is moved, and what there is. Pure functions.

RULES is the one table. A measured rule is given beside it and goes before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tokenring.topology.facts import PCIE_KINDS, PEER_KINDS

MIB = 1 << 20
Domain = Literal["link", "pcie", "none", "across"]
Operation = Literal["send", "collective"]
DOMAINS: Mapping[Domain, str] = {
    "link": "every two ranks have a link of the accelerators' own",
    "pcie": "every two ranks reach each other's memory, some over PCIe",
    "none": "some ranks of one machine do not reach each other's memory",
    "across": "the ranks are on several machines",
}
ONE_SIDED, TWO_SIDED = "symm", "nccl"


@dataclass(frozen=True)
class Rule:
    """What moves messages of up to `most_bytes` (None: of any size) in a domain; source: who found so."""

    domain: Domain
    operation: Operation
    most_bytes: int | None
    transport: str
    source: str


XLA = "XLA takes NVSHMEM inside one NVLink domain: for permutes always, for all-reduce below about 16 MB, else NCCL"
TRT = "TensorRT-LLM takes NCCL without NVLink"
ASYNC_TP = "copies by copy engines take no SM from attention (PyTorch's async tensor parallelism)"
REACH = "puts need memory that peers reach"
RULES: tuple[Rule, ...] = (
    Rule("link", "send", None, ONE_SIDED, XLA),
    Rule("link", "collective", 16 * MIB, ONE_SIDED, XLA),
    Rule("link", "collective", None, TWO_SIDED, XLA),
    Rule("pcie", "send", None, ONE_SIDED, ASYNC_TP),
    Rule("pcie", "collective", None, TWO_SIDED, TRT),
    Rule("none", "send", None, TWO_SIDED, REACH),
    Rule("none", "collective", None, TWO_SIDED, REACH),
    Rule("across", "send", None, TWO_SIDED, REACH),
    Rule("across", "collective", None, TWO_SIDED, REACH),
)


@dataclass(frozen=True)
class Choice:
    """What is taken, None if nothing serves; and why."""

    transport: str | None
    reason: str


def choose(
    domain: Domain,
    unavailable: Mapping[str, str | None],
    nbytes: int | None = None,
    operation: Operation = "send",
    measured: Sequence[Rule] = (),
) -> Choice:
    """The transport for messages of this size (None: of all sizes) in this domain.

    unavailable: of each transport there is, None or why it cannot be used here. measured: rules that go before RULES.
    """
    rule = next(each for each in (*measured, *RULES) if _fits(each, domain, operation, nbytes))
    refused = _why_not(rule.transport, unavailable)
    if refused is None:
        return Choice(rule.transport, f"{DOMAINS[domain]}: {rule.source}")
    if rule.transport == ONE_SIDED and _why_not(TWO_SIDED, unavailable) is None:
        return Choice(TWO_SIDED, f"{ONE_SIDED} cannot be used: {refused}")
    others = "; ".join(f"{name}: {_why_not(name, unavailable) or 'does not serve here'}" for name in unavailable)
    return Choice(None, f"nothing moves CUDA tensors here: {others}")


def _fits(rule: Rule, domain: Domain, operation: Operation, nbytes: int | None) -> bool:
    """A rule with a limit is none for messages of all sizes."""
    small = rule.most_bytes is None or (nbytes is not None and nbytes <= rule.most_bytes)
    return (rule.domain, rule.operation) == (domain, operation) and small


def _why_not(transport: str, unavailable: Mapping[str, str | None]) -> str | None:
    return unavailable.get(transport, "it is not there")


def domain_of(kinds: Iterable[str | None], hosts: Iterable[str]) -> Domain:
    """Of ranks on these hosts, by what links each two of them (kinds of topology.facts; None: nothing is known to).

    A link of PCIe counts as one over which memory is reached: whether it is, peer access says.
    """
    if len(set(hosts)) > 1:
        return "across"
    found = set(kinds)
    if not found <= {*PEER_KINDS, *PCIE_KINDS}:
        return "none"
    return "link" if found <= set(PEER_KINDS) else "pcie"
