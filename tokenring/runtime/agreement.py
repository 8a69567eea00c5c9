"""Agreement of all ranks on a call, before any of them uses anything of another.

Each call exchanges 32 bytes: the digest of a description of the call. Only if digests differ do the
descriptions travel, so that the error can name rank, field and values; every rank raises it. A rank that
cannot make the call takes part with its reason instead: it refuses.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tokenring.backends.interfaces import PreparesRows, Transport
from tokenring.errors import ConfigurationError, PeerLost, TokenRingError, one_line
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import AUTO, Layout
from tokenring.sequence.workload import CUT, OF_LENGTHS, TAKEN, Held, Lengths, Workload, agreed_lengths

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from tokenring.ir.schedule_data import Pass
    from tokenring.runtime.caller import Caller
    from tokenring.sequence.workload import Request

LOG = logging.getLogger("tokenring")
REFUSED = "refused"  # the field of a rank that makes no call, with the reason
SINKS, LSE_GRADIENT = "sinks", "gradient of lse"  # notes: of what a call has besides its request
UNWANTED = "lse"  # the field that says that nobody wants it: of calls without gradients alone
AGAIN = {LSE_GRADIENT, UNWANTED}  # where ranks differ in one alone, all make the call again, as one where some has it
TOLD = "_tokenring_told"  # of an error that passes through several calls, as in a checkpoint: it is told once


class Disagreement(ConfigurationError):
    """The ranks make different calls. No rank has used anything of another, and all can go on.

    fields: of the descriptions, those in which the ranks differ; the same on all ranks.
    """

    def __init__(self, message: str, fields: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.fields = frozenset(fields)


class OtherLengths(Disagreement):
    """The ranks make one call, of sequences of other lengths than some took them to have: it is to be made again."""

    def __init__(self, text: str, held: Held, lengths: Held) -> None:
        super().__init__(text)
        self.held, self.lengths = held, lengths


@dataclass(frozen=True)
class Description:
    """One rank's description of the call that it is about to make, field by field, with its digest.

    held: the tokens that this rank holds, and lengths what it knows of those of whole sequences; not in the digest, as
    ranks differ in it. None: it refuses for another reason.
    """

    fields: tuple[tuple[str, str], ...]
    digest: bytes
    held: Held | None = None
    lengths: Lengths | None = None

    @staticmethod
    def of(fields: dict[str, object], held: Held | None = None, lengths: Lengths | None = None) -> Description:
        """Make a description with its SHA-256 digest; the fields must print alike on all ranks."""
        texts = tuple((name, str(value)) for name, value in fields.items())
        return Description(texts, hashlib.sha256(json.dumps(texts).encode()).digest(), held, lengths)


def describe(
    cp: Caller, request: Request, direction: Pass, schedule: str, planned: bool, notes: Sequence[str] = ()
) -> Description:
    """Describe all that ranks must agree on.

    schedule: as text, with all its content. planned: if it is chosen here. notes: SINKS, LSE_GRADIENT.
    """
    transport = cp.made_transport(request.device)
    most = None if transport is None else transport.target.most_connections  # by this rank's environment
    sizes: dict[str, object] = {field.name: getattr(request.workload, field.name) for field in fields(Workload)}
    if sizes["value_dim"] == sizes["head_dim"]:
        sizes["value_dim"] = "head_dim"  # whatever that is: where it differs, it alone is named
    if sizes["latent_dim"] is None:
        del sizes["latent_dim"]
    # Of a layout that the call gives the length is known, whatever the ranks hold.
    of = cp.lengths if request.layout is None or cp.layout == AUTO else None
    held = None if of is None else Held(*(of.parts(getattr(request.workload, name))[cp.rank] for name in OF_LENGTHS))
    return Description.of(
        {
            "pass": direction,
            **sizes,
            "mask": request.mask,
            "scale": repr(request.scale),
            **({"softcap": repr(request.softcap)} if request.softcap else {}),
            **({} if request.wants_lse else {UNWANTED: "not wanted"}),
            "gradients enabled": request.training,
            "device": request.device.type,
            "layout": _layout_text(cp),
            **({} if request.layout is None else {CUT: named_digest(request.layout)}),
            "schedule": schedule,
            "pieces": cp.pieces,
            "kernel": no_kernel(cp, request, direction) or "computes it",
            **({} if most is None else {"communicators at most": most}),
            **_rows_text(cp, request, direction),
            **({"planned for": "both passes" if request.backward else "forward"} if planned else {}),
            **dict.fromkeys(notes, "given"),
        },
        held,
        of,
    )


def _layout_text(cp: Caller) -> str:
    return cp.layout if isinstance(cp.layout, str) else named_digest(cp.layout)


def no_kernel(cp: Caller, request: Request, direction: Pass) -> str | None:
    """Return the reason why this rank cannot compute or merge the call; None: it can.

    Ranks may differ in it by what is installed on them.
    """
    from tokenring.backends.merging.choice import merge_refusal
    from tokenring.backends.registry import capped_kernel, kernel_refusal

    try:
        kernel = capped_kernel(cp.kernel(request.device), cp.kernel_name, request.softcap)
    except TokenRingError as error:
        return str(error)
    reason = kernel_refusal(kernel, request.workload, request.device, direction)
    return reason or (merge_refusal(request.device, request.workload.value_dim) if cp.world_size > 1 else None)


def _rows_text(cp: Caller, request: Request, direction: Pass) -> dict[str, object]:
    """Say, for backward, which kernel this rank prepares rows for, if any: it decides what travels."""
    if direction == "forward":
        return {}
    from tokenring.backends.registry import capped_kernel

    try:
        kernel = capped_kernel(cp.kernel(request.device), cp.kernel_name, request.softcap)
    except TokenRingError:  # as `no_kernel` says
        return {}
    return {"rows prepared for kernel": kernel.name} if isinstance(kernel, PreparesRows) else {}


def named_digest(some: Layout | Schedule) -> str:
    """Return the name of a layout or schedule with a digest that tells apart those that share the name."""
    text = some.to_json() if isinstance(some, Schedule) else repr(some)
    return f"{some.name!r} ({hashlib.sha256(text.encode()).hexdigest()[:16]})"


def agree(transport: Transport, mine: Description) -> None:
    """Make sure that all ranks make the same call. Raises Disagreement, on every rank, if they do not; PeerLost.

    Where messages of calls that differ never meet, this only begins the exchange, and `settle` raises.
    """

    def judge(digests: list[bytes]) -> None:
        if any(digest != mine.digest for digest in digests):
            texts = transport.exchange_text(json.dumps([mine.fields, mine.held]).encode(), "what differs")
            raise _judged(mine, [json.loads(text) for text in texts])

    if transport.target.deferring:
        transport.begin_call(mine.digest, "the call", judge)
    else:
        judge(transport.exchange(mine.digest, "the call"))


def _judged(mine: Description, told: list[Any]) -> Disagreement:
    """Return the error that says in what descriptions differ: the same kind on all ranks."""
    descriptions = [dict(fields) for fields, _ in told]
    held = [None if each is None else Held(*each) for _, each in told]
    text, differing = _difference(descriptions), _differing(descriptions)
    if mine.held is None or mine.lengths is None:
        return Disagreement(text, differing)
    settled_next = [{name: each[name] for name in each if name not in AGAIN} for each in descriptions]
    lengths = agreed_lengths(settled_next, held, mine.lengths, REFUSED)
    return Disagreement(text, differing) if lengths is None else OtherLengths(text, mine.held, lengths)


def settle(transport: Transport | None) -> None:
    """Finish the exchange that `agree` has only begun, if so. Raises what `agree` raises."""
    if transport is not None and transport.target.deferring:
        transport.settle()


@contextmanager
def beginning(transport: Transport | None) -> Iterator[None]:
    """Guard the part of a call between `agree` and its program: all ranks raise our errors, if the ranks agree."""
    try:
        yield
    except TokenRingError:
        settle(transport)
        raise
    except BaseException as error:  # such as Ctrl-C: the others begin the pass
        if transport is not None:
            transport.fail(error)
        raise


def _difference(descriptions: list[dict[str, str]]) -> str:
    """Return the reasons of ranks that refused; else each field in which ranks differ, with its values and ranks."""
    if any(REFUSED in fields for fields in descriptions):
        return refusals([fields.get(REFUSED) for fields in descriptions])
    found = []
    for name in _differing(descriptions):
        values = [fields.get(name, "nothing") for fields in descriptions]
        counted = Counter(values).most_common()  # the more common value first
        parts = [f"{_ranks(values, value)}: {value}" for value, _ in counted]
        found.append(f"{name}: {'; '.join(parts)}")
    return f"the ranks disagree, so the call was not made. {'. '.join(found)}. Make the same call on every rank"


def _differing(descriptions: list[dict[str, str]]) -> list[str]:
    """Return the fields that differ; UNWANTED only where no other does: then all ranks make the call again."""
    names = dict.fromkeys(name for fields in descriptions for name in fields)
    found = [name for name in names if len({fields.get(name) for fields in descriptions}) > 1]
    return [name for name in found if name != UNWANTED] or found


def refusals(texts: Sequence[str | None]) -> str:
    """Return the sentence that names each reason with the ranks that refused for it; None: the rank did not refuse."""
    found = [f"{_ranks(texts, text)} refused: {text}" for text in dict.fromkeys(texts) if text is not None]
    return f"{'; '.join(found)}. So no rank made the call"


def _ranks(values: Sequence[str | None], value: str) -> str:
    ranks = [str(rank) for rank, each in enumerate(values) if each == value]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"


# ---------- refusals


class refusing:
    """A guard around this rank's own checks of a call on which all ranks are about to agree.

    An error of the checks is sent to all ranks: this one raises it, every other a Disagreement with rank and reason.
    """

    __slots__ = ("_cp", "_direction", "_given")

    def __init__(self, cp: Caller, direction: Pass, *given: object) -> None:
        """Guard a pass. given: the call's tensors or device, by which ranks without a transport find the same one."""
        self._cp, self._direction, self._given = cp, direction, given

    def __enter__(self) -> None:
        """Do nothing: calls that pass cost nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            reason, taken = one_line(error), getattr(error, TAKEN, None)
            tell(self._cp, error, lambda: self.speak(reason, taken))

    def speaker(self) -> Transport | None:
        """Return the transport by which the ranks agree on this call; None: there is no other rank."""
        return self._cp.speaker(speaking_device(self._given))

    def speak(self, reason: str, taken: tuple[Held, tuple[int, int]] | None = None) -> None:
        """Take part with the reason in the exchange in which the others wait. Raises Disagreement, PeerLost.

        taken: what this rank holds, and of which lengths it takes that to be, where it may refuse because of these.
        """
        transport = self.speaker()
        if transport is not None:
            fields: dict[str, object] = {"pass": self._direction, REFUSED: reason}
            held, known = None, None
            if taken is not None:
                held, known = taken[0], self._cp.lengths
                fields |= {"layout": _layout_text(self._cp), **dict(zip(OF_LENGTHS, taken[1], strict=True))}
            agree(transport, Description.of(fields, held, known))
            settle(transport)


def tell(cp: Caller, error: BaseException, speak: Callable[[], object]) -> None:
    """Take part, by `speak`, in the exchange in which the others wait; the caller raises `error`.

    Raises OtherLengths only: then there was nothing to refuse, and all ranks make the call again.
    """
    heard = isinstance(error, (PeerLost, Disagreement)) or hasattr(error, TOLD)
    if cp.world_size == 1 or heard or not isinstance(error, Exception):
        return
    setattr(error, TOLD, True)
    try:
        with cp.turn, _disable_current_modes(), torch._C.DisableTorchFunction():  # such as of FakeTensor, torch.device
            speak()
    except OtherLengths:
        raise
    except Disagreement:
        pass
    except Exception as unheard:  # whatever it is, it is not what the caller wants to know
        LOG.warning("the other ranks may wait for this one, which could not tell them that it raises: %s", unheard)


def speaking_device(given: Iterable[object]) -> torch.device | None:
    """Return the device of a call's tensors: an accelerator before the CPU, where some rank left a tensor behind."""
    devices = [each if isinstance(each, torch.device) else getattr(each, "device", None) for each in given]
    found = [each for each in devices if isinstance(each, torch.device) and each.type != "meta"]
    return next((each for each in found if each.type != "cpu"), found[0] if found else None)
