"""Sharding: from whole sequences to the parts that ranks hold, and back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tokenring.api.context import ContextParallel
from tokenring.api.inputs import check_tensor, unsharded
from tokenring.errors import MOST_SAID, ConfigurationError, UnsupportedError, one_line
from tokenring.runtime.agreement import REFUSED, Disagreement, named_digest, refusals, refusing
from tokenring.sequence.layout import AUTO, Layout, as_integer, split_order
from tokenring.sequence.mask_data import Mask
from tokenring.sequence.mask_words import MaskLike, mask_of
from tokenring.sequence.workload import Workload

CACHED_INDICES = 64  # each for one layout, rank and device: 8 bytes for each position


def choose_layout(
    cp: ContextParallel, size: Workload, mask: MaskLike = None, device: torch.device | str = "cpu",
    *, training: bool | None = None,
) -> Layout:  # fmt: skip
    """Return the layout in which the fastest schedule of a call is fastest.

    It is zigzag, contiguous, that of "auto", or the latter with evener work and more rows to move, for fast links.

    size: of the call over all ranks, q and kv equally long. mask: that of the attention. device: of the tensors.
    training: whether a backward pass follows; None: if gradients are enabled. All ranks call it together; give what it
    returns as `layout` to shard, positions, attention and unshard. Each layout is planned by simulation, on rank 0, and
    the plan of the chosen one is that of the call. Packs of one shape are planned once: for a later one nothing is
    exchanged. With a named schedule there is nothing to choose by, and it returns the layout of "auto".

    Raises ConfigurationError, on all ranks, where no schedule fits or the ranks ask for different calls.
    """
    from tokenring.api.layout_choice import chosen_layout

    return chosen_layout(cp, size, mask, device, training)


def shard(
    x: torch.Tensor, cp: ContextParallel, dim: int = 1, *, mask: MaskLike = None, layout: Layout | None = None
) -> torch.Tensor:
    """Return this rank's part of a whole tensor that every rank holds, along the sequence dimension `dim`.

    Where the length does not divide, parts differ by rank, and some may have no token; `attention` knows from here on
    of which length they are. Differentiable: the gradient of the whole tensor is zero where other ranks hold the
    positions. mask: that of the attention over the sequence, by which layout "auto" cuts it. layout: another than that
    of cp. Raises ConfigurationError for an empty sequence, or where cp's layout is for another length.
    """
    dim = _sequence_dim("shard", x, cp, dim)
    layout = _cut(cp, x.shape[dim], mask, layout)
    return x.index_select(dim, _once(_held, layout, cp.rank, x.device))


def positions(
    cp: ContextParallel, seq_len: int, device: torch.device | str | None = None, *, mask: MaskLike = None,
    layout: Layout | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the global position of each local token: int64 [T], with this rank's T; what rotary embeddings need."""
    _check_context("positions", cp)
    layout = _cut(cp, seq_len, mask, layout)
    try:
        return _held(layout, cp.rank, device)  # a new one, which the caller may change
    except (RuntimeError, TypeError, AssertionError) as error:  # AssertionError: torch without CUDA
        why = one_line(error, MOST_SAID)
        raise ConfigurationError(f"positions: no tensor can be made on device {device!r}: {why}") from None


def unshard(
    x: torch.Tensor, cp: ContextParallel, dim: int = 1, *, mask: MaskLike = None, layout: Layout | None = None
) -> torch.Tensor:
    """Return the whole tensor on every rank, in sequence order, from each rank's part.

    Differentiable: a rank's gradient is the sum over all ranks of what their copies of the whole got
    (so a loss that every rank computes in full counts once for each rank).
    """
    _check_context("unshard", cp)
    with _refusing_parts(cp):
        dim = _sequence_dim("unshard", x, cp, dim)
        if cp.world_size > 1:
            check_tensor("unshard", x)
        mask = mask_of(mask)
        if layout is not None:
            layout = cp.cuts.checked(layout)
        elif cp.layout == AUTO:
            cp.cuts.check_mask(mask)
    gathered: torch.Tensor = _Gather.apply(x, cp, dim, layout, _cut_text(cp, mask, layout))  # type: ignore[no-untyped-call]
    found = cp.layout_for(gathered.shape[dim], mask) if layout is None else layout
    return gathered.index_select(dim, _once(_places, found, x.device))


def _cut(cp: ContextParallel, length: int, mask: MaskLike, layout: Layout | None) -> Layout:
    """Return the layout by which a sequence is cut, and note it; not while a graph is traced."""
    if torch.compiler.is_compiling():
        return cp.layout_for(length, mask) if layout is None else layout
    if layout is not None:
        return cp.cuts.checked(layout, length)
    found = cp.cuts.give_out(length, mask_of(mask)) if cp.layout == AUTO else cp.layout_for(length)
    cp.lengths.note(length)
    return found


def _cut_text(cp: ContextParallel, mask: Mask | None, layout: Layout | None) -> str:
    """Return the layout by which parts are put together, as ranks compare it; nothing where it is that of cp."""
    if layout is not None:
        return f" in {named_digest(layout)}"
    if cp.layout != AUTO:
        return ""
    return f" by mask {hashlib.sha256(str(mask).encode()).hexdigest()[:16]} for ports of {cp.cuts.port_links} links"


# ---------- indices


def _held(layout: Layout, rank: int, device: torch.device | str | None) -> torch.Tensor:
    """Return the global position of each of the rank's tokens: int64 [T]."""
    return torch.tensor(layout.positions(rank), dtype=torch.int64, device=device)


def _places(layout: Layout, device: torch.device) -> torch.Tensor:
    """Return the place of each position when all ranks' parts are laid end to end: int64 [length]."""
    return torch.argsort(torch.tensor(split_order(layout), dtype=torch.int64, device=device))


def _once(make: Callable[..., torch.Tensor], *args: Hashable) -> torch.Tensor:
    """Return the tensor that `make` gives, made once for all calls; it must not be changed.

    On the host, making it takes a list of all positions. It is made anew while torch.compile or another mode traces:
    what is made then would be no tensor to keep.
    """
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return make(*args)
    return _kept(make, *args)


@lru_cache(maxsize=CACHED_INDICES)
def _kept(make: Callable[..., torch.Tensor], *args: Hashable) -> torch.Tensor:
    with torch.inference_mode(False):  # later calls may want gradients, and save it for them
        return make(*args)


# ---------- checks


def _sequence_dim(what: str, x: torch.Tensor, cp: ContextParallel, dim: int) -> int:
    """Return `dim` counted from 0; checks that x has such a dimension, and that x and cp are of the right types."""
    _check_context(what, cp)
    if not isinstance(x, torch.Tensor):
        raise ConfigurationError(f"{what} expects a tensor; got one of type {type(x).__name__}")
    if (found := unsharded(x)) is not None:
        raise UnsupportedError(f"{what} of {found}")
    index = as_integer(dim)
    if index is None or not -x.dim() <= index < x.dim():
        raise ConfigurationError(
            f"{what} along dim={dim!r} of a tensor {list(x.shape)}: give the index of its sequence dimension"
        )
    return index % x.dim()


def _check_context(what: str, cp: ContextParallel) -> None:
    if not isinstance(cp, ContextParallel):
        raise ConfigurationError(f"{what} expects a ContextParallel as cp; got one of type {type(cp).__name__}")


class _Gather(torch.autograd.Function):
    """All-gather along `dim` by rank; its gradient is summed over ranks and cut.

    Parts that differ in length are filled up to the longest: collective calls take equal ones.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cp: ContextParallel, dim: int, layout: Layout | None, cut: str
    ) -> torch.Tensor:
        ctx.cp, ctx.dim, ctx.layout, ctx.cut = cp, dim, layout, cut
        if cp.world_size == 1:
            return x.clone()
        with cp.turn:
            with _refusing_parts(cp):
                own = x.contiguous().resolve_conj().resolve_neg()
            lengths = _checked_lengths(x, cp, dim, layout, cut)
            most = max(lengths)
            if own.shape[dim] < most:
                filling = own.new_zeros([most - n if at == dim else n for at, n in enumerate(own.shape)])
                own = torch.cat([own, filling], dim)
            gathered = [torch.empty_like(own) for _ in range(cp.world_size)]
            finish(dist.all_gather(gathered, own, group=cp.group, async_op=True), cp, "unshard", x.device)
        return torch.cat([part.narrow(dim, 0, length) for part, length in zip(gathered, lengths, strict=True)], dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return _Sum.apply(grads[0], ctx.cp, ctx.dim, ctx.layout, ctx.cut), None, None, None, None  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    """The gradient of _Gather, whose gradient _Gather is: so derivatives of any order are right."""

    @staticmethod
    def forward(
        ctx: Any, whole: torch.Tensor, cp: ContextParallel, dim: int, layout: Layout | None, cut: str
    ) -> torch.Tensor:
        ctx.cp, ctx.dim, ctx.layout, ctx.cut = cp, dim, layout, cut
        whole = whole.contiguous().clone()
        if cp.world_size > 1:
            add_up(whole, cp, "the gradient of unshard")
        lengths = cp.lengths.parts(whole.shape[dim]) if layout is None else layout.local_lengths
        return whole.narrow(dim, sum(lengths[: cp.rank]), lengths[cp.rank])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return _Gather.apply(grads[0], ctx.cp, ctx.dim, ctx.layout, ctx.cut), None, None, None, None  # type: ignore[no-untyped-call]


def add_up(x: torch.Tensor, cp: ContextParallel, what: str) -> None:
    """Add a tensor up over the ranks of cp, of which there are several, in place. Raises PeerLost, which says what."""
    with cp.turn:
        finish(dist.all_reduce(x, group=cp.group, async_op=True), cp, what, x.device)


def finish(work: Any, cp: ContextParallel, what: str, device: torch.device) -> None:
    """Wait for a collective call of the user's group: on a CPU within our own time limit.

    On accelerators a wait with a limit holds up the host until the device is done. There the stream waits, and the
    group's own watch ends what does not come to an end.
    """
    try:
        if device.type == "cpu":
            work.wait(timedelta(seconds=cp.timeout_seconds))
        else:
            work.wait()
    except RuntimeError as error:
        transport = cp.made_transport(device) or cp.transport  # to make one, all ranks would have to come
        assert transport is not None  # there are several ranks
        peer = (cp.rank + 1) % cp.world_size
        raise transport.lost(peer, f"took part in {what}", one_line(error, MOST_SAID)) from None
    finally:
        del work  # an error that somebody keeps holds this frame, and must not hold what the group's threads work on


class _refusing_parts(refusing):
    """A guard around a rank's checks of its part for unshard: all ranks get its errors where they compare parts."""

    def __init__(self, cp: ContextParallel) -> None:
        super().__init__(cp, "forward")
        self._context = cp

    def speak(self, reason: str, taken: object = None) -> None:
        _told(self._context, f"{REFUSED}: {reason}")


def _checked_lengths(
    x: torch.Tensor, cp: ContextParallel, dim: int, layout: Layout | None, cut: str
) -> list[int]:
    """Return the length of each rank's part. layout: of the parts; None: that of cp. cut: as all ranks must say it.

    Raises ConfigurationError, on all ranks, if parts do not go together.
    """
    sizes = [str(size) for size in x.shape]
    mine = f"{str(x.dtype).removeprefix('torch.')} [{', '.join(sizes)}] along {dim}{cut}"
    parts = _told(cp, mine)
    if any(part.startswith(REFUSED) for part in parts):
        raise Disagreement(refusals([part.partition(": ")[2] if part.startswith(REFUSED) else None for part in parts]))
    if all(part == mine for part in parts) and x.shape[dim]:
        lengths = [x.shape[dim]] * cp.world_size
    else:
        of_others = [_length_where_alike(part, mine, dim) for part in parts]
        lengths = [length for length in of_others if length is not None]
    if len(lengths) < len(parts) or not sum(lengths):
        found = ", ".join(f"rank {rank}: {part}" for rank, part in enumerate(parts))
        raise ConfigurationError(f"unshard expects parts of one shape, dtype and dim from every rank; found {found}")
    if tuple(lengths) != (wanted := cp.lengths.parts(sum(lengths)) if layout is None else layout.local_lengths):
        raise ConfigurationError(
            f"unshard expects parts as shard makes them: of {sum(lengths)} positions the ranks hold "
            f"{_listed(wanted)}; found {_listed(lengths)}"
        )
    return lengths


def _length_where_alike(part: str, mine: str, dim: int) -> int | None:
    """Return the length along `dim` of a rank's part; None unless all else is as in this rank's."""
    (start, sizes, end), (own_start, own_sizes, own_end) = (_parsed(text) for text in (part, mine))
    if (start, end, len(sizes)) != (own_start, own_end, len(own_sizes)):
        return None
    others = (a == b for at, (a, b) in enumerate(zip(sizes, own_sizes, strict=True)) if at != dim)
    return int(sizes[dim]) if all(others) else None


def _parsed(part: str) -> tuple[str, list[str], str]:
    start, _, rest = part.partition("[")
    sizes, _, end = rest.partition("]")
    return start, sizes.split(", "), end


def _listed(lengths: Sequence[int]) -> str:
    return ", ".join(map(str, lengths))


def _told(cp: ContextParallel, mine: str) -> list[str]:
    assert cp.transport is not None  # there are several ranks
    return [each.decode() for each in cp.transport.exchange_text(mine.encode(), "parts for unshard")]
