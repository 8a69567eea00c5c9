"""What `schedule="auto"` does in a job: look at the interconnect once, plan at rank 0, tell the others."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from tokenring.errors import ConfigurationError, TokenRingError
from tokenring.layout import Layout
from tokenring.planner.auto import Call, make, plan_call
from tokenring.planner.interconnect import Interconnect
from tokenring.planner.machine import CPU, CPU_MESSAGES, machine_of_topology
from tokenring.planner.plan import Candidate, Plan
from tokenring.planner.predict import Setting
from tokenring.planner.rates import Machine
from tokenring.planner.wiring import interconnect_of
from tokenring.schedule.ir import Pass
from tokenring.schedule.schemes import make_schedule
from tokenring.topology.ranks import Topology

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tokenring.backends.base import AttentionKernel, Capabilities
    from tokenring.context import Request

REFUSAL = "refusal"


class Planner:
    """The plans of one ContextParallel."""

    def __init__(
        self,
        group: ProcessGroup | None,
        world_size: int,
        topology: Topology | Interconnect | None,
        families: tuple[str, ...],
        memory_limit_bytes: int | None,
    ) -> None:
        self.group, self.world_size, self.families = group, world_size, families
        self.memory_limit_bytes = memory_limit_bytes
        self._given = topology
        self._seen: dict[torch.device, tuple[Interconnect, Machine]] = {}
        self._check()

    def _check(self) -> None:
        given = self._given
        if given is None:
            return
        if not isinstance(given, (Topology, Interconnect)):
            raise ConfigurationError(f"topology is of type {type(given).__name__}; give a Topology or an Interconnect")
        if given.world_size != self.world_size:
            raise ConfigurationError(f"the topology has {given.world_size} ranks, the group {self.world_size}")

    def look(self, device: torch.device, dtype: torch.dtype) -> tuple[Interconnect, Machine]:
        """The interconnect, and what ranks compute with; where it has to be probed, all ranks do it together."""
        if device not in self._seen:
            self._seen[device] = self._look(device, dtype)
        return self._seen[device]

    def _look(self, device: torch.device, dtype: torch.dtype) -> tuple[Interconnect, Machine]:
        given = self._given
        if isinstance(given, Interconnect):
            return given, Machine(CPU, CPU_MESSAGES)
        if given is None and device.type == "cpu":
            given = Topology("machine without accelerators", self.world_size)
        elif given is None:
            given = Topology.probe(self.group, device)
        return interconnect_of(given), _machine(given, dtype)

    def plan(
        self, request: Request, layouts: tuple[Layout, Layout], kernel: AttentionKernel, able: Capabilities | None
    ) -> Plan:
        """The fastest schedule for a call. Raises ConfigurationError where nothing fits."""
        if self.world_size == 1:
            made = make_schedule(self.families[0] if self.families else "ring", *layouts, request.mask)
            return Plan(made, request.workload, "nothing has to move")
        return plan_call(self._call(request, layouts, kernel, able))

    def _call(
        self, request: Request, layouts: tuple[Layout, Layout], kernel: AttentionKernel, able: Capabilities | None
    ) -> Call:
        net, machine = self.look(request.device, request.workload.dtype)
        backward = request.training or request.differentiable  # so that a checkpoint's two forwards are the same
        passes: tuple[Pass, ...] = ("forward", "backward") if backward else ("forward",)
        early = able is None or able.early_receives
        one_sided = able is not None and able.one_sided
        setting = Setting(request.workload, net, machine, passes, kernel.supports_patch, early, one_sided)
        return Call(setting, *layouts, request.mask, self.families, self.memory_limit_bytes)

    # ---------- what rank 0 tells the others

    @staticmethod
    def word(plan: Plan | TokenRingError) -> bytes:
        """A plan without its schedule, which everybody makes from its name; or why there is none."""
        if isinstance(plan, TokenRingError):
            return json.dumps({REFUSAL: str(plan)}).encode()
        candidates = [asdict(each) for each in plan.candidates]
        return json.dumps({"name": plan.name, "reason": plan.reason, "candidates": candidates}).encode()

    def understood(
        self, said: bytes, request: Request, layouts: tuple[Layout, Layout], kernel: AttentionKernel
    ) -> Plan:
        """The plan that rank 0 told. Raises ConfigurationError, as it did, where there is none."""
        found = json.loads(said)
        if REFUSAL in found:
            raise ConfigurationError(found[REFUSAL])
        candidates = tuple(Candidate(**each) for each in found["candidates"])
        made = make(self._call(request, layouts, kernel, None), found["name"])
        return Plan(made, request.workload, found["reason"], candidates)


def _machine(topology: Topology, dtype: torch.dtype) -> Machine:
    """Published figures of the device, or a CPU core's, which the plan's reason names."""
    try:
        return machine_of_topology(topology, dtype)
    except ConfigurationError:
        return Machine(CPU, CPU_MESSAGES)
