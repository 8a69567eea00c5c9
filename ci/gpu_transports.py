"""The transports for CUDA tensors on one GPU, for ci/gpu: `run(report)`; alone: python ci/gpu_transports.py

Several processes share the GPU: symmetric memory allows that with TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1, and they
meet over a Gloo group. Checked: that messages arrive whole and in order, that programs are exact, that a captured
pass replays on new inputs, that a rank that dies is named; measured: a put and its signal, and how much a 64 MB
move slows attention that runs beside it, by a copy engine and by SMs. Of NCCL (gpu_nccl): messages of one rank to
itself, and programs of two ranks where it lets them share the GPU. Of NVSHMEM (gpu_nvshmem): messages and programs of
two ranks, where there are two GPUs. Needs torch 2.11 or newer. Not yet run on a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "tests"), str(REPO / "ci")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from gpu_clock import stream_seconds  # noqa: E402
from gpu_messages import whole_messages  # noqa: E402
from gpu_nccl import NotHere, nccl_messages, nccl_programs  # noqa: E402
from gpu_nvshmem import NVSHMEM_RANKS, nvshmem_messages, nvshmem_programs, why_not  # noqa: E402
from gpu_programs import worst_error  # noqa: E402

from tokenring import Causal, ContextParallel, PeerLost, attention, capture  # noqa: E402
from tokenring.backends import nccl, nvshmem, symmetric  # noqa: E402
from tokenring.backends.choice import size_text, time_text  # noqa: E402
from tokenring.backends.devices import device_of  # noqa: E402
from tokenring.backends.symm import SymmTransport  # noqa: E402
from tokenring.planner.transfers_worker import samples_of  # noqa: E402
from tokenring.schedule.ir import REQUESTS  # noqa: E402

Report = Callable[[str, str, str, "bool | None"], None]  # name, value, limit, met: see gpu_report
MOVED_BYTES = 64 << 20
SLOWER_AT_MOST = 1.02
SM_COPY_BLOCKS = 8  # of a copy as NCCL makes it, by a few thread blocks
CALLS = 20
RANKS = (2, 4)
SCHEDULES = ("ring", "tokenring", "direct-q", "direct-kv", "ulysses")
SECONDS = 20.0  # for each check: two that hang leave time for the others
STEP_SECONDS = 0.01  # of a ring's step: larger messages are not measured
PEER_SECONDS = 10.0  # for a rank that is waited for: shorter, so that it is named
SETTINGS = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2",  # NCCL 2.30 or newer; few CTAs, as ranks share the SMs
}  # fmt: skip
OVER_NVSHMEM = {"TORCH_SYMMMEM": nvshmem.BACKEND}  # what symmetric memory is, in the whole process
Heard = dict[int, "tuple[bool | None, str]"]  # by rank: whether it went well (None: not here), and what it says


def run(report: Report) -> None:
    """All of it, in processes of their own; what cannot run here is reported, and nothing raises."""
    parts = list(PARTS)
    if reason := symmetric.unavailable():
        report("symmetric memory", f"not run: {reason}", "", False)
        parts = []
    if reason := nccl.unavailable():
        report("nccl", f"not here: {reason}", "", None)
    else:
        parts += NCCL_PARTS
    for name, check, ranks in parts:
        for world_size in ranks:
            title = f"{name}, {world_size} ranks on one GPU" if world_size > 1 else name
            well, found = in_processes(check, world_size)
            report(title, found, "", well)
    if reason := why_not():
        report("nvshmem", f"not here: {reason}", "", None)
        return
    for name, check in NVSHMEM_PARTS:
        well, found = in_processes(check, NVSHMEM_RANKS, SETTINGS | OVER_NVSHMEM)
        report(f"{name}, {NVSHMEM_RANKS} ranks", found, "", well)


def in_processes(
    check: Callable[[int], str], world_size: int, settings: Mapping[str, str] = SETTINGS
) -> tuple[bool | None, str]:
    """Whether it went well on all ranks within its time, and what is said of it. settings: of their environment."""
    context = mp.get_context("spawn")
    answers: Any = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (check, world_size, f"{folder}/store", answers)
        processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(world_size)]
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        for each in processes:
            each.start()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        heard = answers_of(processes, answers, SECONDS)
        for each in processes:
            each.kill()
            each.join()
    return summed_up(heard, world_size)


def summed_up(heard: Heard, world_size: int) -> tuple[bool | None, str]:
    """What rank 0 says, or the first that fails; None and the reason where a rank says that this cannot be here.

    The other ranks may then fail in whatever way, for want of that one.
    """
    if absent := [text for well, text in heard.values() if well is None]:
        return None, f"not here: {absent[0]}"
    failed = [f"rank {rank}: {text}" for rank, (well, text) in sorted(heard.items()) if not well]
    if silent := [rank for rank in range(world_size) if rank not in heard]:
        failed.append(f"no answer of ranks {silent} within {SECONDS:g} s")
    return (False, failed[0]) if failed else (True, heard[0][1])


def answers_of(processes: Sequence[Any], answers: Any, seconds: float) -> Heard:
    """By rank, whether it went well and what it says: of those that answer in time and before they end."""
    deadline, heard = time.monotonic() + seconds, dict[int, "tuple[bool | None, str]"]()
    while len(heard) < len(processes) and time.monotonic() < deadline:
        alive = any(each.is_alive() for each in processes)  # before looking: what they said in the end counts
        if not answers.empty():
            rank, well, text = answers.get()
            heard[rank] = well, text
        elif alive:
            time.sleep(0.05)
        else:
            break
    return heard


def _rank(rank: int, check: Callable[[int], str], world_size: int, file: str, answers: Any) -> None:
    try:
        torch.cuda.set_device(0)
        store = dist.FileStore(file, world_size)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        answers.put((rank, True, check(rank)))
    except NotHere as reason:
        answers.put((rank, None, str(reason)))
    except BaseException:
        answers.put((rank, False, traceback.format_exc().strip().splitlines()[-1][:300]))
    os._exit(0)  # a driver that is in trouble must not hold us up


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
    return "10 replays, each with its own contents"


def captured(rank: int) -> str:
    """Captured calls, both passes, give at each launch what calls give; also with calls between, on other streams."""
    world, made, device = dist.get_world_size(), transport(), device_of("cuda")
    for schedule in ("ring", "tokenring", "direct-kv"):
        with ContextParallel(schedule=schedule, transport=made, kernel="reference") as cp:
            q, k, v = (torch.zeros(1, 256, 4, 64, device="cuda", requires_grad=True) for _ in range(3))
            graphs = capture(q, k, v, cp, Causal())
            streams = [device.new_stream() for _ in range(3)]
            for turn in range(6):
                generator = torch.Generator().manual_seed(turn * world + rank)
                given = [torch.randn(1, 256, 4, 64, generator=generator).cuda() for _ in range(4)]
                torch.cuda.synchronize()
                results = []
                for at, launches in enumerate((True, False, True)):
                    with device.on(streams[at]):
                        q, k, v = (x.clone().requires_grad_() for x in given[:3])
                        out = graphs(q, k, v)[0] if launches else attention(q, k, v, cp, Causal())
                        grads = torch.autograd.grad(out, (q, k, v), given[3])
                        results.append([x.detach().clone() for x in (out, *grads)])
                torch.cuda.synchronize()
                for each in results:
                    same = [torch.equal(x, y) for x, y in zip(each, results[1], strict=True)]
                    assert all(same), (schedule, turn, same)
    made.close()
    return "3 schedules, both passes: 12 launches each, to the bit what calls between them give"


def dies(rank: int) -> str:
    """Rank 1 goes; rank 0, whose stream waits for it, is told and not left waiting."""
    made = transport()
    heap = made.allocate(1 << 20)
    assert heap is not None
    made.begin(made.place([(1 - rank, REQUESTS, heap[: 1 << 20])]))
    dist.barrier()
    if rank == 1:
        return "gone"  # and with it its process
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


PARTS: tuple[tuple[str, Callable[[int], str], tuple[int, ...]], ...] = (
    ("symmetric memory, messages", messages, RANKS),
    ("symmetric memory, programs", programs, RANKS),
    ("symmetric memory, a captured exchange", replays, (2,)),
    ("symmetric memory, captured calls", captured, RANKS),
    ("symmetric memory, a rank that dies", dies, (2,)),
    ("put, signal and wait", put_and_signal, RANKS),
    ("attention beside a move", beside_attention, (1,)),
)
NCCL_PARTS: tuple[tuple[str, Callable[[int], str], tuple[int, ...]], ...] = (
    ("nccl, messages of a rank to itself", nccl_messages, (1,)),
    ("nccl, programs", nccl_programs, (2,)),
)
NVSHMEM_PARTS: tuple[tuple[str, Callable[[int], str]], ...] = (
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
