"""The simulation of a traced call by the planner, to be shown beside what was measured."""

from __future__ import annotations

from tokenring.api.context import ContextParallel
from tokenring.cli.trace.predicted import timeline
from tokenring.cli.trace.record import Simulated
from tokenring.planner.choosing.planner import Planner
from tokenring.planner.simulation.predict import predict
from tokenring.sequence.workload import Request


def simulated(cp: ContextParallel, request: Request) -> Simulated | None:
    """Simulate a call's schedule as `schedule="auto"` would; return None for one rank. All ranks call it together."""
    if cp.world_size == 1:
        return None
    planner = Planner(cp.group, cp.world_size, cp.topology, (), None, cp.tensor_parallel)
    transport = cp.transport_for(request.device, request.workload)
    target = None if transport is None else transport.target
    setting = planner.setting(request, cp.kernel(request.device), target)
    plan = cp.plan(request)
    made = timeline(plan.name, setting, predict(plan.schedule, setting, record=True))
    net = setting.interconnect  # whose notes may say what ranks compute with
    source = "; ".join(dict.fromkeys((net.name, setting.machine.source, *net.notes)))
    return Simulated(source, list(made.stretches), list(made.bars), list(made.messages))
