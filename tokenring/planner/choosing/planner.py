"""The planner of `schedule="auto"` in a job: looks at the interconnect once, plans at rank 0, sends the plan to all."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tokenring.backends.table_keys import key_of
from tokenring.display.console import cores
from tokenring.errors import ConfigurationError, TokenRingError
from tokenring.gc_pause import no_collection
from tokenring.ir.passes import for_call
from tokenring.ir.schedule_data import Pass
from tokenring.launch.background import Background
from tokenring.launch.groups import held
from tokenring.lowering.target import IDEAL
from tokenring.planner.choosing.auto import CallToPlan, order_of
from tokenring.planner.choosing.candidates import Candidate
from tokenring.planner.choosing.checks import check_memory_limit, check_topology
from tokenring.planner.choosing.judged import Progress
from tokenring.planner.choosing.kept_plans import plan_kept
from tokenring.planner.choosing.pack_shapes import pack_shape
from tokenring.planner.choosing.plan import Plan
from tokenring.planner.interconnects.interconnect import Interconnect
from tokenring.planner.interconnects.shared_links import group_net
from tokenring.planner.machines.devices import device_figures
from tokenring.planner.machines.machine import (
    CPU,
    CPU_MESSAGES,
    device_rates,
    machine_of_topology,
    messages_of,
    models_of,
)
from tokenring.planner.simulation.predict import Setting
from tokenring.schedule.names import make_schedule, named_schedule, schedule_in_parts
from tokenring.sequence.layout import Layout
from tokenring.tables.kernel_rates import KernelKey, kept
from tokenring.tables.rates import Machine, Rates
from tokenring.topology.model.facts import PROCESS
from tokenring.topology.ranks import TIMEOUT_SECONDS, Topology, probe_seconds

if TYPE_CHECKING:
    from tokenring.backends.interfaces import AttentionKernel, Transport
    from tokenring.launch.groups import Held
    from tokenring.lowering.target import Target
    from tokenring.sequence.workload import Request

LOG = logging.getLogger("tokenring")
REFUSAL, SERVES, WIRE = "refusal", "serves packs", "wire"
PROBE = b"probe"  # what rank 0 says where it has to look at what joins the ranks
STILL_PLANNING, STILL_SECONDS = b"still planning", 0.5  # what rank 0 says meanwhile, and how often
SAY_AGAIN = 10  # after so many of these rank 0 logs how far it is
MOST_SHAPES = 256  # of packs whose plans are kept
LIKE_BEFORE = "as planned for a pack like it"
ASSUMED_DEVICE = "a100-sxm"  # what ranks compute with where nothing is known of their accelerators
MEASURED_HERE = "kernels at the rates that `tokenring rates` measured here"


class Planner:
    """The plans of one ContextParallel."""

    def __init__(
        self,
        group: Held | None,
        world_size: int,
        topology: Topology | Interconnect | None,
        families: tuple[str, ...],
        memory_limit_bytes: int | None,
        tensor_parallel: int = 1,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """timeout_seconds: how long ranks wait for each other in a probe, if it is longer than a probe's own limit."""
        self._probe_seconds = probe_seconds(timeout_seconds)
        self.group = None if group is None else held(group)
        self.world_size, self.families = world_size, families
        self.memory_limit_bytes, self.tensor_parallel = memory_limit_bytes, tensor_parallel
        self._given = topology
        self._seen: dict[torch.device, tuple[Interconnect, Topology | None]] = {}
        self._progress = Progress()  # of the plan that is made now
        self._own: Plan | None = None  # what rank 0 planned, until it is told
        self._words: dict[Hashable, bytes] = {}  # what rank 0 said of packs, by their shape
        self._kept: dict[KernelKey, Rates | None] = {}  # tables of rates as this planner found them when it first asked
        check_topology(topology, world_size, tensor_parallel)
        check_memory_limit(memory_limit_bytes)

    def look(
        self, device: torch.device, dtype: torch.dtype, measured: Rates | None = None
    ) -> tuple[Interconnect, Machine]:
        """Return the interconnect, and what ranks compute with; where it has to be probed, all ranks do it together.

        measured: what this machine's kernel was found to do; taken where the interconnect does not say itself.
        """
        if device not in self._seen:
            self._seen[device] = self._look(device)
        net, topology = self._seen[device]
        if net.machine is not None:
            return net, net.machine
        machine, note = _machine(topology, device, dtype)
        notes: tuple[str, ...] = (machine.source,) if note is None else (note, machine.source)
        if measured is not None:
            machine = replace(machine, rates=measured)
            notes = (MEASURED_HERE, f"messages: {machine.messages.source}")
        if device.type == "cpu" and self._given is None:  # processes of this machine, as far as anybody knows
            threads = 1 if measured is None else torch.get_num_threads()
            machine, more = _on_shared_cores(machine, self.world_size, threads, self.tensor_parallel)
            notes += more
        return (replace(net, notes=(*net.notes, *notes)) if notes else net), machine

    def _look(self, device: torch.device) -> tuple[Interconnect, Topology | None]:
        given = self._given
        if given is None and device.type == "cpu":
            given = Topology("machine without accelerators", self.world_size * self.tensor_parallel)
        elif given is None:
            given = Topology.probe(self.group, device, timeout_seconds=self._probe_seconds)
        return self._seen_in(given)

    def _seen_in(self, given: Topology | Interconnect) -> tuple[Interconnect, Topology | None]:
        """Return the interconnect of the group's ranks, and the topology by which to find what they compute with."""
        net = group_net(given, self.world_size, self.tensor_parallel, _job_ranks())
        return net, None if isinstance(given, Interconnect) else given

    def plan(
        self,
        request: Request,
        layouts: tuple[Layout, Layout],
        kernel: AttentionKernel,
        target: Target | None,
        modes: Mapping[str, Target] | None = None,
        refine: Callable[[Plan, CallToPlan], Plan] | None = None,
    ) -> Plan:
        """Return the fastest plan for a call, over one of these modes of the transport where the limit asks for it.

        refine: makes of the plan that was found, or kept, the one to take.
        Raises ConfigurationError where nothing fits.
        """
        if self.world_size == 1:
            made = make_schedule("ring", *layouts, request.mask)  # whatever is allowed: some families need two ranks
            return Plan(made, request.workload, "nothing has to move")
        self._progress = Progress()
        call = replace(self._call(request, layouts, kernel, target), modes=modes or {}, progress=self._progress)
        found = plan_kept(call, os.environ)
        found = found if refine is None else refine(found, call)
        return replace(found, schedule=for_call(found.schedule, request.wants_lse))

    def _call(
        self, request: Request, layouts: tuple[Layout, Layout], kernel: AttentionKernel, target: Target | None
    ) -> CallToPlan:
        setting = self.setting(request, kernel, target)
        limit, wanted = self.memory_limit_bytes, request.wants_lse
        return CallToPlan(setting, *layouts, request.mask, self.families, limit, wants_lse=wanted)

    def setting(self, request: Request, kernel: AttentionKernel, target: Target | None) -> Setting:
        """Return the setting in which schedules of a call are judged; to probe, all ranks call it together."""
        size = request.workload
        key = key_of(kernel, request.device, size.dtype, size.head_dim, size.value_dim)
        if key not in self._kept:
            self._kept[key] = kept(key)
        net, machine = self.look(request.device, size.dtype, self._kept[key])
        passes: tuple[Pass, ...] = ("forward", "backward") if request.backward else ("forward",)
        target = IDEAL if target is None else target
        return Setting(request.workload, net, machine.over(target), passes, kernel.supports_patch, target)

    # ---------- what rank 0 tells the others

    def together(
        self, transport: Transport, request: Request, layouts: tuple[Layout, Layout], plan: Callable[[], Plan]
    ) -> Plan:
        """Return on every rank what rank 0 plans, by `plan`. Raises ConfigurationError, on all, where nothing fits.

        Of packs of one shape the first is planned; its word serves the others, for which nothing is exchanged.
        """
        shape = pack_shape(request, layouts)
        said = self._words.get(shape)
        if said is not None:
            found = self.understood(said, request, layouts)
            return replace(found, reason=f"{LIKE_BEFORE}: {found.reason}")
        self._own = None
        said = self._heard(transport, request, plan)
        # Rank 0 has made the schedule that it tells of: the largest take seconds.
        found, self._own = self._own or self.understood(said, request, layouts), None
        if shape is not None and json.loads(said)[SERVES]:  # what rank 0 says, as ranks may differ in limits
            if len(self._words) >= MOST_SHAPES:  # on all ranks alike
                self._words.pop(next(iter(self._words)))
            self._words[shape] = said
        return found

    def _heard(self, transport: Transport, request: Request, plan: Callable[[], Plan]) -> bytes:
        """Return what rank 0 says of its plan, on every rank."""
        self._look_together(transport, request.device)
        limited = transport.target.most_connections is not None
        told = None if transport.rank != 0 else Background(lambda: self._said(request, plan, limited))
        asked = 0
        while True:
            word = b"" if told is None else self._so_far(told, transport)
            if (said := transport.exchange_text(word, "the plan")[0]) != STILL_PLANNING:
                return said
            asked += 1
            if told is not None and asked % SAY_AGAIN == 0 and self._progress.known:
                LOG.warning("rank 0 plans: %s; the other ranks wait", self._progress)

    def told(
        self, transport: Transport, device: torch.device, dtype: torch.dtype,
        choose: Callable[[Interconnect, Machine], str],
    ) -> str:  # fmt: skip
        """Return on every rank what rank 0 chooses by the interconnect and what ranks compute with, in one word."""
        self._look_together(transport, device)
        word = b""
        if transport.rank == 0:
            try:
                word = choose(*self.look(device, dtype)).encode()
            except BaseException as error:  # the others wait for the word
                transport.fail(error)
                raise
        return transport.exchange_text(word, "the choice")[0].decode()

    def _look_together(self, transport: Transport, device: torch.device) -> None:
        """Probe, all ranks together, where rank 0 knows nothing of accelerators: what others know does not count."""
        if device.type == "cpu":
            return
        unknown = transport.rank == 0 and self._given is None and device not in self._seen
        if transport.exchange_text(PROBE if unknown else b"", "the plan")[0] == PROBE:
            found = Topology.probe(self.group, device, timeout_seconds=self._probe_seconds)
            self._seen[device] = self._seen_in(found)

    def _said(self, request: Request, plan: Callable[[], Plan], limited: bool) -> bytes:
        """Return the plan, or why there is none, as the bytes that are sent to the other ranks.

        limited: in connections. A mode that was taken for a limit, of these or of memory, serves no other pack of the
        same shape, which may need more; one that was taken on advice does.
        """
        try:
            found, net = plan(), self.look(request.device, request.workload.dtype)[0]
            serves = self.memory_limit_bytes is None and not (limited and found.transport is not None)
            word = self.word(found, order_of(net), serves)
            self._own = found
            return word
        except TokenRingError as error:
            return json.dumps({REFUSAL: str(error)}).encode()

    @staticmethod
    def _so_far(told: Background[bytes], transport: Transport) -> bytes:
        """Return the plan, or that rank 0 still plans: that may take longer than others may wait for a message."""
        try:
            return told.result() if told.ended(STILL_SECONDS) else STILL_PLANNING
        except BaseException as error:  # such as Ctrl-C: the others wait for the word
            transport.fail(error)
            raise

    @staticmethod
    def word(plan: Plan, order: tuple[int, ...] | None, serves: bool = True) -> bytes:
        """Return a plan as bytes, without its schedule: all ranks make that from its name and their order.

        serves: packs of the same shape may take it too.
        """
        LOG.info("schedule auto: %s", plan.reason)
        candidates = [asdict(each) for each in plan.candidates]
        made = {"name": plan.name, "order": order, "direction": plan.direction, "transport": plan.transport}
        made[WIRE] = next(iter(plan.schedule.formats.values()), None)
        return json.dumps(made | {"reason": plan.reason, "candidates": candidates, SERVES: serves}).encode()

    @staticmethod
    def understood(said: bytes, request: Request, layouts: tuple[Layout, Layout]) -> Plan:
        """Return the plan that rank 0 sent. Raises ConfigurationError, as rank 0 did, where there is none."""
        found = json.loads(said)
        if REFUSAL in found:
            raise ConfigurationError(found[REFUSAL])
        candidates = tuple(Candidate(**each) for each in found["candidates"])
        # In rank 0's order: another rank may know nothing of what joins them, or could think another order good.
        with no_collection():
            named, order, direction = found["name"], found["order"], found["direction"]
            if found[WIRE] is not None:
                from tokenring.ir.wire_formats import REQUESTS_ENCODED, codecs_of, encoded

                made = named_schedule(named, request.workload, *layouts, request.mask, order=order)
                made = encoded(made, codecs_of(found[WIRE], request.workload.dtype, REQUESTS_ENCODED))
            else:
                made = schedule_in_parts(
                    named, request.workload, *layouts, request.mask, order=order, direction=direction
                )
            made = for_call(made, request.wants_lse)
        return Plan(made, request.workload, found["reason"], candidates, found["transport"])


def _job_ranks() -> int | None:
    """Return the number of ranks of the job, of all groups; None without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else None


def _on_shared_cores(machine: Machine, ranks: int, threads: int, groups: int) -> tuple[Machine, tuple[str, ...]]:
    """Return the machine where the ranks of so many groups, with so many threads each, have fewer cores; and a note.

    A group has one core at least: where several groups share one, its kernels take longer than that.
    """
    at_once = max(1.0, cores() / threads / groups)  # kernels of one group
    if at_once >= ranks:
        return machine, ()
    note = f"{ranks * groups} ranks share {cores()} core{'s' if cores() > 1 else ''}"
    return replace(machine, shared_cores=at_once, kernels_share=True), (note,)


def _machine(topology: Topology | None, device: torch.device, dtype: torch.dtype) -> tuple[Machine, str | None]:
    """Return published figures of the device; those of another one where there are none, and a note that says so."""
    models = [] if topology is None else [model for model in models_of(topology) if model not in (None, PROCESS)]
    if device.type == "cpu" and not models:
        return Machine(CPU, CPU_MESSAGES), None
    why = "no compute figures of these accelerators"
    if topology is not None and models:
        try:
            return machine_of_topology(topology, dtype), None
        except TokenRingError as error:
            why = str(error).partition(":")[0]
    assumed = device_figures(ASSUMED_DEVICE)
    machine = Machine(device_rates(assumed, dtype), messages_of(None))
    return machine, f"{why}; those of {assumed.title} are assumed"
