"""The choice of the transport that moves tensors: by reach, message size, availability and measurement.

Reach: whether ranks reach each other's memory. All functions here are pure.

RULES is the one table of rules. All messages of programs are sends of one rank to another; whether a GPU's
memory is reached over NVLink or over PCIe makes no difference to them. What `tokenring rates --transports` has
kept comes before the rules, where one transport was faster by more than the spread of what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

Domain = Literal["reached", "apart", "across"]
DOMAINS: Mapping[Domain, str] = {
    "reached": "every two ranks reach each other's memory",
    "apart": "some ranks of one machine do not reach each other's memory",
    "across": "the ranks are on several machines",
}
ONE_SIDED, TWO_SIDED = "symm", "nccl"
PAIRS: Mapping[str, tuple[str, str]] = {"cuda": (ONE_SIDED, TWO_SIDED), "cpu": ("shm", "gloo")}  # one-sided first


@dataclass(frozen=True)
class Rule:
    """The transport that moves messages in a domain; source: who found so.

    limit_bytes: of a message, above which the two-sided transport moves them. None: no source gives a limit.
    """

    transport: str
    source: str
    limit_bytes: int | None = None


Rules = Mapping[str, Mapping[Domain, Rule]]  # by the tensors' type of device
ENGINES = (
    "copies by copy engines take no SM from attention (PyTorch's async tensor parallelism; XLA takes NVSHMEM for "
    "permutes of any size inside one NVLink domain)"
)
REACH = "puts need memory that peers reach"
HEAP = "one copy through memory, where Gloo took 1.4 to 8 times as long (docs/measurements.md)"
RULES: Rules = {
    "cuda": {"reached": Rule(ONE_SIDED, ENGINES), "apart": Rule(TWO_SIDED, REACH), "across": Rule(TWO_SIDED, REACH)},
    "cpu": {"reached": Rule("shm", HEAP), "apart": Rule("gloo", REACH), "across": Rule("gloo", REACH)},
}


class Spread(NamedTuple):
    """Seconds of one thing that was measured several times: their quartiles."""

    low: float
    median: float
    high: float


class TransportTable(Protocol):
    """Times of messages between ranks such as these, as tables.transport_times.Transfers has them."""

    @property
    def sizes(self) -> Sequence[int]:
        """The sizes of the messages that were measured, in bytes, rising."""

    def seconds(self, transport: str, nbytes: int) -> Spread | None:
        """Return the seconds of a message of `nbytes` bytes; None if the transport was not measured."""


@dataclass(frozen=True)
class TransportChoice:
    """The transport that is taken, None if nothing serves; and the reason."""

    transport: str | None
    reason: str


def choose(
    kind: str,
    domain: Domain,
    unavailable: Mapping[str, str | None],
    message_bytes: int | None = None,
    measured: TransportTable | None = None,
    rules: Rules = RULES,
) -> TransportChoice:
    """Choose the transport for tensors on a type of device in this domain.

    unavailable: of each that there is, None or why it cannot be used here. message_bytes: of the messages, None where
    that is not known; a table then counts where one transport was faster at all of its sizes.
    """
    ruled = _by_rule(kind, domain, unavailable, message_bytes, rules)
    if measured is None or ruled.transport is None:
        return ruled
    rival = next(name for name in PAIRS[kind] if name != ruled.transport)
    if _why_not(rival, unavailable) is not None:
        return ruled
    sizes = measured.sizes if message_bytes is None else [message_bytes]
    return _by_table(ruled, ruled.transport, rival, measured, sizes)


def _by_rule(
    kind: str, domain: Domain, unavailable: Mapping[str, str | None], message_bytes: int | None, rules: Rules
) -> TransportChoice:
    rule, (one_sided, two_sided) = rules[kind][domain], PAIRS[kind]
    refused, other = _why_not(rule.transport, unavailable), _why_not(two_sided, unavailable)
    if refused is None:
        reason = f"rule: {DOMAINS[domain]}: {rule.source}"
        if rule.limit_bytes is not None and message_bytes is not None and message_bytes > rule.limit_bytes:
            if other is None:
                above = f"messages of {size_text(message_bytes)}, above {size_text(rule.limit_bytes)}"
                return TransportChoice(two_sided, f"rule: {above}: {rule.source}")
            reason += f"; {two_sided} cannot be used: {other}"
        return TransportChoice(rule.transport, reason)
    if rule.transport == one_sided and other is None:
        return TransportChoice(two_sided, f"rule: {one_sided} cannot be used: {refused}")
    others = "; ".join(f"{name}: {_why_not(name, unavailable) or 'does not serve here'}" for name in unavailable)
    return TransportChoice(None, f"nothing moves {kind.upper()} tensors here: {others}")


def _why_not(transport: str, unavailable: Mapping[str, str | None]) -> str | None:
    return unavailable.get(transport, "it is not there")


def _by_table(
    ruled: TransportChoice, first: str, rival: str, table: TransportTable, sizes: Sequence[int]
) -> TransportChoice:
    """Take the transport that was faster by more than the spread at each of these sizes; else the rules' choice."""
    measured = [(table.seconds(first, size), table.seconds(rival, size)) for size in sizes]
    pairs = [(a, b) for a, b in measured if a is not None and b is not None]  # all, or none
    if not pairs:
        return ruled
    (a, b), more = pairs[-1], " and less" if len(sizes) > 1 else ""
    at = f"at {size_text(sizes[-1])}{more}"
    if all(a.high < b.low for a, b in pairs):
        return TransportChoice(
            first, f"measured: {first} {time_text(a.median)} against {rival} {time_text(b.median)} {at}"
        )
    if all(b.high < a.low for a, b in pairs):
        return TransportChoice(
            rival, f"measured: {rival} {time_text(b.median)} against {first} {time_text(a.median)} {at}"
        )
    if len(sizes) > 1:
        return replace(ruled, reason=f"{ruled.reason}; measured: which is faster is a matter of size, here unknown")
    alike = f"{first} {time_text(a.median)}, {rival} {time_text(b.median)} {at}"
    return replace(ruled, reason=f"{ruled.reason}; measured: no faster one ({alike})")


def time_text(seconds: float) -> str:
    """Return a time in microseconds, as times of messages are compared."""
    micros = 1e6 * seconds
    return f"{micros:.0f} µs" if micros >= 9.95 else f"{micros:.1f} µs"


def size_text(nbytes: int) -> str:
    """Return a size such as 1 MB, where a MB is of 2^20 bytes."""
    for unit, size in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} B"
