"""Memory is what the schedule says: the pool's high-water mark, two slots for a ring, and nothing beside the pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from cases import SCHEDULES, Case
from oracle import relative_error
from ranks import Here, RankPools
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenring import ContextParallel, attention, shard
from tokenring.api.autograd import OwnTensors
from tokenring.api.inputs import make_request
from tokenring.backends.interfaces import AttentionKernel
from tokenring.backends.kernels.cpu_flash import CpuFlash
from tokenring.ir.schedule_data import PASSES, Kind, Pass
from tokenring.lowering import lower as module
from tokenring.lowering.lower import lower
from tokenring.lowering.records import Records, aligned, scratch_bytes, slot_bytes
from tokenring.runtime.call import ActiveCall
from tokenring.sequence.region import Patch

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


def case_of(schedule: str, ranks: int, mask: str, dtype: torch.dtype) -> Case:
    return Case(ranks, schedule, "zigzag", mask, 4, 2, 2, 40, dtype, None)


def parts_of(cp: ContextParallel, case: Case) -> list[torch.Tensor]:
    return [shard(x, cp).requires_grad_(index < 3) for index, x in enumerate(case.inputs())]


# ---------- the pool


def high_water(here: Here, case: Case, backward: bool, transport: str | None = None) -> int:
    """Of the pool of a context that has run one pass, or both."""
    some = {} if transport is None else {"transport": here.transport(transport)}
    cp = here.cp(**case.options, kernel="cpu-flash", **some)
    q, k, v, dout = parts_of(cp, case)
    cp.pool(CPU).high_water_bytes = 0  # the pool in shared memory belongs to the transport, which others used before
    if backward:
        torch.autograd.grad(attention(q, k, v, cp, case.mask), (q, k, v), dout)
    else:
        with torch.no_grad():
            attention(q, k, v, cp, case.mask)
    return cp.pool(CPU).high_water_bytes


@pytest.mark.sampled(32)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["full", "causal", "causal & window & documents"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_high_water_is_peak_bytes(
    schedule: str, world_size: int, mask: str, dtype: torch.dtype, ranks: RankPools
) -> None:
    case = case_of(schedule, world_size, mask, dtype)
    made = case.make_schedule()
    forward, backward = (made.peak_bytes(case.workload, direction) for direction in PASSES)
    assert max(ranks(world_size)(high_water, case, False)) == forward
    assert max(ranks(world_size)(high_water, case, True)) == max(forward, backward)


@pytest.mark.parametrize("schedule", ["ulysses", "direct-kv", "bidirectional"])
def test_over_gloo_messages_that_go_together_have_room_of_their_own(schedule: str, ranks: RankPools) -> None:
    case = replace(case_of(schedule, 4, "full", torch.bfloat16), q_heads=4, kv_heads=4)
    made = case.make_schedule()
    forward, backward = (made.peak_bytes(case.workload, direction, "gloo") for direction in PASSES)
    assert max(ranks(4)(high_water, case, False, "gloo")) == forward > made.peak_bytes(case.workload)
    assert max(ranks(4)(high_water, case, True, "gloo")) == max(forward, backward)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", range(2, 9))
def test_ring_needs_two_slots_for_kv(world_size: int, dtype: torch.dtype) -> None:
    """Whatever the number of ranks: one is sent from while the other is received into."""
    case = case_of("ring+", world_size, "full", dtype)
    schedule, workload = case.make_schedule(), case.workload
    record = Records(schedule, workload, "forward")("kv").nbytes
    for rank in range(world_size):
        program = lower(schedule, rank, "forward", workload)
        sizes = zip(program.slots, slot_bytes(schedule, workload, program), strict=True)
        home = sum(aligned(size) for slot, size in sizes if slot.pooled and slot.all_heads)
        scratch = aligned(scratch_bytes(schedule, workload, program))
        kv_slot = aligned(record * (case.q_length // world_size))
        assert schedule.peak_bytes(workload) - home - scratch == 2 * kv_slot


def many_calls(here: Here, case: Case) -> list[int]:
    """The pool's size after each of many calls in both passes."""
    cp = here.cp(layout=case.layout, schedule=case.name)
    q, k, v, dout = parts_of(cp, case)
    sizes = []
    for _ in range(4):
        torch.autograd.grad(attention(q, k, v, cp, case.mask), (q, k, v), dout)
        sizes.append(cp.pool(CPU).data.numel())
    return sizes


def programs_made(here: Here, case: Case) -> list[list[str]]:
    """The passes whose programs each of three steps makes; backward needs a larger pool than forward."""
    cp = here.cp(layout=case.layout, schedule=case.name, transport=here.transport("gloo"))  # whose pool is its own
    found: list[list[str]] = []

    def noted(schedule: Any, rank: int, direction: Pass, *rest: Any) -> Any:
        found[-1].append(direction)
        return lower(schedule, rank, direction, *rest)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "lower", noted)
        q, k, v, dout = parts_of(cp, case)
        for _ in range(3):
            found.append([])
            torch.autograd.grad(attention(q, k, v, cp, case.mask), (q, k, v), dout)
    return found


def test_a_pool_that_grows_keeps_the_program_it_grew_for(ranks: RankPools) -> None:
    """Only what lies in the old memory is made again, at its next call."""
    for found in ranks(2)(programs_made, case_of("ring", 2, "causal", torch.float32)):
        assert found == [["forward", "backward"], ["forward"], []]


def test_pool_does_not_grow_with_calls(ranks: RankPools) -> None:
    for sizes in ranks(3)(many_calls, case_of("tokenring", 3, "causal", torch.bfloat16)):
        assert len(set(sizes)) == 1


# ---------- beside the pool


class Canned:
    """A kernel that has computed everything before: in replay it gives what it made, and allocates nothing."""

    name = "canned"

    def __init__(self) -> None:
        self.kernel: AttentionKernel = CpuFlash()
        self.seen: list[tuple[torch.Tensor, ...]] = []
        self.ready: list[tuple[torch.Tensor, ...]] | None = None

    def replay(self) -> None:
        self.ready = [tuple(x.clone() for x in made) for made in self.seen]

    def supports(self, head_dim: int, dtype: torch.dtype) -> str | None:
        return self.kernel.supports(head_dim, dtype)

    def supports_patch(self, patch: Patch) -> str | None:
        return self.kernel.supports_patch(patch)

    def forward(self, *args: Any, **options: Any) -> Any:
        return self._one(self.kernel.forward, *args, **options)

    def backward(self, *args: Any, **options: Any) -> Any:
        return self._one(self.kernel.backward, *args, **options)

    def _one(self, compute: Any, *args: Any, **options: Any) -> Any:
        if self.ready is not None:
            return self.ready.pop(0)
        made = compute(*args, **options)
        self.seen.append(tuple(x.clone() for x in made))
        return made


class Allocation(NamedTuple):
    """Bytes that an operator took while an instruction ran."""

    instruction: str
    operator: str
    nbytes: int


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator that gives new memory, or must convert an operand first, for which it takes some."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.instruction = ""
        self.found: list[Allocation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        known = {x.untyped_storage().data_ptr() for x in given}
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                self.found.append(Allocation(self.instruction, str(func), x.untyped_storage().nbytes()))
        widest = max((x.dtype.itemsize for x in given), default=0)
        if func is not torch.ops.aten.copy_.default:
            for x in given:
                if x.dtype.itemsize < widest and x.dim() > 0:
                    self.found.append(Allocation(self.instruction, str(func), x.numel() * widest))
        return made


class Canning(ContextParallel):
    """With a canned kernel."""

    canned: Canned

    def kernel(self, device: torch.device) -> AttentionKernel:
        return self.canned


def allocations(here: Here, case: Case, direction: Pass) -> tuple[list[Allocation], float]:
    """Of one pass, kernels apart; and how far its result is from that of the run before."""
    cp = Canning(transport=here.base.transport or "auto", **case.options)
    cp.canned = Canned()
    q, k, v, dout = (x.detach() for x in parts_of(cp, case))
    request = make_request(q, k, v, cp, case.mask, None)
    own = {"q": q, "k": k, "v": v}
    if direction == "backward":
        out, lse = attention(q, k, v, here.cp(layout=case.layout, schedule="ring"), case.mask, return_lse=True)
        own = OwnTensors(own | {"dout": dout, "lse": lse, "out": out})
        assert own["delta"].dim() == 3  # worked out now, not when it is first packed
    executor = cp.executor(request, direction)
    call = ActiveCall(own, executor.views.kept_slots_in(executor.views.new_kept(CPU)))
    executor.run(call)
    kind: Kind = "q_partial" if direction == "forward" else "kv_partial"
    name = "out" if direction == "forward" else "dk"
    before = executor.result(call, kind, name).clone()
    cp.canned.replay()
    call = ActiveCall(own, executor.views.kept_slots_in(executor.views.new_kept(CPU)))
    executor._new_outputs(call)
    with Watch() as watch:
        for step, (instruction, _) in zip(executor.steps, executor.instructions, strict=True):
            watch.instruction = type(instruction).__name__
            step(call)
    return watch.found, relative_error(executor.result(call, kind, name), before)


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_is_allocated_beside_the_pool(schedule: str, direction: Pass, ranks: RankPools) -> None:
    """While a program runs; its outputs are made before, and what kernels take is theirs."""
    for found, error in ranks(3)(allocations, case_of(schedule, 3, "causal", torch.float32), direction):
        assert found == [] and error == 0.0


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_bf16_only_conversions_are(schedule: str, direction: Pass, ranks: RankPools) -> None:
    """torch converts a partial that came in bf16 to fp32 before it adds it: for a moment, one partial in fp32."""
    case = case_of(schedule, 3, "causal", torch.bfloat16)
    largest = case.q_length // 3 * case.batch * case.q_heads * case.head_dim * 4
    for found, error in ranks(3)(allocations, case, direction):
        assert error == 0.0
        for each in found:
            assert each.instruction == "Merge" and each.operator in ("aten._to_copy.default", "aten.add_.Tensor")
            assert each.nbytes <= largest


class TestTheWatch:
    """It sees what it should."""

    def seen(self, compute: Callable[[torch.Tensor, torch.Tensor], object]) -> list[tuple[str, int]]:
        wide, narrow = torch.ones(10), torch.ones(10, dtype=torch.bfloat16)
        with Watch() as watch:
            compute(wide, narrow)
        return [(each.operator, each.nbytes) for each in watch.found]

    def test_new_memory(self) -> None:
        assert self.seen(lambda wide, narrow: wide + 1) == [("aten.add.Tensor", 40)]
        assert self.seen(lambda wide, narrow: wide.contiguous().view(2, 5)[:1].add_(1)) == []
        assert self.seen(lambda wide, narrow: narrow.float())[0][1] == 40

    def test_conversion(self) -> None:
        assert self.seen(lambda wide, narrow: wide.add_(narrow)) == [("aten.add_.Tensor", 40)]
        assert self.seen(lambda wide, narrow: wide.copy_(narrow)) == []
