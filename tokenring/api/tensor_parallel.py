"""TensorParallel: the group over which linear layers are split, and the schedules by which they are computed."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import torch

from tokenring.api.context import TIMEOUT_SECONDS, ContextParallel
from tokenring.api.standing import Standing
from tokenring.errors import ConfigurationError
from tokenring.ir.schedule_data import Pass
from tokenring.runtime.agreement import Description, agree, beginning, refusing
from tokenring.runtime.call import ActiveCall
from tokenring.schedule.names import make_schedule
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import Full
from tokenring.sequence.workload import Workload
from tokenring.weak_method import weakly

if TYPE_CHECKING:
    from tokenring.backends.interfaces import AttentionKernel, Transport
    from tokenring.launch.groups import Group
    from tokenring.lowering.pair_box import PairBox
    from tokenring.planner.interconnects.interconnect import Interconnect
    from tokenring.runtime.executor import Executor

Stays = Literal["weights", "tokens", "either"]
STAYS = ("weights", "tokens", "either")
CACHED = 64  # bound programs
DTYPES = (torch.float32, torch.bfloat16)


class LinearRequest(NamedTuple):
    """One linear layer, or collective, over a group: tokens and features of all ranks together."""

    operator: str
    tokens: int
    features: int
    width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def workload(self) -> Workload:
        """The sizes as schedules know them: rows are q, columns are kv, with one head of the width."""
        return Workload(1, self.tokens, self.features, 1, 1, self.width, self.dtype)


class _NoKernel:
    """The attention kernel of programs that have no attention."""

    @staticmethod
    def supports_patch(patch: object) -> str | None:
        return None


class TensorParallel(Standing):
    """Linear layers split over the ranks of a group, as Megatron's with sequence parallelism.

        tp = tr.TensorParallel()                        # all ranks, or group=mesh["tp"]: tp.rank of tp.world_size
        w_in = tp.shard(whole_w_in)                     # this rank's part of a weight
        h = tr.column_linear(x, w_in, tp)               # x [B, T/P, D], w_in [N/P, D] → [B, T, N/P]
        y = tr.row_linear(act(h), w_out, tp)            # w_out [D, N/P] → [B, T/P, D]

    group, transport, timeout_seconds: as of ContextParallel.
    schedule: "auto", or a name (docs/layer.md): "direct-q", "tokenring" (weights stay), "direct-kv", "ring" (tokens
        stay), "tiles/2x2".
    stays: for "auto": "weights", "tokens", or "either", by what moves fewer bytes and hides better. It decides the
        shape of what lies between a column and a row layer: [B, T, N/P] or [B, T/P, N].
    topology: an Interconnect, by which "auto" chooses; None: every pair of ranks has a link of its own.

    Raises ConfigurationError and BackendUnavailable. `close`, or a `with`, gives back what it holds.
    """

    _internal = frozenset(("box", "call", "pieces_of", "refusing", "schedule_of", "turn"))

    def __init__(
        self,
        group: Group = None,
        schedule: str = "auto",
        transport: str | Transport = "auto",
        *,
        stays: Stays = "weights",
        topology: Interconnect | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        if stays not in STAYS:
            raise ConfigurationError(f"stays={stays!r}: use one of {', '.join(STAYS)}")
        if not isinstance(schedule, str):
            raise ConfigurationError(f"schedule={schedule!r}: give a name, as 'direct-q', or 'auto'")
        self._base = ContextParallel(group, "contiguous", "ring", transport, timeout_seconds=timeout_seconds)
        self.rank, self.world_size, self.turn = self._base.rank, self._base.world_size, self._base.turn
        self.schedule, self.stays, self.topology = schedule, stays, topology
        if schedule != "auto":
            from tokenring.schedule.families.registry import parse

            parse(schedule).make(self.world_size)
        self._schedules = lru_cache(maxsize=CACHED)(weakly(self._make_schedule))
        self._executors = lru_cache(maxsize=CACHED)(weakly(self._make_executor))

    def __repr__(self) -> str:
        state = ", closed" if self._base.closed else ""
        return f"TensorParallel(schedule {self.schedule}, rank {self.rank} of {self.world_size}{state})"

    def close(self) -> None:
        """Give back buffers and the transport, if it was made here; calls then raise ConfigurationError."""
        self._executors.cache_clear()
        self._base.close()

    def shard(self, weight: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return this rank's part of a tensor, cut along dim. Raises ConfigurationError unless the ranks divide it."""
        size = weight.shape[dim]
        if size % self.world_size:
            raise ConfigurationError(
                f"{size} features do not divide by {self.world_size} ranks: pad dimension {dim} of the weight to "
                f"{-(-size // self.world_size) * self.world_size}, or take another number of ranks"
            )
        return weight.narrow(dim, self.rank * (size // self.world_size), size // self.world_size).contiguous()

    def plan(self, operator: str, tokens: int, features: int, width: int, dtype: torch.dtype) -> Schedule:
        """Return the schedule of a layer: tokens and features of all ranks together. Raises ConfigurationError."""
        return self.schedule_of(LinearRequest(operator, tokens, features, width, dtype, torch.device("cpu")))

    # ---------- for the package

    def schedule_of(self, request: LinearRequest) -> Schedule:
        """Return the schedule of a request."""
        return self._schedules(request._replace(device=torch.device("cpu")))

    def pieces_of(self, nbytes: int) -> int:
        """Return in how many pieces a collective of so many bytes moves each rank's rows."""
        from tokenring.schedule.families.registry import parse

        name = self.schedule
        if name == "auto":
            from tokenring.planner.choosing.linear import collective

            name = collective(nbytes, self.world_size, self.topology)
        return parse(name).make(self.world_size).q_pieces

    def box(self, request: LinearRequest) -> PairBox:
        """Return the rows and columns that this rank computes."""
        from tokenring.lowering.pair_box import pair_box  # whoever calls attention alone need not load it

        return pair_box(self.schedule_of(request), self.rank)

    def call(
        self, request: LinearRequest, direction: Pass, own: dict[str, torch.Tensor], agreed: bool = False
    ) -> tuple[Executor, ActiveCall]:
        """Agree on a pass with all ranks, and run it. Raises Disagreement on all ranks; PeerLost.

        agreed: they have, with the pass before, whose call this one belongs to.
        """
        with self.turn:
            executor = self._begin(request, direction, agreed)
            active = ActiveCall(own)
            with torch.autocast(request.device.type, enabled=False):
                executor.run(active)
        return executor, active

    def refusing(self, direction: Pass, *given: object) -> refusing:
        """Return the guard of this rank's own checks, whose errors reach all ranks."""
        return refusing(self._base, direction, *given)

    def _begin(self, request: LinearRequest, direction: Pass, agreed: bool) -> Executor:
        if agreed:
            return self._bound(request, direction, self._transport(request))
        with self.refusing(direction, request.device):
            self._base.check_open()
            mine = self._describe(request, direction)
        speaker = self._base.speaker(request.device)
        if speaker is not None:
            agree(speaker, mine)
        transport = self._transport(request)
        with beginning(transport):
            return self._bound(request, direction, transport)

    def _transport(self, request: LinearRequest) -> Transport | None:
        return None if self.world_size == 1 else self._base.transport_for(request.device)

    def _describe(self, request: LinearRequest, direction: Pass) -> Description:
        fields = {"pass": direction, **request._asdict(), "device": request.device.type}
        return Description.of({**fields, "schedule": self.schedule_of(request).name, "stays": self.stays})

    def _bound(self, request: LinearRequest, direction: Pass, transport: Transport | None) -> Executor:
        pool = self._base.pool(request.device)
        before = pool.data
        made = self._executors(request, direction, transport)
        if before is not pool.data or made.views.base is not pool.data:  # it has grown: programs hold the old memory
            self._executors.cache_clear()
            made = self._executors(request, direction, transport)
        return made

    def _make_executor(self, request: LinearRequest, direction: Pass, transport: Transport | None) -> Executor:
        from tokenring.lowering.lower import lower
        from tokenring.lowering.target import IDEAL
        from tokenring.runtime.executor import Executor
        from tokenring.runtime.message_groups import connect

        schedule = self.schedule_of(request)
        target = IDEAL if transport is None else transport.target
        if transport is not None:
            connect(transport, schedule, direction, request.device)
        program = lower(schedule, self.rank, direction, request.workload, target)
        kernel = cast("AttentionKernel", _NoKernel())
        pool = self._base.pool(request.device)
        with torch.inference_mode(False):
            return Executor(schedule, request.workload, program, pool, transport, kernel, 1.0)

    @staticmethod
    def _check_rows_move(name: str) -> None:
        from tokenring.schedule.families.registry import parse

        if parse(name).family.moves != "Q":
            raise ConfigurationError(
                f"schedule {name!r} moves columns, and a collective's rows have to move: take one where weights stay, "
                f"as 'direct-q' or 'tokenring'"
            )

    def _make_schedule(self, request: LinearRequest) -> Schedule:
        from tokenring.ir.operators import OPERATORS
        from tokenring.proof.paired import check_paired

        name = self.schedule
        if name == "auto":
            from tokenring.planner.choosing.linear import choose

            name = choose(request.operator, request.workload, self.world_size, self.stays, self.topology)
        elif request.features == self.world_size and request.operator == "reduce":
            self._check_rows_move(name)
        rows, columns = (
            make_layout("contiguous", self.world_size, size) for size in (request.tokens, request.features)
        )
        made = make_schedule(name, rows, columns, Full()).replace(operator=OPERATORS[request.operator])
        check_paired(made)
        return made
