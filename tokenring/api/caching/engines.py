"""The exchange of cached attention alone, for engines that have a cache and kernels of their own.

Their ranks hold some heads of q (tensor parallelism) and some tokens of the cache (decode context parallelism): heads
of q are gathered, each rank attends from all of them to its tokens, and the partial results are combined.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, overload

import torch

from tokenring.api.arguments import refuse_wire
from tokenring.api.inputs import check_context
from tokenring.api.standing import outside_graphs
from tokenring.errors import ConfigurationError
from tokenring.runtime.agreement import Description, refusing
from tokenring.sequence.layout import as_integer

if TYPE_CHECKING:
    from tokenring.api.context import ContextParallel
    from tokenring.runtime.cached_exchange import PartialExchange, Rows

CombineHome = Literal["heads", "all"]
AGREED_SIZES = 1024  # that a context remembers


@overload
def combine(
    out: torch.Tensor, lse: torch.Tensor, cp: ContextParallel, q_home: CombineHome = "heads", *,
    return_lse: Literal[False] = False, is_lse_base_on_e: bool = True,
) -> torch.Tensor: ...  # fmt: skip


@overload
def combine(
    out: torch.Tensor, lse: torch.Tensor, cp: ContextParallel, q_home: CombineHome = "heads", *,
    return_lse: Literal[True], is_lse_base_on_e: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@outside_graphs
def combine(
    out: torch.Tensor,
    lse: torch.Tensor,
    cp: ContextParallel,
    q_home: CombineHome = "heads",
    *,
    return_lse: bool = False,
    is_lse_base_on_e: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Merge what each rank made of its part of a cache for the same rows; without gradients.

    out [B, H, D], lse [B, H] fp32: this rank's partial results of B tokens; a row that saw nothing has a lse that is no
    number or infinite, whatever kernels give for an empty shard, and any out. is_lse_base_on_e: whether lse is a
    natural logarithm; else one to the base 2, as FlashInfer gives.
    q_home "heads": rank r gets the r-th of equal parts of the heads, out [B, H/P, D]. "all": every rank gets all heads,
    the same bits everywhere.

    Returns out in its dtype, and with return_lse lse in fp32, of the base that was given. Ranks agree on the sizes at
    the first call of each. Raises ConfigurationError (sizes, heads that do not divide) and PeerLost.
    """
    check_context(cp)
    with Hearing(cp, out):
        refuse_wire(cp.wire, "combine")
        _check_partial(out, lse, cp, q_home)
    lse = lse if is_lse_base_on_e else lse * math.log(2.0)
    empty = ~lse.isfinite()
    out, lse = out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -torch.inf)
    with torch.no_grad(), cp.turn:
        made, total = _combined(out, lse, cp, q_home)
    total = total if is_lse_base_on_e else total / math.log(2.0)
    return (made.to(out.dtype), total) if return_lse else made.to(out.dtype)


@outside_graphs
def gather_queries(q: torch.Tensor, cp: ContextParallel) -> torch.Tensor:
    """Return all heads [B, H, D] from this rank's equal part of them, q [B, H/P, D]; rank r has the r-th.

    Ranks agree on the sizes at the first call of each. Raises ConfigurationError and PeerLost.
    """
    check_context(cp)
    with Hearing(cp, q):
        cp.check_open()
        refuse_wire(cp.wire, "gather_queries")
        if not isinstance(q, torch.Tensor) or q.dim() != 3:
            raise ConfigurationError(f"gather_queries expects a tensor q [B, H/P, D]; got {_shape(q)}")
    if cp.world_size == 1:
        return q
    from tokenring.runtime.cached_exchange import Rows

    with torch.no_grad(), cp.turn:
        rows = Rows(q.shape[0], q.shape[1], 1, q.shape[2], q.dtype)
        found = _exchange(cp, "gather_queries", "heads", rows, q.shape[2], q.device)
        return torch.cat(found.gathered(q[:, None], "heads of q"), dim=2)[:, 0]


def local_lengths(
    seq_lens: torch.Tensor, cp: ContextParallel, interleave: int = 1, rank: int | None = None
) -> torch.Tensor:
    """Return how many of each sequence's cached tokens lie at a rank, where `interleave` tokens go to each in turn.

    seq_lens: integers of any shape. rank: of cp; None: this one. Raises ConfigurationError.
    """
    check_context(cp)
    size = as_integer(interleave)
    if size is None or size < 1:
        raise ConfigurationError(f"interleave={interleave!r}: give the tokens that go to a rank in turn, from 1 on")
    at = cp.rank if rank is None else as_integer(rank)
    if at is None or not 0 <= at < cp.world_size:
        raise ConfigurationError(f"rank={rank!r}: the context has ranks 0 to {cp.world_size - 1}")
    if not isinstance(seq_lens, torch.Tensor) or seq_lens.is_floating_point():
        raise ConfigurationError(f"local_lengths expects a tensor of integers; got {_shape(seq_lens)}")
    whole = seq_lens.div(size * cp.world_size, rounding_mode="floor")
    rest = seq_lens - whole * size * cp.world_size
    return whole * size + (rest - at * size).clamp(0, size)


def _combined(
    out: torch.Tensor, lse: torch.Tensor, cp: ContextParallel, home: CombineHome
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse, in fp32."""
    from tokenring.runtime.cached_exchange import Rows

    (batch, heads, width), world = out.shape, cp.world_size
    if world == 1:
        return out.float(), lse
    part = heads // world if home == "heads" else heads
    found = _exchange(cp, "combine", home, Rows(batch, part, 1, width, out.dtype), width, out.device)
    made, total = found.combined(out[:, :, None], lse[:, :, None], "partial results")
    return made[:, :, 0], total[:, :, 0]


def _exchange(
    cp: ContextParallel, function: str, home: str, rows: Rows, q_width: int, device: torch.device
) -> PartialExchange:
    """Return the exchange of calls of one size; the first call of it is one on which ranks agree.

    The context remembers on which, as what is bound to memory may differ by rank.
    """
    from tokenring.ir.cached_exchange import DIRECT_Q, ONE_SHOT
    from tokenring.runtime.cached_exchange import exchange_of

    size = function, device.type, home, rows, q_width
    if size not in cp.agreed_sizes:
        said = {"pass": "combine", "function": function, "q_home": home, "device": device.type}
        fields = {**said, **rows._asdict(), "width of q": q_width}
        from tokenring.api.caching.agreeing import agree_together  # whoever calls attention alone need not load it

        agree_together(cp, device, Description.of(fields))
        while len(cp.agreed_sizes) >= AGREED_SIZES:  # on all ranks alike
            cp.agreed_sizes.pop(next(iter(cp.agreed_sizes)))
        cp.agreed_sizes[size] = None
    transport = cp.transport_for(device)
    assert transport is not None  # there are several ranks
    if home == "all":
        return exchange_of(transport, cp.pool(device), ONE_SHOT, rows, q_width)
    return exchange_of(transport, cp.pool(device), DIRECT_Q, rows, q_width, halves=True)


# ---------- checks


class Hearing(refusing):
    """A guard around this rank's checks of a call on which ranks agree only the first time that they make it."""

    __slots__ = ("_context",)

    def __init__(self, cp: ContextParallel, *given: object) -> None:
        """Guard a call with these tensors."""
        super().__init__(cp, "forward", *given)
        self._context = cp

    def speak(self, reason: str, taken: object = None) -> None:
        """Refuse the context's first call together; later the others may wait for results: give them up."""
        if not self._context.agreed_sizes:
            super().speak(reason)
        elif (transport := self.speaker()) is not None:
            transport.fail(ConfigurationError(reason))


def _check_partial(out: torch.Tensor, lse: torch.Tensor, cp: ContextParallel, home: str) -> None:
    cp.check_open()
    if not isinstance(out, torch.Tensor) or not isinstance(lse, torch.Tensor):
        raise ConfigurationError(f"combine expects tensors out and lse; got {_shape(out)} and {_shape(lse)}")
    if out.dim() != 3 or lse.shape != out.shape[:2] or lse.dtype != torch.float32 or lse.device != out.device:
        raise ConfigurationError(
            f"combine expects out [B, H, D] and lse [B, H], float32, on one device; got {_shape(out)} and {_shape(lse)}"
        )
    if home not in ("heads", "all"):
        raise ConfigurationError(f"q_home={home!r}: write 'heads' for this rank's part of the heads, or 'all'")
    if home == "heads" and out.shape[1] % cp.world_size:
        raise ConfigurationError(
            f"{out.shape[1]} heads do not divide over {cp.world_size} ranks: combine them with q_home='all'"
        )


def _shape(given: object) -> str:
    if not isinstance(given, torch.Tensor):
        return f"a {type(given).__name__}"
    return f"{list(given.shape)} in {given.dtype} on {given.device}"
