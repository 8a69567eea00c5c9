"""The kernel "auto" where there are several: each tile is computed by the first that can, in the order of order.py.

A kernel that is missing, that does not take the dtype or head dim, or that refuses a call for a reason that only the
device knows (no cuDNN, a chip that it was not built for) gives way to the next one, and the log says so once, with the
reason. What refused one kind of call is asked again for other kinds, until it has refused several. Errors that are no
refusals, such as memory that ran out or a device that failed, are raised as they are.

On a device a kernel is tried before a program is bound to it first (`numeric_trial.py`): one that raises or computes
something else gives way as well, for all calls of that pass, head dim and dtype. Each rank chooses for itself; what
they send each other does not depend on it.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from tokenring.backends.devices import has_device
from tokenring.backends.interfaces import AttentionKernel, MaskingKernel, Tiles, refusal_of
from tokenring.backends.kernels.flash_common import named
from tokenring.backends.kernels.numeric_trial import Kind, asserted_here, fault, ran_out, tries
from tokenring.backends.kernels.order import LAST, KernelTable, Operands, Pick, TileCall, default_order, ranked
from tokenring.backends.kernels.reference import with_cap
from tokenring.errors import MOST_SAID, BackendUnavailable, UnsupportedError, one_line
from tokenring.ir.schedule_data import PASSES, Pass
from tokenring.sequence.region import Patch

LOG = logging.getLogger("tokenring")
Made = TypeVar("Made")
Tables = Callable[..., "KernelTable | None"]  # of a kernel's name, and the operands
Trial = Callable[..., "str | None"]  # of a kernel, a pass and the operands: what is wrong; None: it cannot be told now
Tried = tuple[str, Pass, Operands]  # of a kernel by name
REFUSALS = (
    "not support", "unsupported", "only support", "no execution plan", "no viable", "no available kernel",
    "no kernel found", "not enabled", "not compiled", "was not built", "not implemented", "could not run",
    "not available",
    "requires", "is disabled", "no kernel image",
)  # fmt: skip
MOST_REFUSED = 3  # kinds of calls of one pass, head dim and dtype; who refused so many is asked for no other
SLOW = ("flex", "reference")  # to measure: one compiles each shape, the other holds every score of a tile
COMPILERS = ("cutlass", "triton", "torch._inductor", "torch._dynamo")  # modules whose errors mean: not this call
BROKEN = ("cuda error", "out of memory", "illegal memory access", "device-side assert", "unspecified launch failure")


def for_device(device: torch.device, make: Callable[[str], AttentionKernel]) -> Choosing:
    """Make the kernel "auto" for a CUDA device: kernels in the order of its generation, with their kept tables."""
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)
    where = f"for compute capability {capability[0]}.{capability[1]}"

    def table(name: str, head_dim: int, dtype: torch.dtype, value_dim: int | None = None) -> KernelTable | None:
        from tokenring.backends.table_keys import key_of
        from tokenring.tables.kernel_rates import kept

        kernel = chosen.kernel(name)
        if kernel is None or not has_device(device.type):
            return None
        return kept(key_of(kernel, device, dtype, head_dim, value_dim))

    def trial(
        kernel: AttentionKernel, direction: Pass, head_dim: int, dtype: torch.dtype, value_dim: int | None = None
    ) -> str | None:
        return fault(kernel, Kind(direction, head_dim, dtype, device, value_dim))

    chosen = Choosing(default_order(capability), make, table, where, trial if tries(device) else None)
    return chosen


class Choosing:
    """A kernel that takes one of several kernels for each tile.

    make: a kernel by name, raising BackendUnavailable; where: for the log; trial: what each passes before it is taken.
    """

    name = "auto"

    def __init__(
        self, order: Sequence[str], make: Callable[[str], AttentionKernel], tables: Tables, where: str = "here",
        trial: Trial | None = None,
    ) -> None:  # fmt: skip
        self.order, self._make, self._tables, self._where, self._trial = tuple(order), make, tables, where, trial
        self._made: dict[str, AttentionKernel] = {}
        self._missing: dict[str, str] = {}
        self._refused: dict[str, dict[TileCall, str]] = defaultdict(dict)
        self._found: dict[Tried, str] = {}  # by the trial
        self._untried: set[Tried] = set()  # for which there was no memory; of one program: the next one tries again
        self._picks: dict[TileCall, list[Pick]] = {}
        self._said: set[tuple[str, str]] = set()
        self._capped: dict[float, Choosing] = {}
        self._holding: dict[str, AttentionKernel] = {}  # those of one program; all else its copies share

    softcap = 0.0

    def capped(self, softcap: float) -> Choosing:
        """Return these kernels with this cap, as far as they compute it; the same for each cap."""

        def make(name: str) -> AttentionKernel:
            made = self.kernel(name)
            if made is None:
                raise BackendUnavailable(self._missing[name])
            try:
                return with_cap(made, softcap)
            except UnsupportedError as error:
                raise BackendUnavailable(str(error)) from None

        if softcap not in self._capped:
            made = self._capped[softcap] = Choosing(self.order, make, self._tables, self._where, self._trial)
            made.softcap = softcap
        return self._capped[softcap]

    # ---------- who computes

    def kernel(self, name: str) -> AttentionKernel | None:
        """Return the kernel, made when it is first asked for; None if it is not available: see `why_not`."""
        if name not in self._made and name not in self._missing:
            try:
                self._made[name] = self._make(name)
            except BackendUnavailable as error:
                self._missing[name] = one_line(error, MOST_SAID)
        return self._made.get(name)

    def why_not(self, name: str, head_dim: int, dtype: torch.dtype, value_dim: int | None = None) -> str | None:
        """Say why a kernel computes no such calls of any size; None: it does, but for what it may have refused."""
        made = self.kernel(name)
        if made is None:
            return self._missing[name]
        operands = TileCall.of("forward", 1, head_dim, dtype, value_dim).operands
        failed = next((why for each in PASSES if (why := self._found.get((name, each, operands)))), None)
        return failed or self._gave_up(name, operands, PASSES) or refusal_of(made, head_dim, value_dim, dtype)

    def why_not_call(self, name: str, call: TileCall) -> str | None:
        """Say why a kernel is not taken for one kind of call; None: it may be."""
        made = self.kernel(name)
        if made is None:
            return self._missing[name]
        return self._refusal(name, call) or refusal_of(made, call.head_dim, call.value_dim, call.dtype)

    def _refusal(self, name: str, call: TileCall) -> str | None:
        """Return what is wrong with it, or its refusal of such a call, or of several of its pass; else None."""
        failed = self._found.get((name, call.direction, call.operands))
        said = self._refused[name].get(call)
        return failed or said or self._gave_up(name, call.operands, (call.direction,))

    def _gave_up(self, name: str, operands: Operands, passes: Sequence[Pass]) -> str | None:
        """Return its last refusal if it refused so many kinds of calls that it will refuse all; else None."""
        for direction in passes:
            wanted = direction, operands
            said = [why for call, why in self._refused[name].items() if (call.direction, call.operands) == wanted]
            if len(said) >= MOST_REFUSED:
                return said[-1]
        return None

    def picks(
        self, direction: Pass, side: int, head_dim: int, dtype: torch.dtype, value_dim: int | None = None
    ) -> list[Pick]:
        """Return the kernels that compute such tiles, in their order, each with the reason for its place."""
        return self._picked(TileCall.of(direction, side, head_dim, dtype, value_dim))

    def _picked(self, call: TileCall) -> list[Pick]:
        direction = call.direction
        if call not in self._picks:
            able = [name for name in self.order if self.why_not_call(name, call) is None]
            found = {name: self._tables(name, *call.operands) for name in able}
            tables: Mapping[str, KernelTable] = {name: table for name, table in found.items() if table is not None}
            self._picks[call] = ranked(able, tables, direction, call.side, self._where)
            self._tell(call)
        return self._picks[call]

    def tried_picks(self, direction: Pass, side: int, *operands: Any) -> list[Pick]:
        """Try the first kernel until one passes, and return those that are left. operands: as of `picks`."""
        call = TileCall.of(direction, side, *operands)
        while (picks := self._picked(call)) and not self._passes(picks[0].name, call):
            pass
        return picks

    def faults(self) -> dict[str, str]:
        """Return what the trials found to be wrong, by kernel."""
        return {tried[0]: why for tried, why in self._found.items() if why}

    def kernels(self, head_dim: int, dtype: torch.dtype, value_dim: int | None = None) -> list[AttentionKernel]:
        """Return all kernels that compute such calls and can be measured in a minute."""
        able = [name for name in self.order if self.why_not(name, head_dim, dtype, value_dim) is None]
        return [self._made[name] for name in able if name not in SLOW]

    def holding(self, tiles: Tiles) -> Choosing:
        """Return these kernels, each holding the masks of the tiles that it will be taken for."""
        held = copy.copy(self)
        held._holding, held._untried = {}, set()
        by_name: dict[str, list[Patch]] = {}
        for patch in tiles.patches:
            dims = tiles.head_dim, tiles.dtype, tiles.value_dim
            name = held._taken(TileCall.of_tile(tiles.direction, patch, *dims), patch)
            if name is not None:
                by_name.setdefault(name, []).append(patch)
        for name, patches in by_name.items():
            kernel = self._made[name]
            if isinstance(kernel, MaskingKernel):
                held._holding[name] = kernel.holding(replace(tiles, patches=tuple(patches)))
        return held

    # ---------- AttentionKernel

    def supports(self, head_dim: int, dtype: torch.dtype) -> str | None:
        """Return None, or why none of the kernels can compute such calls; see AttentionKernel.supports."""
        return self.supports_widths(head_dim, head_dim, dtype)

    def supports_widths(self, head_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
        """Return None, or why none of the kernels can compute such calls; see UnequalWidths.supports_widths."""
        reasons = [self.why_not(name, head_dim, dtype, value_dim) for name in self.order]
        return None if None in reasons else "; ".join(map(str, reasons))

    def supports_patch(self, patch: Patch) -> str | None:
        """Return None: a kernel that computes a patch cuts it."""
        return None  # whoever computes it cuts it

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, patch: Patch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the tile by the first kernel that does not refuse; see AttentionKernel.forward."""
        return self._first(
            "forward", q, v, patch, lambda kernel: kernel.forward(q, k, v, patch=patch, scale=scale)
        )  # fmt: skip

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
        """Compute the gradients by the first kernel that does not refuse; see AttentionKernel.backward."""
        return self._first(
            "backward", q, v, patch,
            lambda kernel: kernel.backward(dout, q, k, v, lse, delta, out=out, patch=patch, scale=scale),
        )  # fmt: skip

    # ---------- trying

    def _first(
        self, direction: Pass, q: torch.Tensor, v: torch.Tensor, patch: Patch,
        compute: Callable[[AttentionKernel], Made],
    ) -> Made:  # fmt: skip
        """Return the result of the first kernel that does not refuse."""
        call = TileCall.of_tile(direction, patch, q.shape[-1], q.dtype, v.shape[-1])
        while (name := self._taken(call, patch)) is not None:
            try:
                return compute(self._holding.get(name, self._made[name]))
            except Exception as error:
                if not refuses(error):
                    raise
                self._drop(name, call, error)
        reasons = "; ".join(f"{name}: {self.why_not_call(name, call)}" for name in self.order)
        raise UnsupportedError(
            f"no kernel computes a tile of {patch.rows} × {patch.cols}, {call.widths}, "
            f"{named((call.dtype,))}, {direction} ({reasons}): see `tokenring doctor`, or use "
            f"ContextParallel(kernel='reference')"
        )

    def _taken(self, call: TileCall, patch: Patch) -> str | None:
        """Return the first kernel for a tile that passes its trial, and count on it for that tile; None: no kernel."""
        while picks := self._picked(call):
            name = _willing(picks, patch, self._made)
            if self._passes(name, call):
                _reserve(self._made[name], patch)
                return name
        return None

    def _passes(self, name: str, call: TileCall) -> bool:
        """Return True if a kernel may be taken for such calls; it is tried when that is first asked."""
        tried: Tried = (name, call.direction, call.operands)
        if self._trial is None or self._found.get(tried) == "" or tried in self._untried:
            return True
        try:
            why = self._trial(self._made[name], call.direction, *call.operands)
        except Exception as error:
            if not ran_out(error):
                raise
            self._untried.add(tried)
            text = f"takes {name} untried for tiles {call.direction}, {call}: {one_line(error, MOST_SAID)}"
            self._log(logging.WARNING, name, text)
            return True
        if why is not None:
            self._found[tried] = why
        if why:
            self._picks.clear()
            self._log(logging.WARNING, name, f"leaves out {name} for all tiles {call.direction}, {call}: {why}")
        return not why

    def _drop(self, name: str, call: TileCall, error: Exception) -> None:
        why = f"it refused a call {call.direction}: {one_line(error, MOST_SAID)}"
        self._refused[name][call] = why
        self._picks.clear()
        tiles = f"tiles of {call.side}"
        if self._gave_up(name, call.operands, (call.direction,)):
            tiles = f"all tiles {call.direction}"
        self._log(logging.WARNING, name, f"leaves out {name} for {tiles}, {call}: {why}")

    def _tell(self, call: TileCall) -> None:
        """Log, once for each kind of call, which kernels compute it and which do not, each with the reason."""
        for name in self.order:
            why_not = self.why_not_call(name, call)
            if why_not is not None and self._refusal(name, call) is None:
                self._log(logging.INFO, name, f"has no {name} for {call}: {why_not}")
        picks = self._picks[call]
        if picks:
            level = logging.WARNING if picks[0].name == "reference" else logging.INFO
            slow = ", which holds every score of a tile in memory" if picks[0].name == "reference" else ""
            self._log(level, picks[0].name, f"takes {picks[0].name} for {call}{slow}")

    def _log(self, level: int, name: str, text: str) -> None:
        if (name, text) not in self._said:
            self._said.add((name, text))
            LOG.log(level, "kernel 'auto' %s", text)


def _willing(picks: list[Pick], patch: Patch, made: Mapping[str, AttentionKernel]) -> str:
    """Return the kernel for this tile: of those that do not avoid it (or of all), the first with the fewest calls.

    Those that stand last in any order take every tile in one call, and are not for being quick: they are no rivals.
    """
    names = [pick.name for pick in picks]
    willing = [name for name in names if _avoids(made[name], patch) is None] or names
    if willing[0] in LAST:
        return willing[0]
    return min((name for name in willing if name not in LAST), key=lambda name: _calls_for(made[name], patch))


def _avoids(kernel: AttentionKernel, patch: Patch) -> str | None:
    asked: Callable[[Patch], str | None] | None = getattr(kernel, "avoids", None)
    return None if asked is None else asked(patch)


def _reserve(kernel: AttentionKernel, patch: Patch) -> None:
    asked: Callable[[Patch], None] | None = getattr(kernel, "reserve", None)
    if asked is not None:
        asked(patch)


def _calls_for(kernel: AttentionKernel, patch: Patch) -> int:
    asked: Callable[[Patch], int] | None = getattr(kernel, "calls_for", None)
    return 1 if asked is None else asked(patch)


def refuses(error: Exception) -> bool:
    """Return True if an error means that a kernel does not do such calls, not that one of them went wrong."""
    if isinstance(error, AssertionError):
        return not asserted_here(error)
    if isinstance(error, (BackendUnavailable, UnsupportedError, NotImplementedError, ImportError)):
        return True
    if isinstance(error, torch.OutOfMemoryError):
        return False
    if type(error).__module__.startswith(COMPILERS):
        return True
    text = str(error).lower()
    if "no kernel image" not in text and any(each in text for each in BROKEN):
        return False
    return isinstance(error, (RuntimeError, ValueError)) and any(each in text for each in REFUSALS)
