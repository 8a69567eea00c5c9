"""Kernel "mc2": whole linear layers by Ascend's fused operators, which multiply and exchange in one.

A column layer forward is npu_all_gather_base_mm, a row layer forward npu_mm_reduce_scatter_base, and each one's
backward is the other's operator. dw needs the rows of all ranks: a row layer's backward has them from its operator
(gather_out), a column layer's gathers them again, as all our schedules do, and MindSpeed where it is not told to keep
them (MindSpeed 028de58c, mindspeed/core/tensor_parallel/mc2_feature/linear_function.py). That is a collective of the
same communicator, in which operations have to follow each other: so it waits for dx, and dw for it. (MindSpeed takes no
fused operator for dx where the weight has a gradient, but a product beside the gathering and a reduce-scatter beside
the other product.)

Weights stay: the operators exchange rows alone. What they move when is theirs: no schedule is proved, and no bytes are
counted in `sent_bytes`. In which dtype the parts of y and dx are added up is not written; the emulation takes the least
exact, the tensors' own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

import torch

from tokenring.backends.devices import device_of
from tokenring.backends.fused.contract import GATHER, ONE_DOMAIN, OPERATORS, SCATTER, generation, refusal
from tokenring.backends.transports.hccl import FIRST_CONTACT, HcclTransport
from tokenring.errors import UnsupportedError, one_line
from tokenring.launch.groups import newer_collective

if TYPE_CHECKING:
    from tokenring.backends.interfaces import Transport
    from tokenring.ir.schedule_data import Kind, Pass
    from tokenring.launch.groups import HeldGroup
    from tokenring.sequence.workload import LinearRequest

# State of the process: on A2 all fused operators of a model have one communicator, whoever calls them.
_at_work: WeakSet[Mc2] = WeakSet()


class _Call(Protocol):
    """A call's own tensors by name: x, w, dy [1, rows, 1, width], c, dc [rows, features]; results are put there."""

    own: dict[str, torch.Tensor]


class Mc2:
    """MC2 over one group, in the communicator that HCCL has for the group itself."""

    name = "mc2"
    placed_as = "direct-q"  # the schedule that has each rank's part of all tensors where MC2 has it

    def __init__(self, group: HeldGroup | None) -> None:
        """Make the kernel for a group; None: this rank is alone, which it refuses at each call."""
        self._group = group
        self.ranks = 1 if group is None else group.world_size
        self._communicator: str | None = None

    def check(self, request: LinearRequest, direction: Pass) -> None:
        """Raise UnsupportedError, with the reason, unless MC2 takes this pass of a layer on this rank."""
        on_npu = request.device.type == "npu"
        device_name = device_of(request.device).name if on_npu else ""
        reason = refusal(request, direction, self.ranks, device_name) or self._missing(request, direction, device_name)
        if reason is not None:
            raise UnsupportedError(
                f"kernel 'mc2' cannot take this {request.operator.partition('-')[0]} layer: {reason}; leave "
                f"TensorParallel(kernel='auto'), which runs a schedule"
            )

    def _missing(self, request: LinearRequest, direction: Pass, device_name: str) -> str | None:
        """Return what this rank lacks besides, None if nothing."""
        operator = OPERATORS.get((request.operator, direction))
        if operator is not None and _operator(operator) is None:
            return f"this torch_npu has no {operator}"
        if (reason := self._no_backend() or _not_current(request.device)) is not None:
            return reason
        if generation(device_name) == ONE_DOMAIN and any(self._is_elsewhere(other) for other in _at_work):
            return (
                f"on {device_name} all fused operators of a model have to be in one communication domain, and another "
                f"TensorParallel of this process has them in another group: close that one, or give both one group"
            )
        return None

    def _is_elsewhere(self, other: Mc2) -> bool:
        """Tell whether another one is at work over another group that lives."""
        return other._group is not None and other._group.lives and other._group != self._group

    def _no_backend(self) -> str | None:
        """Return why the group has no communicator of HCCL, None if it has."""
        try:
            backend = self._backend()
        except RuntimeError as error:
            return f"its group has no backend for NPUs ({one_line(error)}): give one of backend 'hccl'"
        if not hasattr(backend, "get_hccl_comm_name"):
            return f"its group has the backend {type(backend).__name__} for NPUs: give one of backend 'hccl'"
        return None

    def _backend(self) -> Any:
        assert self._group is not None  # there are several ranks
        return self._group()._get_backend(torch.device("npu"))

    def bound(self, request: LinearRequest, direction: Pass, transport: Transport | None) -> WholeLayer:
        """Return a pass of a layer, to be run. All ranks get here together, once they agree on the call.

        Raises UnsupportedError for ranks that are no one mesh, on all ranks; PeerLost.
        """
        if not isinstance(transport, HcclTransport):
            raise UnsupportedError(
                f"kernel 'mc2' works beside a transport of HCCL, by which ranks hear of each other, and this is "
                f"{getattr(transport, 'name', type(transport).__name__)!r}: leave transport='auto'"
            )
        self._check_mesh(transport, device_of(request.device).name)
        return WholeLayer(self, request.operator, direction, transport, self._communicator_of(transport))

    def _check_mesh(self, transport: HcclTransport, device_name: str) -> None:
        hosts = {each.boot_id for each in transport.control.members}
        if generation(device_name) == ONE_DOMAIN and len(hosts) > 1:
            raise UnsupportedError(
                f"kernel 'mc2' takes ranks on {device_name} that HCCS joins, each with each, and these are on "
                f"{len(hosts)} machines: leave TensorParallel(kernel='auto'), which runs a schedule"
            )

    def _communicator_of(self, transport: HcclTransport) -> str:
        """Return the name of the group's communicator, which HCCL makes when it is first asked for: all ranks meet.

        It wants the rank in the world, to compare it with the device (Ascend/pytorch 9e73e708,
        torch_npu/csrc/distributed/ProcessGroupHCCL.cpp:3675-3725; MindSpeed 028de58c gives it so).
        """
        if self._communicator is None:
            assert self._group is not None
            try:
                self._communicator = str(self._backend().get_hccl_comm_name(self._group.global_ranks()[transport.rank]))
            except RuntimeError as error:
                raise transport.lost_together(error, "met in the group's communicator", FIRST_CONTACT) from error
            _at_work.add(self)
        return self._communicator

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows [P·n, width] of all ranks, gathered in the same communicator behind what it has to do."""
        assert self._group is not None
        whole = rows.new_empty(self.ranks * rows.shape[0], rows.shape[1])
        newer_collective("all_gather_single")(whole, rows.contiguous(), group=self._group())
        return whole

    def close(self) -> None:
        """Let others take another communicator; this one is the group's."""
        _at_work.discard(self)


class WholeLayer:
    """One pass of a layer. Results lie among the call's own tensors: they are the caller's to keep."""

    def __init__(
        self, kernel: Mc2, operator: str, direction: Pass, transport: HcclTransport, communicator: str
    ) -> None:
        """Bind a pass of a layer: `operator` is the request's."""
        self.transport = transport
        self._kernel, self._operator, self._direction, self._communicator = kernel, operator, direction, communicator

    def run(self, call: _Call) -> None:
        """Run the pass: c and a, y, dx, dc and dw are then among the call's own. Raises PeerLost."""
        try:
            self._run(call.own)
        except RuntimeError as error:
            what = f"ran the {self._direction} pass of a {self._operator} layer by kernel 'mc2'"
            raise self.transport.lost_together(error, what) from error
        except BaseException as error:  # such as Ctrl-C: the others hear of it
            self.transport.fail(error)
            raise

    def result(self, call: _Call, kind: Kind, name: str) -> torch.Tensor:
        """Return what `run` made of this name: [1, rows, 1, width]."""
        return call.own[name][None, :, None, :]

    def _run(self, own: dict[str, torch.Tensor]) -> None:
        if self._direction == "forward":
            self._forward(own)
        elif self._operator.startswith("column"):
            self._column_backward(own)
        else:
            self._row_backward(own)

    def _forward(self, own: dict[str, torch.Tensor]) -> None:
        if self._operator == "row":
            own["y"] = self._scattered(own["c"], _rows(own, "w"))
            return
        own["c"], whole = self._multiplied(_rows(own, "x"), _rows(own, "w").t(), "a" in own)
        if "a" in own:
            own["a"] = whole

    def _column_backward(self, own: dict[str, torch.Tensor]) -> None:
        if "w" in own:
            own["dx"] = self._scattered(own["dc"], _rows(own, "w"))
        if "x" in own:
            own["dw"] = own["dc"].t() @ self._kernel.gathered(_rows(own, "x"))

    def _row_backward(self, own: dict[str, torch.Tensor]) -> None:
        """Make dw [features, width] as the transpose of what lies in memory: callers want it so."""
        dy, wants_dw = _rows(own, "dy"), "c" in own
        if "w" in own:
            own["dc"], whole = self._multiplied(dy, _rows(own, "w").t(), wants_dw)
        else:
            whole = self._kernel.gathered(dy)
        if wants_dw:
            own["dw"] = (whole.t() @ own["c"]).t()

    def _multiplied(self, rows: torch.Tensor, right: torch.Tensor, keep: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ranks' rows [P·n, k] times right [k, m], and the rows themselves if they are to be kept."""
        made: tuple[torch.Tensor, torch.Tensor] = _called(GATHER)(
            rows.contiguous(), _plain(right), self._communicator, self._kernel.ranks, gather_output=keep
        )
        return made

    def _scattered(self, c: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of c [P·n, k] times right [k, m], summed over the ranks: [n, m]."""
        made: torch.Tensor = _called(SCATTER)(
            c.contiguous(), _plain(right), self._communicator, self._kernel.ranks
        )
        return made


def _rows(own: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return [rows, width] of one of a call's own tensors [1, rows, 1, width]."""
    return own[name][0, :, 0]


def _plain(right: torch.Tensor) -> torch.Tensor:
    """Return a right operand as the operators take it: contiguous, or the transpose of what is."""
    return right if right.is_contiguous() or right.t().is_contiguous() else right.contiguous()


def _not_current(device: torch.device) -> str | None:
    """Return why tensors cannot be on this NPU, None if it is the current one: HCCL makes a communicator for that."""
    current = torch.get_device_module(device).current_device()
    if device.index in (None, current):
        return None
    return (
        f"these tensors are on npu:{device.index}, and the communicator is that of the current device, npu:{current}: "
        f"call torch.npu.set_device({device.index}) first"
    )


def _operator(name: str) -> Any:
    return getattr(torch.ops.npu, name, None)


def _called(name: str) -> Any:
    """Return an operator, which `check` has found: torch_npu may have been imported after this module."""
    return _operator(name).default
