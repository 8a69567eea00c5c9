"""The interfaces of transports, kernels and mergers. One screen each."""

# ruff: noqa: B027 - what a transport need not do is nothing

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from tokenring.errors import PeerLost, UnsupportedError
from tokenring.lowering.target import Link, Target
from tokenring.sequence.region import Patch

if TYPE_CHECKING:
    from tokenring.ir.schedule_data import Pass


class Work(Protocol):
    """One message on its way."""

    def wait(self) -> None:
        """Wait until it has arrived, or may be overwritten. Raises PeerLost at the time limit."""


Landing = tuple[int, str, torch.Tensor]  # source, channel, and where a message of theirs goes


class Transport(ABC):
    """Moves bytes between the ranks of one group.

    Messages between two ranks on one channel keep their order. `sent_bytes` counts payload by
    destination rank since it was last cleared. `target` says what it can do, before it is made too.

    What is abstract here all have. The rest is called where `target` says so, and does nothing else by itself: so a
    class that does not derive from this one needs only what is abstract, and what its target promises (`faults_of`).
    """

    rank: int
    world_size: int
    target: Target
    sent_bytes: dict[int, int]

    @abstractmethod
    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> Work:
        """Post the send of a contiguous tensor; never blocks."""

    @abstractmethod
    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> Work:
        """Post the receive into a contiguous tensor; never blocks."""

    @abstractmethod
    def prepare(self, links: Iterable[Link], device: torch.device) -> None:
        """Connect for messages on these links, between tensors on this device; all ranks call it together.

        links: at least those of which this rank is an end; of each channel that any rank uses, one. What is connected
        already stays so. Raises ConfigurationError for a device that it does not serve; PeerLost.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds, such as connections; closing twice is fine. Nothing moves afterwards."""

    @abstractmethod
    def lost(self, peer: int, what: str, found: str) -> PeerLost:
        """Make the error for a wait for `peer` that failed in some other way; it names who is to blame."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Give up in the middle of a call: tell the other ranks, and take no more calls."""

    @abstractmethod
    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        """Gather what every rank says about `what` (up to 55 bytes each), by rank. All call it; raises PeerLost."""

    @abstractmethod
    def exchange_text(self, text: bytes, what: str) -> list[bytes]:
        """Gather a text of any length from every rank, by rank, in several exchanges. All call it."""

    @classmethod
    def target_in(cls, environment: Mapping[str, str]) -> Target:
        """Return what it can do in this environment, without being started."""
        return cls.target

    # ---------- target.one_sided: ranks write into each other's memory, and so receive only into memory that it gives

    pool: object = None  # the one buffer pool of all that use this transport

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Return memory to receive into, uint8; None if the last one is enough for all ranks. A collective call."""
        return None

    # ---------- target.placing: senders know beforehand where each message goes: those of a bound program

    def place(self, receives: Sequence[Landing]) -> object | None:
        """Tell the other ranks where a program's messages go, in the order of their posts. A collective call."""
        return None

    def begin(self, placement: Any) -> None:
        """Take posts from now on as the messages of the program that was placed so."""

    # ---------- target.grouping: messages move in groups, whose own begin together, and are waited for together

    def go(self) -> None:
        """Begin to move what was posted since the last call. Waiting for any of it does the same."""

    # ---------- target.deferring: messages carry the key of their call, and those of calls that differ do not meet.
    # So they may be posted while the ranks still find out whether they make the same call. Nobody may use what has
    # come before `settle`.

    def begin_call(self, digest: bytes, what: str, judge: Callable[[list[bytes]], None]) -> None:
        """Tell the other ranks the digest of the call whose messages are posted next.

        Waits for nobody, but settles an earlier call that is not settled, and this one where that takes no messages.

        judge: called by `settle` with what every rank said, by rank; raises ConfigurationError if they disagree.
        """
        judge(self.exchange(digest, what))

    def settle(self) -> None:
        """Raise what judge raises, once, and then drop the messages that were posted; PeerLost. Else do nothing."""

    # ---------- target.capturable: messages go into graphs where the device and its driver take them

    def try_capture(self) -> None:
        """Try, at the first call, that graphs take messages. A collective call. Raises UnsupportedError, PeerLost."""

    # ---------- target.modal: there are several ways to divide messages, each a name of the registry

    def in_mode(self, name: str) -> Transport:
        """Return the transport of this mode, between the same ranks and of the same control.

        It is made when first asked for, and closed with this one. Without such a mode, this transport returns itself.
        """
        return self

    # ---------- target.collectives: of some of its ranks; `sent_bytes` counts what each gives every other one.
    # Tensors are given by rank, without one for the rank itself; those of one call have equal sizes and one dtype.
    # `ranks` are in ascending order. Collectives of the same ranks happen in the order in which they are posted.

    def prepare_groups(self, groups: Iterable[tuple[int, ...]], device: torch.device) -> None:
        """Connect all ranks of each of these groups, as `prepare` does for links; all ranks call it alike."""

    def all_to_all(
        self, sends: Mapping[int, torch.Tensor], recvs: Mapping[int, torch.Tensor], ranks: tuple[int, ...], label: str
    ) -> Work:
        """Post an all-to-all; never blocks. One contiguous tensor to each of the other ranks, and one from each."""
        raise UnsupportedError(NO_COLLECTIVES.format(type(self).__name__))

    def all_gather(
        self, data: torch.Tensor, recvs: Mapping[int, torch.Tensor], ranks: tuple[int, ...], label: str
    ) -> Work:
        """Post an all-gather; never blocks.

        The same tensor goes to all; nothing may use it until the wait, as it may be written.
        """
        raise UnsupportedError(NO_COLLECTIVES.format(type(self).__name__))


NO_COLLECTIVES = "{} has no collectives: lower for a target without them"
PROMISED = {  # by flag of a target: the methods that it promises
    "one_sided": ("pool", "allocate"),
    "placing": ("place", "begin"),
    "grouping": ("go",),
    "deferring": ("begin_call", "settle"),
    "capturable": ("try_capture",),
    "modal": ("in_mode",),
    "collectives": ("prepare_groups", "all_to_all", "all_gather"),
}
ALWAYS = ("rank", "world_size", "target", "sent_bytes", *sorted(Transport.__abstractmethods__))


def faults_of(given: object) -> list[str]:
    """Name what an object lacks to be a transport, whatever its class: what all have, and what its target promises."""
    missing = [name for name in ALWAYS if not hasattr(given, name)]
    target = getattr(given, "target", None)
    if not isinstance(target, Target):
        return missing or ["target"]
    promised = [(flag, name) for flag, names in PROMISED.items() if getattr(target, flag) for name in names]
    return missing + [f"{name} (which target.{flag} promises)" for flag, name in promised if not hasattr(given, name)]


class AttentionKernel(Protocol):
    """Local attention of one tile, with the log-sum-exp (lse).

    q [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv] with any strides whose last is 1; Hq is a multiple of
    Hkv; Dv is D, unless the kernel is `UnequalWidths`. `patch` says what is visible, from its own corner
    (row0 = col0 = 0). lse is fp32, natural log, [B, Hq, Sq]; a row that sees nothing has out 0, lse -inf and no
    gradient. Results come in fp32 or the input's dtype. scale is positive, and not too small for fp32: others are
    folded into q (`runtime.bound_kernel`).
    """

    name: str

    def supports(self, head_dim: int, dtype: torch.dtype) -> str | None:
        """Return None, or why it cannot compute such a call at all: asked once, before its first pass."""

    def supports_patch(self, patch: Patch) -> str | None:
        """Return None, or why a patch should be cut: asked when a schedule is lowered."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, patch: Patch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out [B, Hq, Sq, Dv] and lse [B, Hq, Sq] of this tile."""

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lse: torch.Tensor,
        delta: torch.Tensor | None,
        *,
        out: torch.Tensor | None = None,
        patch: Patch,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return dq, dk, dv of this tile, from the lse of whole rows and their out or delta = rowsum(dout · out).

        One of the two is given: out where it is at hand, at the rank that owns q; delta elsewhere.
        Results are new tensors, which the caller may change.
        """


@runtime_checkable
class TakesDelta(Protocol):
    """A kernel whose backward takes delta as it is, whatever it is beside dout; others make an output that carries it.

    Where a gradient flows into lse, delta is more than an output could make: see `kernels/delta.py`.
    """

    takes_delta: bool


@runtime_checkable
class PreparesRows(Protocol):
    """A kernel for whose backward the owner of rows prepares their lse and delta, once a call, before they travel.

    Only where no gradient flows into lse. All ranks have such a kernel, or none: what travels is not the same.
    """

    def for_call(self) -> AttentionKernel:
        """Return this kernel for one backward call, which takes prepared rows."""

    def prepared_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """Return what takes the place of lse [B, H, T]."""

    def prepared_delta(self, dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Return what takes the place of delta [B, H, T]; dout [B, T, H, D]."""


@runtime_checkable
class CappingKernel(Protocol):
    """A kernel that also computes with scores s that are soft-capped: c · tanh(s / c), before any are hidden."""

    softcap: float  # c; 0: none

    def capped(self, softcap: float) -> AttentionKernel:
        """Return this kernel with this cap. Raises UnsupportedError if what is installed cannot compute it."""


@runtime_checkable
class HeadLimited(Protocol):
    """A kernel that takes so many query heads at most, and says so of a whole call, however schedules divide it."""

    def supports_heads(self, q_heads: int) -> str | None:
        """Return None, or why it cannot compute calls of so many query heads: asked as `supports` is."""


@runtime_checkable
class UnequalWidths(Protocol):
    """A kernel that also computes calls in which v and out have another head dim than q and k."""

    def supports_widths(self, head_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
        """Return None, or why it cannot compute such calls: asked as `supports` is, instead of it."""


def refusal_of(kernel: AttentionKernel, head_dim: int, value_dim: int | None, dtype: torch.dtype) -> str | None:
    """Return None, or why a kernel cannot compute calls with these widths of q and k, and of v. None: v's is theirs."""
    if value_dim in (None, head_dim):
        return kernel.supports(head_dim, dtype)
    if isinstance(kernel, UnequalWidths):
        return kernel.supports_widths(head_dim, value_dim, dtype)
    return f"it takes values that are as wide as keys, and these have head dims {value_dim} and {head_dim}"


@dataclass(frozen=True)
class Tiles:
    """The tiles that a program will ask of a kernel: their patches, and the operands that it will give.

    value_dim: the head dim of v and out; None: head_dim, as of q and k.
    """

    patches: tuple[Patch, ...]
    direction: Pass
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    value_dim: int | None = None


@runtime_checkable
class MaskingKernel(Protocol):
    """A kernel that reads masks in device memory, which a program holds from when it is bound."""

    def holding(self, tiles: Tiles) -> AttentionKernel:
        """Return this kernel with the masks of these tiles made, complete for every stream, and held by it."""


@runtime_checkable
class PackingKernel(Protocol):
    """A kernel that also computes several patches of one rectangle in one call, such as packed documents.

    The rows and columns of each patch lie beyond those of the one before; row0 and col0 count from the operands'
    corner. Each result is that patch's own, as `forward` and `backward` would give it. What lies between patches must
    not be read: rows that nobody needs never come, and their memory holds anything.
    """

    def packs(self, patches: Sequence[Patch]) -> bool:
        """Return True if one call takes these, and so any fewer of them: asked when a program is bound."""

    def forward_packed(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, patches: Sequence[Patch], scale: float
    ) -> list[tuple[torch.Tensor, ...]]:
        """Return (out, lse) of each patch."""

    def backward_packed(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lse: torch.Tensor,
        delta: torch.Tensor | None,
        *,
        out: torch.Tensor | None = None,
        patches: Sequence[Patch],
        scale: float,
    ) -> list[tuple[torch.Tensor, ...]]:
        """Return (dq, dk, dv) of each patch."""


@runtime_checkable
class RunningKernel(Protocol):
    """A kernel that also keeps the result of tiles that go into the same rows one after another, merging each in."""

    def runs(self, patches: Sequence[Patch]) -> bool:
        """Return True if it does so for tiles of these patches: asked when a program is bound."""

    def forward_running(
        self, before: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, patch: Patch, scale: float
    ) -> Any:
        """Return the result so far, of what there was before (None at first) and this tile."""

    def results(self, running: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out, in fp32, and lse of all tiles; see `AttentionKernel.forward`."""


class Merger(Protocol):
    """Merges a partial result into a running one, and accumulates in fp32 whatever comes.

    out [rows, B, H, D] fp32 and lse [rows, B, H] fp32 are what there is; new_out, in fp32, bf16 or fp16, and new_lse
    fp32 are what comes; all with any strides. A lse of -inf is that of a row that has seen nothing: its out is 0, and
    stays so where nothing comes. scratch [2, rows, B, H] fp32, contiguous, may be overwritten.
    """

    name: str

    def __hash__(self) -> int:
        """Return one hash for mergers that do the same: these are equal, so that one is tried once."""

    def supports(self, head_dim: int) -> str | None:
        """Return None, or why it cannot merge such rows: asked once, when it is chosen."""

    def merge_(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        new_out: torch.Tensor,
        new_lse: torch.Tensor,
        scratch: torch.Tensor,
    ) -> None:
        """Merge into out and lse, in place."""

    def merged(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        new_out: torch.Tensor,
        new_lse: torch.Tensor,
        scratch: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse, merged: these tensors, overwritten, or new ones, for the caller to keep."""
