"""Which transport moves CUDA tensors: by whether ranks reach each other's memory, and what there is. Pure functions.

RULES is the one table. All messages of programs are sends of one rank to another. Whether memory is reached over NVLink
or over PCIe makes no difference to them, nor does their size: nobody has measured any here yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Domain = Literal["reached", "apart", "across"]
DOMAINS: Mapping[Domain, str] = {
    "reached": "every two ranks reach each other's memory",
    "apart": "some ranks of one machine do not reach each other's memory",
    "across": "the ranks are on several machines",
}
ONE_SIDED, TWO_SIDED = "symm", "nccl"


@dataclass(frozen=True)
class Rule:
    """What moves messages in a domain; source: who found so."""

    transport: str
    source: str


ENGINES = (
    "copies by copy engines take no SM from attention (PyTorch's async tensor parallelism; XLA takes NVSHMEM for "
    "permutes inside one NVLink domain)"
)
REACH = "puts need memory that peers reach"
RULES: Mapping[Domain, Rule] = {
    "reached": Rule(ONE_SIDED, ENGINES),
    "apart": Rule(TWO_SIDED, REACH),
    "across": Rule(TWO_SIDED, REACH),
}


@dataclass(frozen=True)
class Choice:
    """What is taken, None if nothing serves; and why."""

    transport: str | None
    reason: str


def choose(domain: Domain, unavailable: Mapping[str, str | None]) -> Choice:
    """The transport in this domain. unavailable: of each that there is, None or why it cannot be used here."""
    rule = RULES[domain]
    refused = _why_not(rule.transport, unavailable)
    if refused is None:
        return Choice(rule.transport, f"{DOMAINS[domain]}: {rule.source}")
    if rule.transport == ONE_SIDED and _why_not(TWO_SIDED, unavailable) is None:
        return Choice(TWO_SIDED, f"{ONE_SIDED} cannot be used: {refused}")
    others = "; ".join(f"{name}: {_why_not(name, unavailable) or 'does not serve here'}" for name in unavailable)
    return Choice(None, f"nothing moves CUDA tensors here: {others}")


def _why_not(transport: str, unavailable: Mapping[str, str | None]) -> str | None:
    return unavailable.get(transport, "it is not there")
