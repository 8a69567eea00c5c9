"""The transports for CUDA tensors on one GPU, for ci/gpu: `run(report)`; alone: python hardware/gpu/gpu_transports.py

Several processes share the GPU: symmetric memory allows that with TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1, and they
meet over a Gloo group. One set of processes for each number of ranks runs all checks (gpu_team), first a smoke of two
ranks (gpu_smoke). Checked: that messages arrive whole and in order, that programs are exact, that a captured pass
replays on new inputs, that a rank that dies is named; measured: a put and its signal, linear layers beside torch's
fused operators (gpu_linears), and how much a 64 MB move slows attention that runs beside it, by a copy engine and by
SMs. Of NCCL (gpu_nccl): messages of one rank to itself, and programs of two ranks where it lets them share the GPU. Of
NVSHMEM (gpu_nvshmem): messages and programs of two ranks, where there are two GPUs. Needs torch 2.11 or newer. Not yet
run on a GPU.
"""

from __future__ import annotations

import importlib.util
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "tests/support"), str(REPO / "tests/fakes"), str(REPO / "hardware" / "gpu")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from gpu_clock import stream_seconds  # noqa: E402
from gpu_linears import layer  # noqa: E402
from gpu_messages import whole_messages  # noqa: E402
from gpu_nccl import nccl_messages, nccl_programs  # noqa: E402
from gpu_nvshmem import NVSHMEM_RANKS, nvshmem_messages, nvshmem_programs, why_not  # noqa: E402
from gpu_programs import worst_error  # noqa: E402
from gpu_report import NO_TIME, Report, Shares  # noqa: E402
from gpu_smoke import captured_calls, smoked  # noqa: E402
from gpu_team import Check, Heard, Kind, Leaves, Teams  # noqa: E402

from tokenring import PeerLost  # noqa: E402
from tokenring.backends.devices import device_of  # noqa: E402
from tokenring.backends.transports import nccl, nvshmem, symmetric  # noqa: E402
from tokenring.backends.transports.symm import SymmTransport  # noqa: E402
from tokenring.cli.rates.transports_worker import samples_of  # noqa: E402
from tokenring.ir.schedule_data import REQUESTS  # noqa: E402
from tokenring.tables.transport_choice import size_text, time_text  # noqa: E402

MOVED_BYTES = 64 << 20
SLOWER_AT_MOST = 1.02
SM_COPY_BLOCKS = 8  # of a copy as NCCL makes it, by a few thread blocks
CALLS = 20
RANKS = (2, 4)
SCHEDULES = ("ring", "tokenring", "direct-q", "direct-kv", "ulysses")
SECONDS = 130.0  # for all checks
LEAST_SECONDS = 20.0  # for each: a rank that waits names its peer before that
SMOKE_SECONDS = 40.0  # with the first kernels that each process loads
STEP_SECONDS = 0.01  # of a ring's step: larger messages are not measured
PEER_SECONDS = 10.0  # for a rank that is waited for: shorter, so that it is named
SETTINGS = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2",  # NCCL 2.30 or newer; few CTAs, as ranks share the SMs
}  # fmt: skip
OVER_NVSHMEM = {"TORCH_SYMMMEM": nvshmem.BACKEND}  # what symmetric memory is, in the whole process
Part = tuple[str, Check, tuple[int, ...]]  # a line's name, what finds it, and of how many ranks


def run(report: Report, seconds: float = SECONDS) -> None:
    """All of it, in processes of their own; what cannot run here is reported, and nothing raises."""
    first, later = [replace(each, least_seconds=SMOKE_SECONDS) for each in asked((SMOKE,))], asked(PARTS)
    if reason := symmetric.unavailable():
        report("symmetric memory", f"not run: {reason}", "", False)
        first, later = [], []
    over_nccl: list[Asked] = []
    if reason := nccl.unavailable():
        report("nccl", f"not here: {reason}", "", None)
    else:
        over_nccl = asked(NCCL_PARTS)
    over_nvshmem: list[Asked] = []
    if reason := why_not():
        report("nvshmem", f"not here: {reason}", "", None)
    else:
        kind = Kind(NVSHMEM_RANKS, tuple((SETTINGS | OVER_NVSHMEM).items()))
        over_nvshmem = [Asked(f"{name}, {NVSHMEM_RANKS} ranks", check, kind) for name, check in NVSHMEM_PARTS]
    run_checks(report, [*first, *over_nccl, *later, *over_nvshmem], seconds, Teams())


@dataclass(frozen=True)
class Asked:
    """A line: its name, what finds it, and the processes that this runs in."""

    name: str
    check: Check
    kind: Kind
    least_seconds: float = LEAST_SECONDS


def asked(parts: Iterable[Part]) -> list[Asked]:
    """All of two ranks before those of four: what is wrong at two is easier to read."""
    pairs = [(part, world_size) for part in parts for world_size in part[2]]
    pairs.sort(key=lambda pair: pair[1] > 2)  # stable
    return [
        Asked(f"{name}, {size} ranks on one GPU" if size > 1 else name, check, Kind(size, tuple(SETTINGS.items())))
        for (name, check, _), size in pairs
    ]


def run_checks(report: Report, checks: Sequence[Asked], seconds: float, teams: Teams) -> None:
    """Each gets its share of what is left, but enough for a rank that waits to name its peer."""
    deadline, shares = time.monotonic() + seconds, Shares(seconds, len(checks))
    try:
        for each in checks:
            share, left = shares.next(), deadline - time.monotonic()
            if left <= 1:
                report(each.name, NO_TIME, "", False)
                continue
            try:
                most = min(max(each.least_seconds, share), left)
                heard = teams.run(each.kind, each.check, most, left)
                well, found = summed_up(heard, each.kind.ranks, most)
            except Exception as error:  # such as no process that could be started
                traceback.print_exc()
                well, found = False, f"{type(error).__name__}: {error}"
            report(each.name, found, "", well)
    finally:
        teams.close()


def summed_up(heard: Heard, world_size: int, seconds: float = LEAST_SECONDS) -> tuple[bool | None, str]:
    """What rank 0 says, or the first that fails; None and the reason where a rank says that this cannot be here.

    The other ranks may then fail in whatever way, for want of that one. seconds: that they had.
    """
    if absent := [text for well, text in heard.values() if well is None]:
        return None, f"not here: {absent[0]}"
    failed = [f"rank {rank}: {text}" for rank, (well, text) in sorted(heard.items()) if not well]
    if silent := [rank for rank in range(world_size) if rank not in heard]:
        failed.append(f"no answer of ranks {silent} within {seconds:.0f} s")
    return (False, failed[0]) if failed else (True, heard[0][1])


def transport(seconds: float = PEER_SECONDS) -> SymmTransport:
    assert dist.group.WORLD is not None
    return SymmTransport(dist.group.WORLD, seconds)


# ---------- what must be so


def messages(rank: int) -> str:
    """Both channels, all pairs, places that are used again and again; every byte."""
    made = transport()
    told = whole_messages(made, "cuda")
    made.close()
    return told


def programs(rank: int) -> str:
    """Both passes over symmetric memory, against one call in float64 on the CPU."""
    made = transport()
    worst = worst_error(made, "cuda", SCHEDULES)
    made.close()
    return f"{len(SCHEDULES)} schedules, both passes: error {worst:.1e} against float64"


def replays(rank: int) -> str:
    """A captured exchange brings new contents at each replay."""
    made, size, peer = transport(), 1 << 20, dist.get_world_size() - 1 - rank
    heap = made.allocate(size)
    assert heap is not None
    place, data = heap[:size], torch.zeros(size, dtype=torch.uint8, device="cuda")
    placement, result = made.place([(peer, REQUESTS, place)]), torch.zeros_like(data)

    def exchange() -> None:
        made.begin(placement)
        handles = [made.recv(place, peer, REQUESTS, ""), made.send(data, peer, REQUESTS, "")]
        for handle in handles:
            handle.wait()
        result.copy_(place)

    exchange()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        exchange()
    for turn in range(10):
        data.fill_(turn + 20 * rank)
        graph.replay()
        assert bool((result == turn + 20 * peer).all()), f"replay {turn}"
    made.close()
    return "10 replays, each with its own contents"


def captured(rank: int) -> str:
    """Captured calls, both passes, give at each launch what calls give; also with calls between, on other streams."""
    made = transport()
    told = captured_calls(made, ("ring", "tokenring", "direct-kv"), 6)
    made.close()
    return told


def smoke(rank: int) -> str:
    """What everything else rests on, least first."""
    return smoked(transport, "cuda")


def dies(rank: int) -> str:
    """Rank 1 goes; rank 0, whose stream waits for it, is told and not left waiting."""
    made = transport()
    heap = made.allocate(1 << 20)
    assert heap is not None
    made.begin(made.place([(1 - rank, REQUESTS, heap[: 1 << 20])]))
    dist.barrier()
    if rank == 1:
        raise Leaves("gone")
    began = time.monotonic()
    made.recv(heap[: 1 << 20], 1, REQUESTS, "kv1").wait()
    torch.cuda.synchronize()
    try:
        made.exchange(b"", "the next call")
    except PeerLost as error:
        assert error.rank == 1, error
        return f"rank 1 named after {time.monotonic() - began:.1f} s"
    raise AssertionError("nobody was told")


# ---------- what is measured


def put_and_signal(rank: int) -> str:
    """A ring's step, as `tokenring rates --transports` measures it. Processes share the GPU's time: an upper limit."""
    made = transport()
    found = samples_of({"symm": made}, torch.device("cuda", torch.cuda.current_device()), STEP_SECONDS)["symm"]
    made.close()
    return ", ".join(f"{size_text(each.nbytes)} {time_text(each.median)}" for each in found)


def column(rank: int) -> str:
    """A column layer: ours beside torch's fused operator."""
    return _layer("column")


def row(rank: int) -> str:
    """A row layer."""
    return _layer("row")


def _layer(operator: str) -> str:
    made = transport()
    told = layer(operator, made, "cuda")
    made.close()
    return told


def beside_attention(rank: int) -> str:
    """How much slower attention is while 64 MB move all the time: by a copy engine, and by a few blocks of SMs."""
    q = torch.randn(1, 32, 8192, 128, dtype=torch.bfloat16, device="cuda")
    source = torch.ones(MOVED_BYTES, dtype=torch.uint8, device="cuda")
    target, side = torch.empty_like(source), device_of("cuda").new_stream(high_priority=True)
    host = torch.empty(MOVED_BYTES, dtype=torch.uint8, pin_memory=True)

    def attend() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    def beside(move: Callable[[], object]) -> float:
        """Seconds of attention while moves follow each other on a stream of their own."""

        def queue() -> None:
            with torch.cuda.stream(side):
                for _ in range(8):
                    move()

        return stream_seconds(attend, CALLS, queue)

    alone = beside(lambda: None)
    # Inside one GPU the driver may copy with SMs: only a copy that leaves the device is sure to take an engine.
    moves: dict[str, Callable[[], object]] = {
        "copy engine (to the host)": lambda: host.copy_(source, non_blocking=True),
        "copy inside the GPU": lambda: target.copy_(source),
    }
    if importlib.util.find_spec("triton") is not None:
        from gpu_sm_copy import sm_copy

        moves[f"SM copy, {SM_COPY_BLOCKS} blocks"] = lambda: sm_copy(source, target, SM_COPY_BLOCKS)
    ratios = {name: beside(move) / alone for name, move in moves.items()}
    text = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
    assert ratios["copy engine (to the host)"] <= SLOWER_AT_MOST, f"attention takes {text} times as long"
    return f"attention alone {alone * 1e3:.2f} ms; beside a 64 MB move times {text}"


SMOKE: Part = ("smoke: rendezvous, message, program, capture", smoke, (2,))
PARTS: tuple[Part, ...] = (
    ("symmetric memory, messages", messages, RANKS),
    ("symmetric memory, programs", programs, RANKS),
    ("symmetric memory, a captured exchange", replays, (2,)),
    ("symmetric memory, captured calls", captured, RANKS),
    ("put, signal and wait", put_and_signal, RANKS),
    ("column layers, ours and torch's fused", column, RANKS),
    ("row layers, ours and torch's fused", row, RANKS),
    ("attention beside a move", beside_attention, (1,)),
    ("symmetric memory, a rank that dies", dies, (2,)),  # the last of its processes
)
NCCL_PARTS: tuple[Part, ...] = (
    ("nccl, messages of a rank to itself", nccl_messages, (1,)),
    ("nccl, programs", nccl_programs, (2,)),
)
NVSHMEM_PARTS: tuple[tuple[str, Check], ...] = (
    ("nvshmem, messages", nvshmem_messages),
    ("nvshmem, programs", nvshmem_programs),
)


def main() -> None:
    worst = True

    def report(name: str, value: str, limit: str, met: bool | None) -> None:
        nonlocal worst
        worst = worst and met is not False
        print(f"{'FAIL' if met is False else 'ok  '} {name}: {value}", flush=True)

    run(report)
    sys.exit(0 if worst else 1)


if __name__ == "__main__":
    main()
