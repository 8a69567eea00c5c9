"""Who goes by transports that were measured: "auto", on all ranks alike, by rank 0's table and the first call."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import symm_ranks
import torch
import torch.distributed as dist
from cases import Case as Calls
from cases import Local, check_exact, compute
from patience import patient
from ranks import Here, RankPools
from said import said
from test_choice import MB
from test_transfers import CROSSING, GLOO, KEY, SHM

import tokenring as tr
from tokenring import ContextParallel
from tokenring.backends import table_keys
from tokenring.backends.registry import make_transport
from tokenring.backends.table_keys import transfers_key
from tokenring.backends.transports import auto_cuda as cuda
from tokenring.backends.transports.auto import Preferring, choice_of
from tokenring.sequence.workload import Workload
from tokenring.tables.transport_choice import TransportChoice
from tokenring.tables.transport_times import Transfers, keep, to_json

# ---------- "auto" on the CPU


def workload(tokens: int) -> Workload:
    return Workload(1, tokens, tokens, 2, 2, 32)


def calls(tokens: int) -> Calls:
    return Calls(2, "tokenring", "zigzag", "causal", 2, 2, 1, 32, torch.float32, None, given_length=tokens)


def keeps(here: Here, tables: dict[int, str], home: str) -> None:
    """A cache of its own for each rank, with these tables in it."""
    os.environ["XDG_CACHE_HOME"] = f"{home}/{here.rank}"
    if here.rank in tables:
        path = keep(transfers_key("cpu", "reached", here.world_size), SHM)
        assert path is not None
        path.write_text(tables[here.rank])


def text(transfers: Transfers, ranks: int = 2) -> str:
    return to_json(transfers_key("cpu", "reached", ranks), transfers)


def goes_by(here: Here, tables: dict[int, str], home: str, tokens: int) -> tuple[str, str, list[str], Local]:
    """What is taken for a call, its reason, what is logged, and the call's results."""
    keeps(here, tables, home)
    with said() as heard, ContextParallel(schedule="tokenring", timeout_seconds=patient(10.0)) as cp:
        found = compute(cp, calls(tokens))
        transport: Any = cp.transport
        return type(transport.now).__name__, transport.why, heard, found


TAKEN = {
    "nobody has any": ({}, "ShmTransport", ""),
    "all say shm": ({0: SHM, 1: SHM}, "ShmTransport", "measured: shm "),
    "all say gloo": ({0: GLOO, 1: GLOO}, "GlooTransport", "measured: gloo "),
    "rank 0 says gloo": ({0: GLOO, 1: SHM}, "GlooTransport", "measured: gloo "),
    "rank 0 says shm": ({0: SHM, 1: GLOO}, "ShmTransport", "measured: shm "),
    "rank 0 alone": ({0: GLOO}, "GlooTransport", "measured: gloo "),
    "rank 1 alone": ({1: GLOO}, "ShmTransport", ""),
}


@pytest.mark.parametrize("who", TAKEN)
def test_all_ranks_go_by_rank_0(who: str, ranks: RankPools, tmp_path: Path) -> None:
    tables, name, why = TAKEN[who]
    with ranks.expendable(2) as some:
        found = some(goes_by, {rank: text(each) for rank, each in tables.items()}, str(tmp_path), 32)
    assert [each[0] for each in found] == [name] * 2, found
    assert found[0][1] == found[1][1] and found[0][1].startswith(why) and bool(found[0][1]) == bool(why)
    for _, reason, heard, _ in found:
        assert heard == ([f"transport 'auto' takes {name[:-9].lower()}: {reason}"] if why else [])
    check_exact(calls(32).whole([each[-1] for each in found]), calls(32).reference())


def own(self: Preferring, domain: Any, unavailable: Any, rank: int, ranks: int, gather: Any) -> TransportChoice:
    """A mutant: each rank goes by its own table."""
    return choice_of(self.kind, domain, unavailable, ranks, self._message_bytes)


def differ(here: Here, tables: dict[int, str], home: str) -> str:
    keeps(here, tables, home)
    Preferring._chosen = own  # type: ignore[method-assign]
    try:
        made: Any = make_transport("auto", dist.group.WORLD, patient(3.0))  # type: ignore[arg-type]
    except tr.PeerLost as error:
        return str(error)
    return type(made.now).__name__


def test_ranks_that_go_by_their_own_tables_part(ranks: RankPools, tmp_path: Path) -> None:
    with ranks.expendable(2) as some:
        first, second = some(differ, {0: text(GLOO), 1: text(SHM)}, str(tmp_path))
    assert second == "ShmTransport" and "did not come within" in first


def test_the_first_call_decides(ranks: RankPools, tmp_path: Path) -> None:
    """By what a ring of it sends in a step."""
    small, large = workload(32), workload(4096)
    assert (small.ring_bytes(2), large.ring_bytes(2)) == (2 * 32 * 2 * 32 * 4 // 2, MB)
    with ranks.expendable(2) as some:
        for tokens, name in ((32, "GlooTransport"), (4096, "ShmTransport")):
            found = some(goes_by, {0: text(CROSSING)}, str(tmp_path / str(tokens)), tokens)
            assert [each[0] for each in found] == [name] * 2
            assert found[0][1].endswith(" at 8 KB" if tokens == 32 else " at 1 MB"), found[0][1]


def early(here: Here, tables: dict[int, str], home: str) -> tuple[str, str]:
    keeps(here, tables, home)
    with ContextParallel(timeout_seconds=patient(10.0)) as cp:
        transport: Any = cp.transport
        return type(transport.now).__name__, transport.why


def test_before_any_call_what_is_faster_at_every_size(ranks: RankPools, tmp_path: Path) -> None:
    with ranks.expendable(2) as some:
        found = some(early, {0: text(GLOO)}, str(tmp_path / "gloo"))
        assert found == [("GlooTransport", "measured: gloo 40000 µs against shm 80000 µs at 64 MB and less")] * 2
        name, why = some(early, {0: text(CROSSING)}, str(tmp_path / "crossing"))[1]
    assert name == "ShmTransport" and why.endswith("which is faster is a matter of size, here unknown")


@pytest.mark.parametrize("spoilt", ["", "{", text(GLOO, ranks=3), text(GLOO).replace('"version": 1', '"version": 0')])
def test_a_broken_cache_stops_nobody(spoilt: str, ranks: RankPools, tmp_path: Path) -> None:
    """Rank 0's is broken, rank 1's says something else: shared memory on both, with one note."""
    with ranks.expendable(2) as some:
        found = some(goes_by, {0: spoilt, 1: text(GLOO)}, str(tmp_path), 32)
    assert [each[0] for each in found] == ["ShmTransport"] * 2
    assert found[0][1] == found[1][1] and f"{tmp_path}/0/tokenring/transports-" in found[0][1]
    assert "is not used: " in found[0][1] and found[0][1].endswith("makes another")
    assert [len(each[2]) for each in found] == [2, 1], "rank 0 has read it, both say what they take"


def test_what_others_have_is_not_read(ranks: RankPools, tmp_path: Path) -> None:
    with ranks.expendable(2) as some:
        found = some(goes_by, {1: "{"}, str(tmp_path), 32)
    assert [each[:3] for each in found] == [("ShmTransport", "", [])] * 2


def planned(here: Here, tables: dict[int, str], home: str) -> str:
    keeps(here, tables, home)
    x = torch.zeros(1, 32, 2, 32)
    with ContextParallel(schedule="auto:ring,direct-q", timeout_seconds=patient(20.0)) as cp:
        tr.attention(x, x, x, cp, tr.Causal())
        return tr.plan(x, x, x, cp, tr.Causal()).reason


def test_plans_say_that_it_was_measured(ranks: RankPools, tmp_path: Path) -> None:
    with ranks.expendable(2) as some:
        for each in some(planned, {0: text(GLOO)}, str(tmp_path / "a")):
            assert "; measured: gloo " in each and " against shm " in each and each.endswith(" at 16 KB"), each
        assert all("measured: " not in each and "rule: " not in each for each in some(planned, {}, str(tmp_path / "b")))


# ---------- "auto" on CUDA, with stand-ins for both transports


class AutoByTable(symm_ranks.AutoOnCpu):
    """As on GPUs that reach each other."""

    _choose = cuda.CudaTransport._choose


def on_cuda(here: Here, tables: dict[int, str], home: str, message_bytes: int) -> tuple[str, str]:
    symm_ranks.register()
    os.environ["XDG_CACHE_HOME"] = f"{home}/{here.rank}"
    key = replace(KEY, kind="cuda", ranks=here.world_size)
    table_keys.transfers_key = lambda kind, domain, ranks: replace(key, domain=domain)
    cuda._facts = lambda: {"boot_id": "", "device": None, "symm": None, "nccl": None}
    if here.rank in tables:
        path = keep(key, SHM)
        assert path is not None
        path.write_text(tables[here.rank])
    assert dist.group.WORLD is not None
    made = AutoByTable(dist.group.WORLD, 5.0, message_bytes)
    made.close()
    return type(made.now).__name__, made.why


def test_cuda_goes_by_rank_0_too(ranks: RankPools, tmp_path: Path) -> None:
    key = replace(KEY, kind="cuda", ranks=2)
    crossing = Transfers({"symm": CROSSING.samples["shm"], "nccl": CROSSING.samples["gloo"]})
    with ranks.expendable(2) as some:
        tables = {0: to_json(key, crossing), 1: "broken"}
        for message_bytes, found in ((4096, ("GlooTransport", "measured: nccl 30 µs against symm 90 µs at 4 KB")),
                                     (MB, ("OnCpu", "measured: symm 100 µs against nccl 300 µs at 1 MB"))):  # fmt: skip
            assert some(on_cuda, tables, str(tmp_path / str(message_bytes)), message_bytes) == [found] * 2
        name, why = some(on_cuda, {1: tables[0]}, str(tmp_path / "b"), 4096)[0]
        assert name == "OnCpu" and why.startswith("rule: every two ranks reach each other's memory: ")
        name, why = some(on_cuda, {0: "broken"}, str(tmp_path / "c"), 4096)[1]
        assert name == "OnCpu" and why.startswith("rule: ") and "is not used: this is not a table of transports" in why
