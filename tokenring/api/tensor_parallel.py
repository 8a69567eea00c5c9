"""TensorParallel: the group over which linear layers are split, and the schedules by which they are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import torch

from tokenring.api.arguments import check_linear
from tokenring.api.context import TIMEOUT_SECONDS, ContextParallel
from tokenring.api.standing import Standing
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.ir.schedule_data import FULL, Pass
from tokenring.runtime.agreement import Description, agree, beginning, refusing
from tokenring.runtime.call import ActiveCall, BoundPass, run
from tokenring.schedule.names import make_schedule
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import as_integer, make_layout
from tokenring.sequence.mask import Full
from tokenring.sequence.workload import LinearRequest, Workload
from tokenring.weak_method import weakly

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tokenring.backends.fused.mc2 import Mc2
    from tokenring.backends.interfaces import AttentionKernel, Transport
    from tokenring.launch.groups import Group, HeldGroup
    from tokenring.lowering.pair_box import PairBox
    from tokenring.planner.interconnects.interconnect import Interconnect
    from tokenring.runtime.executor import Executor

Stays = Literal["weights", "tokens", "either"]
CACHED = 64  # bound programs
DTYPES = (torch.float32, torch.bfloat16)
COLLECTIVES = ("reduce", "gather")
PLANNED = ("column", "row", *COLLECTIVES)
CPU = torch.device("cpu")
WIDE = (("kv_partial", FULL), ("q_partial", FULL))
Given: TypeAlias = Mapping[str, object]


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
    stays: for "auto": "weights", "tokens", or "either". It decides the shape of what lies between a column and a row
        layer: [B, T, N/P] or [B, T/P, N]. "either": what is faster for the column layer; a row layer takes the shape.
    topology: an Interconnect, by which "auto" chooses; None: every pair of ranks has a link of its own.
    partials: torch.float32 sends parts of sums in fp32, where tensors are bf16: twice their bytes, for an error as of
        one device. None: in the tensors' dtype.
    wire: a format in which inputs that other ranks ask for, and parts of y and dx, are encoded once where they travel:
        "mxfp8", "mxint8", "mxfp4" and others (docs/layer.md), for fewer bytes and an error that `plan` tells. Their
        blocks of 32 must divide the width of a layer. None: in the tensors' dtype. Collectives take it as well.
    kernel: "auto", schedules of ours; "mc2": Ascend's fused operators do whole layers, or refuse them (docs/layer.md).

    Raises ConfigurationError and BackendUnavailable. `close`, or a `with`, gives back what it holds.
    """

    _internal = frozenset((
        "begin", "box", "call", "check_kernel", "collective", "group", "pairs", "refusing", "request", "schedule_of",
        "turn",
    ))  # fmt: skip

    def __init__(
        self,
        group: Group | HeldGroup = None,
        schedule: str = "auto",
        transport: str | Transport = "auto",
        *,
        stays: Stays = "weights",
        topology: Interconnect | None = None,
        partials: torch.dtype | None = None,
        wire: str | None = None,
        kernel: str = "auto",
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        check_linear(schedule, topology, stays=stays, partials=partials, wire=wire, kernel=kernel)
        self._closed = False
        self._base = ContextParallel(group, "contiguous", "ring", transport, timeout_seconds=timeout_seconds)
        self.rank, self.world_size, self.turn = self._base.rank, self._base.world_size, self._base.turn
        self.schedule, self.stays, self.topology, self.partials = schedule, stays, topology, partials
        self.wire, self.kernel = wire, kernel
        self._whole = None if kernel == "auto" else self._whole_layers()
        if schedule != "auto":
            from tokenring.schedule.families.registry import parse

            parse(schedule).make(self.world_size)
        self._names = lru_cache(maxsize=CACHED)(weakly(self._choose))
        self._cuts = lru_cache(maxsize=CACHED)(weakly(self._cut))
        self._boxes = lru_cache(maxsize=CACHED)(weakly(self._make_box))
        self._schedules = lru_cache(maxsize=CACHED)(weakly(self._make_schedule))
        self._executors = lru_cache(maxsize=CACHED)(weakly(self._make_executor))

    def __repr__(self) -> str:
        state = ", closed" if self._base.closed else ""
        by = f"schedule {self.schedule}" if self._whole is None else f"kernel {self.kernel}"
        return f"TensorParallel({by}, rank {self.rank} of {self.world_size}{state})"

    @property
    def group(self) -> ProcessGroup | None:
        """The group; None for one rank alone. Raises ConfigurationError once it is destroyed."""
        return self._base.group

    def close(self) -> None:
        """Give back buffers and the transport, if it was made here; calls then raise ConfigurationError."""
        self._closed = True
        self._executors.cache_clear()
        if self._whole is not None:
            self._whole.close()
        self._base.close()

    def shard(self, weight: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return this rank's part of a tensor, cut along dim, in memory of its own.

        Raises ConfigurationError unless the ranks divide it.
        """
        if not -weight.dim() <= dim < weight.dim():
            raise ConfigurationError(f"shard was given dim={dim} of {list(weight.shape)}: it has no such dimension")
        size = weight.shape[dim]
        if size % self.world_size:
            raise ConfigurationError(
                f"{size} features do not divide by {self.world_size} ranks: pad dimension {dim} of the weight to "
                f"{-(-size // self.world_size) * self.world_size}, or take another number of ranks"
            )
        part = weight.narrow(dim, self.rank * (size // self.world_size), size // self.world_size)
        return part.clone(memory_format=torch.contiguous_format)

    def plan(self, operator: str, tokens: int, features: int, width: int, dtype: torch.dtype) -> Schedule:
        """Return the schedule of a layer: tokens and features of all ranks together.

        operator: "column", "row", or "reduce" and "gather", whose features are the ranks. Of stays="either" this is
        the faster one; a row layer in a model takes what stays from the layer before it.
        Raises ConfigurationError, and UnsupportedError for dtypes but fp32 and bf16.
        """
        self._check_planned(operator, tokens, features, width, dtype)
        stays = "weights" if operator in COLLECTIVES else self.stays
        name = self._names(operator, tokens, features, width, dtype, stays)
        return self.schedule_of(LinearRequest(operator, name, tokens, features, width, dtype, CPU))

    # ---------- for the package

    def request(
        self, operator: str, sizes: tuple[int, int, int], like: torch.Tensor, stays: Stays | None = None
    ) -> LinearRequest:
        """Return the request of a layer of these tokens, features and width. stays: None: what `self.stays` says."""
        self._check_wire(sizes[2], like.dtype, like.device)
        name = self._names(operator, *sizes, like.dtype, stays or self.stays)
        return LinearRequest(operator, name, *sizes, like.dtype, like.device)

    def collective(self, elements: int, like: torch.Tensor) -> LinearRequest:
        """Return the request of a collective of so many elements, at least: in rows, as its schedule's pieces want.

        Rows are whole blocks of the wire's format: what is behind the last element is padding.
        """
        name, rows = self._cuts(elements, like.dtype)
        width = -(-elements // rows)
        if self.wire is not None:
            from tokenring.ir.wire_formats import padded

            width = padded(self.wire, width)
            self._check_wire(width, like.dtype, like.device)
        return LinearRequest("reduce", name, rows, self.world_size, width, like.dtype, like.device)

    def schedule_of(self, request: LinearRequest) -> Schedule:
        """Return the schedule of a request. Raises ConfigurationError and ScheduleError for one that does not fit."""
        return self._schedules(request._replace(device=CPU))

    def box(self, request: LinearRequest) -> PairBox:
        """Return the rows and columns that this rank computes."""
        return self._boxes(request._replace(device=CPU))

    def call(
        self, request: LinearRequest, direction: Pass, given: Given, own: dict[str, torch.Tensor]
    ) -> tuple[BoundPass, ActiveCall]:
        """Agree on a pass with all ranks, and run it. Raises Disagreement on all ranks; PeerLost.

        What it made lies in the pool until the next call: hold `turn` until it is taken.
        """
        (executor,) = self.begin(request, given, direction)
        return executor, run(executor, own)

    def pairs(self, request: LinearRequest, like: torch.Tensor) -> torch.Tensor:
        """Return memory for what this rank computes of a tensor of pairs; none where a kernel makes its own."""
        return like.new_empty(self.box(request).shape if self._kernel_of(request.operator) is None else 0)

    def check_kernel(self, request: LinearRequest, direction: Pass) -> None:
        """Raise UnsupportedError where a kernel was asked for that does not take this pass on this rank."""
        if (kernel := self._kernel_of(request.operator)) is not None:
            kernel.check(request, direction)

    def _kernel_of(self, operator: object) -> Mc2 | None:
        """Return the kernel by name that does this operator, or refuses it; None: a schedule does, as collectives."""
        return None if operator in COLLECTIVES else self._whole

    def begin(self, request: LinearRequest, given: Given, *passes: Pass) -> Sequence[BoundPass]:
        """Agree on a call of these passes with all ranks, and bind them. Raises Disagreement on all ranks; PeerLost.

        given: what the ranks have to give alike, by name: the function that is called, shapes.
        """
        with self.refusing(passes[0], request.device):
            self._check_open()
            for each in passes:
                self.check_kernel(request, each)
            mine = self._describe(request, given, passes[0])
        speaker = self._base.speaker(request.device)
        if speaker is not None:
            agree(speaker, mine)
        transport = None if self.world_size == 1 else self._base.transport_for(request.device)
        with beginning(transport):
            if (kernel := self._kernel_of(request.operator)) is not None:
                return [kernel.bound(request, each, transport) for each in passes]
            return self._bound(request, passes, transport)

    def refusing(self, direction: Pass, *given: object) -> refusing:
        """Return the guard of this rank's own checks, whose errors reach all ranks."""
        return refusing(self._base, direction, *given)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigurationError(
                "this TensorParallel was closed; make another one, or close it after the last call"
            )
        self._base.check_open()

    def _whole_layers(self) -> Mc2:
        """Make the kernel that takes whole layers. It holds the group so that torch can destroy it."""
        from tokenring.launch.groups import HeldGroup
        from tokenring.lowering.backend_names import LINEAR_KERNELS, load

        of = None if self._base.group is None else HeldGroup(self._base.group)
        made: Mc2 = load("kernel", self.kernel, LINEAR_KERNELS)(of)
        return made

    def _describe(self, request: LinearRequest, given: Given, direction: Pass) -> Description:
        """Describe a call; sizes follow from the shapes that are given."""
        fields = {"dtype": request.dtype, "device": request.device.type, "schedule": request.schedule}
        own = {"stays": self.stays, "partials": self.partials or "as the tensors", "wire": self.wire or "none"}
        own["kernel"] = self.kernel
        return Description.of({**given, "pass": direction, **fields, **own})

    def _bound(self, request: LinearRequest, passes: tuple[Pass, ...], transport: Transport | None) -> list[Executor]:
        """Return the executors of all passes of a call, on one memory."""
        pool = self._base.pool(request.device)
        while True:
            before = pool.data
            made = [self._executors(request, each, transport) for each in passes]
            if pool.data is before and all(each.views.base is before for each in made):
                return made
            self._executors.cache_clear()  # it has grown: programs hold the old memory

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

    def _choose(
        self, operator: str, tokens: int, features: int, width: int, dtype: torch.dtype, stays: Stays
    ) -> str:
        if (kernel := self._kernel_of(operator)) is not None:
            return kernel.placed_as
        if self.schedule != "auto":
            return self.schedule
        from tokenring.planner.choosing.linear import choose

        size = Workload(1, tokens, features, 1, 1, width, dtype)
        return choose(operator, size, self.world_size, stays, self.topology, self._codecs(dtype))

    def _cut(self, elements: int, dtype: torch.dtype) -> tuple[str, int]:
        """Return the schedule of a collective, by name, and into how many rows it cuts its tensor."""
        from tokenring.schedule.families.registry import parse

        name = self.schedule
        if name == "auto":
            from tokenring.planner.choosing.linear import collective

            name = collective(elements, dtype, self.world_size, self.topology, self._codecs(dtype))
        return name, self.world_size * parse(name).make(self.world_size).q_pieces

    def _make_box(self, request: LinearRequest) -> PairBox:
        from tokenring.lowering.pair_box import pair_box  # whoever calls attention alone need not load it

        return pair_box(self.schedule_of(request), self.rank)

    def _codecs(self, dtype: torch.dtype) -> tuple[tuple[str, str], ...]:
        wide = WIDE if self.partials is not None and self.partials != dtype else ()
        if self.wire is None:
            return wide
        from tokenring.ir.wire_formats import ENCODED, codecs_of

        return tuple((dict(codecs_of(self.wire, dtype, ENCODED)) | dict(wide)).items())

    def _check_wire(self, width: int, dtype: torch.dtype, device: torch.device = CPU) -> None:
        if self.wire is None:
            return
        from tokenring.backends.codecs.trial import check_device
        from tokenring.ir.wire_formats import check_smaller, check_width

        check_smaller(self.wire, dtype)
        check_width(self.wire, width)
        check_device(self.wire, dtype, device)

    def _check_planned(self, operator: object, tokens: int, features: int, width: int, dtype: object) -> None:
        if self._kernel_of(operator) is not None:
            raise UnsupportedError(f"kernel {self.kernel!r} has no plan: its operator decides what moves when")
        if operator not in PLANNED:
            from tokenring.nearest import hint

            raise ConfigurationError(
                f"plan got operator {operator!r}; use one of {', '.join(PLANNED)}{hint(operator, PLANNED)}"
            )
        for name, size in (("tokens", tokens), ("features", features), ("width", width)):
            if (as_integer(size) or 0) < 1:
                raise ConfigurationError(f"plan was given {name}={size!r}: give a positive integer")
            if name != "width" and size % self.world_size:
                raise ConfigurationError(
                    f"plan was given {size} {name}, which {self.world_size} ranks do not divide: pad them"
                )
        if operator in COLLECTIVES and features != self.world_size:
            raise ConfigurationError(
                f"plan was given {features} features of {operator!r}: they are the ranks, {self.world_size}"
            )
        if dtype not in DTYPES:
            raise UnsupportedError(f"a plan in {dtype} is not supported; use float32 or bfloat16")
        assert isinstance(dtype, torch.dtype)
        self._check_wire(width, dtype)

    def _make_schedule(self, request: LinearRequest) -> Schedule:
        from tokenring.ir.operators import OPERATORS
        from tokenring.proof.paired import check_paired

        if request.operator in COLLECTIVES:
            _check_rows_move(request.schedule)
        rows, columns = (
            make_layout("contiguous", self.world_size, size) for size in (request.tokens, request.features)
        )
        made = make_schedule(request.schedule, rows, columns, Full())
        made = made.replace(operator=OPERATORS[request.operator])
        if codecs := self._codecs(request.dtype):
            from tokenring.ir.wire_formats import encoded

            made = encoded(made, codecs)
        check_paired(made)
        return made


def check_parallel(tp: object) -> None:
    """Raise ConfigurationError unless this is a TensorParallel."""
    if not isinstance(tp, TensorParallel):
        raise ConfigurationError(
            f"tp is of type {type(tp).__name__}; make a TensorParallel, once, and give it to every call"
        )


def _check_rows_move(name: str) -> None:
    from tokenring.schedule.families.registry import parse

    if parse(name).family.moves != "Q":
        raise ConfigurationError(
            f"schedule {name!r} moves columns, and a collective's rows have to move: take one where weights stay, "
            f"as 'direct-q' or 'tokenring'"
        )
