"""Launches: counted on the emulated NPU, and what the planner prices. They are equal, instruction by instruction."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch
from ascend.launches import launched, launched_layer
from ascend.operators import register
from ascend.ranks import NpuPools
from nets import clusters, named, setting, workload
from ranks import Here
from test_planner_fold import folded_seconds

from tokenring.backends.kernels.npu_fusion import NpuFusion
from tokenring.cli.main import main as cli
from tokenring.ir.operators import OPERATORS
from tokenring.ir.schedule_data import PASSES, ScheduleData
from tokenring.lowering.backend_names import transport_target
from tokenring.lowering.lower import lower
from tokenring.lowering.records import Records
from tokenring.planner.choosing.auto import CallToPlan, plan_call
from tokenring.planner.choosing.plan import Plan
from tokenring.planner.interconnects.interconnect import full_mesh
from tokenring.planner.interconnects.wiring import interconnect_of
from tokenring.planner.machines.machine import machine_of_device, machine_of_preset
from tokenring.planner.machines.presets import preset
from tokenring.planner.simulation.copied import PassRecords
from tokenring.planner.simulation.launches import Launches
from tokenring.planner.simulation.operations import Compute, Operation, SimulatedPost, operations
from tokenring.planner.simulation.predict import Setting, predict
from tokenring.planner.simulation.simulate import simulate
from tokenring.schedule.families.registry import FAMILIES
from tokenring.schedule.names import make_schedule
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import parse_mask
from tokenring.sequence.workload import Workload
from tokenring.tables.launching import KERNELS, Launching
from tokenring.tables.rates import Machine, Messages, Rates

WHEEL = "2.9.1"
BF16, FP32 = torch.bfloat16, torch.float32


class Call(NamedTuple):
    """A schedule, and what it is called with."""

    name: str
    ranks: int = 8
    heads: tuple[int, int] = (8, 2)
    layout: str = "zigzag"
    mask: str = "causal"
    batch: int = 1
    dtype: torch.dtype = BF16
    transport: str = "hccl"
    own_tokens: int = 32

    def schedule(self) -> ScheduleData:
        return schedule_of(self)

    def size(self) -> Workload:
        tokens = self.own_tokens * self.ranks
        return Workload(self.batch, tokens, tokens, *self.heads, 64, self.dtype)


@cache
def schedule_of(call: Call) -> ScheduleData:
    layout = make_layout(call.layout, call.ranks, call.own_tokens * call.ranks)
    return make_schedule(call.name, layout, layout, parse_mask(call.mask))


CALLS = (
    Call("ring"), Call("direct-kv"), Call("tokenring"), Call("usp/2"), Call("ulysses", 4, (8, 4)),
    Call("direct-q"), Call("double-ring/4"), Call("bidirectional", 4), Call("tokenring/keep", 4),
    Call("ring", 4, layout="contiguous", mask="full"), Call("ring", 4, batch=2), Call("tokenring", 4, batch=2),
    Call("ulysses", 4, (8, 4), batch=2), Call("tokenring", 4, dtype=FP32), Call("direct-kv/pieces2", 4),
    Call("mesh-kv/2x2", 4), Call("tiles/2x2", 4), Call("ulysses", 4, (8, 4), transport="hccl/collectives"),
    Call("all-gather-kv", 4, layout="contiguous", mask="full", transport="hccl/collectives"),
)  # fmt: skip
Counted = dict[str, list[tuple[str, int]]]


def counted(here: Here, call: Call, rank: int, wheel: str = WHEEL) -> Counted:
    """What a rank's instructions launch on the emulated NPU; the last: after them."""
    register(wheel)
    found = launched(call.schedule(), call.size(), rank, NpuFusion(), transport_target(call.transport))
    return {each: [(str(what), count.total()) for what, count in found[each]] for each in PASSES}


def priced(call: Call, rank: int) -> Counted:
    """What the planner takes them to launch."""
    schedule, size = call.schedule(), call.size()
    found: Counted = {}
    for each in PASSES:
        program = lower(schedule, rank, each, size, transport_target(call.transport), NpuFusion.supports_patch)
        records = PassRecords(schedule, Records(schedule, size, each))
        launches = Launches(program, records, KERNELS["npu-fusion"])
        whole = [(str(what), launches.of(what)) for what in program.instructions]
        found[each] = [*whole, ("None", launches.after())]
    return found


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_counted_and_priced_are_equal(call: Call, npus: NpuPools) -> None:
    for rank in range(call.ranks):
        (found,) = npus(1)(counted, call, rank)
        assert priced(call, rank) == found


NEEDS = {"uneven": Call("uneven/6", heads=(6, 6)), "mixed": Call("mixed/1x2")}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, npus: NpuPools) -> None:
    """A member of each, on 8 ranks in nodes of 4: two ranks, and both passes."""
    names = (each for local in (4, 8) for each in FAMILIES[family].variants(8, Call("").size(), local))
    call = NEEDS.get(family) or Call(next(names), own_tokens=112)  # its chunks seven pieces divide, and eight
    for rank in (0, 5):
        (found,) = npus(1)(counted, call, rank)
        assert priced(call, rank) == found


# Operators and messages of rank 0, as docs/planner.md has them: forward, backward.
BY_HAND = {
    "ring": ((86, 14), (70, 28)), "direct-kv": ((20, 20), (34, 40)), "tokenring": ((92, 28), (85, 28)),
    "usp/2": ((76, 24), (88, 42)), "ulysses": ((18, 33), (39, 33)),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS[: len(BY_HAND)], ids=str)
def test_the_documented_counts(call: Call) -> None:
    for direction, (operators, messages) in zip(PASSES, BY_HAND[call.name], strict=True):
        found = priced(call, 0)[direction]
        posts = sum(what.startswith(("Send", "Recv")) for what, _ in found)
        assert (sum(count for _, count in found) - posts, posts) == (operators, messages)


@pytest.mark.parametrize("name", ["ring", "direct-kv"])
def test_replaced_results_launch_less(name: str, npus: NpuPools) -> None:
    """In fp32 the caller's own tensors are replaced by npu_attention_update's, where torch_npu has it: 4 for 6."""
    call, fewer = Call(name, 4, layout="contiguous", mask="full", dtype=FP32), set()
    for rank in range(call.ranks):
        (found,) = npus(1)(counted, call, rank)
        wanted = priced(call, rank)
        assert found["backward"] == wanted["backward"]
        fewer |= {more - few for (_, few), (_, more) in zip(found["forward"], wanted["forward"], strict=True)}
    assert fewer == {0, 2}


def operators_of(counts: list[tuple[str, int]]) -> int:
    return sum(count for what, count in counts if not what.startswith(("Send", "Recv")))


@pytest.mark.parametrize("name", ["ring", "direct-kv"])
def test_tiles_into_the_same_rows_launch_less(name: str, npus: NpuPools) -> None:
    """Where torch_npu has npu_ring_attention_update. At most two runs a rank: of half its rows, and of all."""
    found = [npus(1)(counted, Call(name), rank, "2.13.0")[0]["forward"] for rank in range(8)]
    assert operators_of(found[0]) == {"ring": 42, "direct-kv": 18}[name]
    assert all(operators_of(each) <= 48 for each in found), [operators_of(each) for each in found]


# ---------- linear layers and collectives

LAYERS = [
    (operator, name, dtype)
    for operator in ("column", "row")
    for name in ("direct-q", "direct-q/pieces2", "tokenring", "direct-kv", "ring", "bidirectional", "tiles/2x2")
    for dtype in ((BF16, FP32) if name in ("tokenring", "ring") else (BF16,))
] + [("reduce", name, BF16) for name in ("direct-q", "tokenring", "mesh-q/2x2")]


def layer(operator: str, name: str, dtype: torch.dtype) -> tuple[ScheduleData, Workload]:
    """Over 4 ranks, 16 tokens and 8 features of each."""
    size = Workload(1, 64, 4 if operator == "reduce" else 32, 1, 1, 16, dtype)
    rows, columns = (make_layout("contiguous", 4, length) for length in (size.q_length, size.kv_length))
    return make_schedule(name, rows, columns, parse_mask("full")).replace(operator=OPERATORS[operator]), size


def counted_layer(here: Here, operator: str, name: str, dtype: torch.dtype, rank: int) -> Counted:
    register(WHEEL)
    found = launched_layer(*layer(operator, name, dtype), rank, NpuFusion(), transport_target("hccl"))
    return {each: [(str(what), count.total()) for what, count in found[each]] for each in PASSES}


@pytest.mark.parametrize(("operator", "name", "dtype"), LAYERS)
def test_layers_are_priced_as_counted(operator: str, name: str, dtype: torch.dtype, npus: NpuPools) -> None:
    made, size = layer(operator, name, dtype)
    for rank in range(4):
        (found,) = npus(1)(counted_layer, operator, name, dtype, rank)
        for each in PASSES:
            program = lower(made, rank, each, size, transport_target("hccl"))
            launches = Launches(program, PassRecords(made, Records(made, size, each)), KERNELS["npu-fusion"])
            whole = [(str(what), launches.of(what)) for what in program.instructions]
            assert [*whole, ("None", launches.after())] == found[each]


# ---------- what they cost


RATES = Rates("by hand", ((1, 1e9),), ((1, 1e9),))
LAUNCH, OPERATOR, KERNEL = 1e-3, 1e-4, 1e-5


def costs(call: Call, rates: Rates) -> list[list[Operation]]:
    schedule, size, target = call.schedule(), call.size(), transport_target("hccl")
    made = []
    for each in PASSES:
        program = lower(schedule, 1, each, size, target, NpuFusion.supports_patch)
        made.append(operations(schedule, size, program, rates))
    return made


@pytest.mark.parametrize("call", CALLS[:4], ids=str)
def test_each_launch_has_its_price(call: Call) -> None:
    """The host's time ends with the last launch; the device's is what each operator costs there."""
    rates = replace(RATES, op_seconds=OPERATOR, call_seconds=KERNEL, launching=Launching(LAUNCH, "npu-fusion"))
    wanted = priced(call, 1)
    for direction, made in zip(PASSES, costs(call, rates), strict=True):
        works = [each for each in made if isinstance(each, Compute)]
        posts = sum(isinstance(each, SimulatedPost) for each in made)
        kernels = sum(each.kernel for each in works)
        total = sum(count for _, count in wanted[direction])
        ends = works[-1].launched + works[-1].seconds
        assert ends == pytest.approx(total * LAUNCH + OPERATOR)  # the last operator ends after its launch
        on_device = kernels * KERNEL + (total - kernels - posts) * OPERATOR
        assert sum(each.seconds for each in works) == pytest.approx(on_device, rel=1e-6)


@pytest.mark.parametrize("name", ["ring", "direct-kv", "tokenring", "usp/2"])
def test_launches_that_cost_nothing_change_nothing(name: str) -> None:
    call = Call(name)
    free = replace(RATES, launching=Launching(0.0, "npu-fusion"))
    assert predicted(call, free) == pytest.approx(predicted(call, RATES), rel=1e-12)


def predicted(call: Call, rates: Rates) -> float:
    machine = Machine(rates, Messages(1e-6, 1e-6))
    net = full_mesh(call.ranks, 1.0)
    setting = Setting(call.size(), net, machine, PASSES, target=transport_target("hccl"))
    return predict(call.schedule(), setting).seconds


@pytest.mark.parametrize("name", ["ring", "tokenring", "direct-kv", "usp/4"])
def test_one_host_stands_for_all(name: str) -> None:
    """What ranks launch is in the programs of host 0 as in everybody's."""
    asked = setting(clusters(3, 4), workload(12, (12, 12), 192), ("backward",), tflops=0.5)
    launching = replace(asked.machine.rates, op_seconds=1e-6, launching=Launching(1e-3, "npu-fusion"))
    slower = replace(asked, machine=replace(asked.machine, rates=launching))
    schedule = named(name, 12, slower.workload.q_length)
    exact = predict(schedule, slower).seconds
    assert exact > 1.2 * predict(schedule, asked).seconds
    assert folded_seconds(name, slower) == pytest.approx(exact, rel=0.01)


def test_a_host_that_is_ahead_costs_nothing() -> None:
    """Behind a long kernel the host launches what comes next; behind a short one the device waits for it."""
    launched_late = Compute(1.0, False, 0, "merge", launched=3.0)
    for kernel, wanted in ((10.0, 11.0), (1.0, 4.0)):
        found = simulate(full_mesh(1, 1.0), [[Compute(kernel, True, 0, "kernel"), launched_late]], Messages())
        assert found.seconds == pytest.approx(wanted)
        assert found.exposed_seconds == pytest.approx(0.0), "the host's time is the rank's own"


# ---------- on presets


@pytest.mark.parametrize("name", ["atlas-800t-a2", "atlas-a3", "atlas-850", "atlas-800-910a"])
def test_ascend_presets_count_launches(name: str) -> None:
    rates = machine_of_preset(name, torch.float16).rates
    assert rates.launching is not None and rates.launching.kernel == "npu-fusion"
    assert rates.launching.seconds == pytest.approx(10e-6)
    assert rates.call_seconds == pytest.approx(5e-6) and rates.op_seconds == pytest.approx(2e-6)
    assert "each launch 10 µs of the host, assumed" in rates.source


def test_the_command_says_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--seq", "4k", "--heads", "8", "--schedules", "ring", "--pass", "forward", "--topology"]
    for name, said in (("atlas-800t-a2", True), ("hgx-h100", False)):
        assert cli([*plan, f"preset:{name}"]) == 0
        assert ("each launch 10 µs of the host, assumed" in capsys.readouterr().out) is said


def test_ascend_devices_that_were_probed_count_launches() -> None:
    rates = machine_of_device("910b3", BF16).rates
    assert rates.launching == machine_of_preset("atlas-800t-a2", BF16).rates.launching is not None


def test_launches_decide_short_sequences() -> None:
    """Of 2,048 tokens what launches least wins; of 128k tokens launches are hidden, and change no choice."""
    short, long = ({"counted": planned(tokens), "free": planned(tokens, False)} for tokens in (2048, 131072))
    assert short["counted"].name != short["free"].name
    assert "bound by launches, copies and merges (" in short["counted"].reason
    assert long["counted"].name == long["free"].name
    assert "bound by kernels (" in long["counted"].reason


def planned(tokens: int, counted: bool = True) -> Plan:
    """What auto takes on an Atlas 800T A2 among some families."""
    net, machine = interconnect_of(preset("atlas-800t-a2")), machine_of_preset("atlas-800t-a2", BF16)
    if not counted:
        machine = replace(machine, rates=replace(machine.rates, launching=None))
    layout = make_layout("zigzag", 8, tokens)
    setting = Setting(
        Workload(1, tokens, tokens, 32, 8, 128, BF16), net, machine, PASSES, NpuFusion.supports_patch,
        transport_target("hccl"),
    )  # fmt: skip
    call = CallToPlan(setting, layout, layout, parse_mask("causal"), ("direct-kv", "all-gather-kv", "ulysses", "ring"))
    return plan_call(call)
