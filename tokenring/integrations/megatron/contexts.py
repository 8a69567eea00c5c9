"""Contexts that the layers of a model share: for each group a transport, and a ContextParallel for each schedule.

Megatron makes layers one by one, from a class or a spec: all they have in common is their group. So what they share is
kept here by group and options, for as long as the group lives. Not as long as a layer: Python's collector frees the
layers of a former model on some ranks sooner than on others, and ranks must make transports together or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch

from tokenring.api.attention import attend, attend_as, prepared
from tokenring.api.context import ContextParallel
from tokenring.integrations.megatron.groups import kept
from tokenring.integrations.megatron.latent_calls import latents_pay, prepared_latents
from tokenring.integrations.megatron.packed import LastPacking
from tokenring.integrations.megatron.startup import Announcer
from tokenring.runtime.agreement import refusing
from tokenring.schedule.families.registry import misfit
from tokenring.sequence.layout import contiguous, make_layout
from tokenring.sequence.mask import Mask
from tokenring.sequence.workload import Request

if TYPE_CHECKING:
    from tokenring.integrations.megatron.groups import KeptGroup, LayerGroup
    from tokenring.integrations.megatron.packed import PackKind
    from tokenring.sequence.layout import Layout

ALWAYS_FITS = "ring"  # also one rank alone, where nothing moves


class Shared(Protocol):
    """An object that layers of a group share."""

    def close(self) -> None:
        """Give back buffers and connections, for good."""

    def release(self) -> None:
        """Give back buffers and connections; the next call makes them anew."""


AnyShared = TypeVar("AnyShared", bound=Shared)
_KEPT: dict[tuple[KeptGroup, object], Shared] = {}


def contexts_of(group: LayerGroup | KeptGroup, options: Mapping[str, Any]) -> Contexts:
    """Return the contexts that all layers of this group with these options share; `options` are ContextParallel's."""
    return shared_by(Contexts, group, options)


def shared_by(
    make: Callable[[KeptGroup, Mapping[str, Any]], AnyShared], group: LayerGroup | KeptGroup, options: Mapping[str, Any]
) -> AnyShared:
    """Return what all layers of this group with these options share, made once by `make`."""
    group = kept(group)
    key = (group, (make, *((name, _identity(options[name])) for name in sorted(options))))
    if key not in _KEPT:
        for each in [each for each in _KEPT if not _lives(each[0])]:
            _KEPT.pop(each).close()
        _KEPT[key] = make(group, options)
    return cast("AnyShared", _KEPT[key])


def release_contexts(group: LayerGroup | None = None) -> None:
    """Give back buffers and connections that layers hold, those of one group or all; their next call makes new ones.

    group: a context- or tensor-parallel group, or "self" for what ranks without one hold. All ranks of a group call it
    after the same step, when no backward pass is left to do; then the next call connects and plans again.
    """
    for (of, _), shared in _KEPT.items():
        if group is None or (of == group if isinstance(of, str) else of.holds(group)):
            shared.release()


def _lives(group: KeptGroup) -> bool:
    """Tell whether torch.distributed still has the group."""
    return isinstance(group, str) or group.lives


class Contexts:
    """The ContextParallels of a group, made when a schedule is first asked for; they share one transport.

    Layout: zigzag, as Megatron cuts sequences; one rank alone takes any length.
    """

    def __init__(self, group: KeptGroup, options: Mapping[str, Any]) -> None:
        self.group, self.options = group, dict(options)
        self.ranks = 1 if isinstance(group, str) else group.world_size
        if self.ranks == 1:
            self.options.pop("topology", None)  # it is of the ranks that there would be
        self.rank = 0 if isinstance(group, str) else group.rank
        self.packings = LastPacking()
        self._by_schedule: dict[str, ContextParallel] = {}
        self._for_sizes: dict[tuple[str, Request], str] = {}
        self._latents_travel: dict[tuple[str, Request], bool] = {}
        self._announcer = Announcer()

    def __deepcopy__(self, memo: object) -> Contexts:
        """Return the object itself, as a ContextParallel does: copies of a layer share what layers share."""
        return self

    def close(self) -> None:
        """Give back buffers and connections. Layers that share them compute nothing afterwards."""
        for cp in reversed(self._by_schedule.values()):  # the first made the transport
            cp.close()

    def release(self) -> None:
        """Give back buffers and connections; the next call makes them anew. All ranks of the group call it together."""
        self.close()
        self._by_schedule.clear()
        self._for_sizes.clear()
        self._latents_travel.clear()
        self.packings = LastPacking()

    def context(self, schedule: str, device: torch.device | None = None) -> ContextParallel:
        """Return the ContextParallel of a schedule, made at the first use. Raises ConfigurationError.

        All ranks of the group get here together.
        """
        if self.ranks == 1:
            schedule = ALWAYS_FITS
        if schedule not in self._by_schedule:
            options = dict(self.options)
            if schedule.startswith("auto"):
                options.pop("pieces", None)  # it goes with schedules by name
            if self._by_schedule and self.ranks > 1:
                options["transport"] = next(iter(self._by_schedule.values())).transport_for(device)
            layout = "contiguous" if self.ranks == 1 else "zigzag"
            self._by_schedule[schedule] = ContextParallel(self.group, layout, schedule, **options)
        return self._by_schedule[schedule]

    def hearing(self, schedule: str, q: torch.Tensor) -> AbstractContextManager[None]:
        """Return a guard around this rank's checks of a call, whose refusal all ranks hear; none in a traced graph.

        q: the call's queries.
        """
        if self.ranks == 1 or torch.compiler.is_compiling():
            return nullcontext()
        return refusing(self.context(schedule, q.device), "forward", q)

    def attend(
        self,
        schedule: str,
        q_BTHD: torch.Tensor,
        k_BTHD: torch.Tensor,
        v_BTHD: torch.Tensor,
        mask: Mask,
        scale: float,
        training: bool,
        any_length: bool = False,
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
        layout: Layout | None = None,
        pack: PackKind | None = None,
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return out [B, T, Hq, D] of tokens that this rank holds.

        training: as in tokenring.api.attention.attend. any_length: B documents, where each step brings ones of other
        lengths; "auto" does not plan for each of these, but once for all sizes up to the next power of two.
        layout: of the tokens, where it is not zigzag. pack: what documents `mask` and `layout` are of; "auto" plans
        once for about as many. weight: of latents, which k then is, [B, T, 1, L + R]; v is as wide as values.
        """
        cp = taken = self.context(schedule, q_BTHD.device)
        if self.ranks == 1:
            layout = None
        if self.ranks == 1 or torch.compiler.is_compiling():
            return attend(q_BTHD, k_BTHD, v_BTHD, cp, mask, scale, training, None, sinks, softcap, layout)[0]
        if weight is not None:
            given = q_BTHD, k_BTHD, weight, v_BTHD.shape[-1]
            call, request = prepared_latents(cp, *given, mask, scale, training, layout)
            kind = _nominal(request, self.ranks, pack) if any_length else request
            if not self._travel(schedule, kind):
                k_BTHD, v_BTHD = call.keys_and_values()
                weight = None
        if weight is None:
            whole = q_BTHD, k_BTHD, v_BTHD, cp, mask, scale, training, None, sinks, softcap, layout
            q, k, v, request = prepared(*whole, wants_lse=False)
            kind = _nominal(request, self.ranks, pack) if any_length else request
        if any_length:
            taken = self._for_size(schedule, kind, request)
        out = call.attend(taken, request) if weight is not None else attend_as(q, k, v, taken, request, sinks)[0]
        self.announce(schedule, kind)
        return out

    def _travel(self, schedule: str, kind: Request) -> bool:
        """Tell whether latents of such a call travel: with a schedule by name; of "auto" where that is faster."""
        if not schedule.startswith("auto"):
            return True
        if (schedule, kind) not in self._latents_travel:
            self._latents_travel[schedule, kind] = latents_pay(self.context(schedule, kind.device), kind)
        return self._latents_travel[schedule, kind]

    def announce(self, schedule: str, request: Request) -> None:
        """Log at rank 0, once, the plan for this kind of call. All ranks of the group get here, after planning."""
        self._announcer.announce(self.context(schedule, request.device), request)

    def _for_size(self, schedule: str, nominal: Request, request: Request) -> ContextParallel:
        """Return the context that computes a call of about this size, by the schedule that was planned for the size."""
        cp = self.context(schedule, request.device)
        if not schedule.startswith("auto"):
            return cp
        if (schedule, nominal) not in self._for_sizes:
            self._for_sizes[schedule, nominal] = cp.agreed_plan(nominal).name
        return self.context(_fitting(self._for_sizes[schedule, nominal], request, cp), request.device)


def _nominal(request: Request, ranks: int, pack: PackKind | None) -> Request:
    """Return the call that stands for all of about its size: sizes up to the next power of two, without padding."""
    size = request.workload
    length = _power_of_two(size.q_length, 2 * ranks)
    size = replace(size, batch=_power_of_two(size.batch, 1), q_length=length, kv_length=length)
    if pack is not None:
        return replace(request, workload=size, mask=pack.nominal(length), layout=contiguous(ranks, length))
    return replace(request, workload=size, mask=replace(request.mask, cu_seqlens=None))


def _fitting(name: str, request: Request, cp: ContextParallel) -> str:
    """Return the schedule if its pieces divide these documents, else it without pieces, else one that always fits."""
    size = request.workload
    layout = request.layout or make_layout(cp.layout, cp.world_size, size.q_length)
    for each in (name, name.partition("/pieces")[0]):
        if misfit(each, cp.world_size, size, layout, layout) is None:
            return each
    return ALWAYS_FITS


def _power_of_two(number: int, unit: int) -> int:
    """Return the least unit · 2^n that is not less than the number."""
    while unit < number:
        unit *= 2
    return unit


def _identity(value: object) -> object:
    """Return the value if it can be hashed, else the identity of the object."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
