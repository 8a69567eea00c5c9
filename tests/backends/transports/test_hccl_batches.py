"""Transport `hccl/batch`: exact over the emulated HcclBatchSendRecv, with two communicators a rank; its emulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ascend.hccl import HcclGroup
from ascend.hccl_ledger import HcclError, ledger, limits
from ascend.hccl_ranks import fresh, kept_transport, run_case, small_case
from ascend.ranks import NpuPools
from cases import Case, check_bytes, check_exact
from ranks import Here

from tokenring import ConfigurationError, PeerLost
from tokenring.ir.schedule_data import REQUESTS
from tokenring.lowering.backend_names import transport_target

BATCH = "hccl/batch"


def exact(here: Here, case: Case, streams: int | None) -> tuple[Any, list[tuple[str, int]]]:
    """Both passes, and the communicators that this rank has made for them."""
    found = run_case(here, case, BATCH, streams=streams)
    return found, [(each.peers, each.nbytes) for each in ledger.communicators]


@pytest.mark.parametrize(
    ("ranks", "schedule", "mask", "streams"),
    [
        (2, "ring", "causal", None), (4, "tokenring", "causal", 1), (3, "direct-kv", "causal", 1),
        (3, "direct-q", "full", None),
    ],
)  # fmt: skip
def test_exact_with_two_communicators(
    ranks: int, schedule: str, mask: str, streams: int | None, npus: NpuPools
) -> None:
    case = small_case(ranks, schedule, mask)
    found = npus(ranks)(exact, case, streams)
    parts = [each for each, _ in found]
    check_exact(case.whole(parts), case.reference())
    check_bytes(case, case.make_schedule(), parts)
    nbytes = transport_target(BATCH).connection_bytes
    for _, made in found:
        assert 1 <= len(made) <= 2 and set(made) == {("all", nbytes)}, made


def group_of(here: Here) -> tuple[Any, HcclGroup]:
    """The transport, with its links from each rank to each, and the group of its requests."""
    here.memory.pop(BATCH, None)
    moved: Any = kept_transport(here, BATCH)
    ranks = range(moved.world_size)
    moved.prepare([(a, b, REQUESTS) for a in ranks for b in ranks if a != b], torch.device("npu"))
    return moved, moved._groups[REQUESTS]


def npu(*values: float) -> torch.Tensor:
    return torch.tensor(values).to("npu")


def refused(here: Here, what: str) -> str:
    """What the emulated HCCL says to a list of tasks that the real one does not take, or waits for in vain."""
    _, group = group_of(here)
    peer, one, two = 1 - here.rank, npu(1.0, 2.0), npu(3.0, 4.0)
    limits.execute = 0.5
    tasks: dict[str, Any] = {
        "same": (["isend", "isend"], [one, two], [peer, peer]),
        "itself": (["isend"], [one], [here.rank]),
        "kind": (["send"], [one], [peer]),
        "lengths": (["isend", "irecv"], [one], [peer]),
        "strided": (["isend"], [npu(1.0, 2.0, 3.0)[::2]], [peer]),
        "both send": (["isend"], [one], [peer]),
        "sizes": (["isend", "irecv"], [one, two[: 1 + here.rank]], [peer, peer]),
    }
    try:
        group.batch_isend_irecv(*tasks[what]).wait()
    except HcclError as error:
        return str(error)
    finally:
        here.memory.pop(BATCH, None)
    return ""


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("same", "two tasks of one kind with the same rank"), ("itself", "has no peer"), ("kind", "neither isend nor"),
        ("lengths", "2 kinds, 1 tensors"), ("strided", "not contiguous"), ("both send", "HCCL_EXEC_TIMEOUT"),
        ("sizes", "the counts differ"),
    ],
)  # fmt: skip
def test_tasks_that_hccl_refuses(what: str, says: str, npus: NpuPools) -> None:
    with npus.expendable(2) as some:
        texts = some(refused, what)
    assert any(says in text for text in texts), texts


def crossed(here: Here) -> str:
    """Three ranks, of which each sends to both others, and receives from one of them in its next batch only."""
    _, group = group_of(here)
    limits.execute = 1.0
    up, down = (here.rank + 1) % 3, (here.rank - 1) % 3
    into = [npu(0.0), npu(0.0)]
    first = (["isend", "isend", "irecv"], [npu(here.rank + 1.0), npu(here.rank + 4.0), into[0]], [down, up, down])
    try:
        works = [group.batch_isend_irecv(*first), group.batch_isend_irecv(["irecv"], [into[1]], [up])]
        for work in works:
            work.wait()
    except HcclError as error:
        return str(error)
    finally:
        here.memory.pop(BATCH, None)
    return ""


def test_a_batch_sends_the_nearest_first_and_waits_for_all_of_it(npus: NpuPools) -> None:
    """Messages of one batch that the other end has in its next one hang, and the rank that waits is named."""
    with npus.expendable(3) as some:
        texts = some(crossed)
    assert all("HCCL_EXEC_TIMEOUT: rank" in text for text in texts), texts


# ---------- the transport's own refusals


def unprepared(here: Here) -> list[str]:
    moved, _ = group_of(here)
    found = []
    for act in (moved.send, moved.recv):
        with pytest.raises(ConfigurationError) as caught:
            act(npu(1.0), 1 - here.rank, "partials", "q0")
        found.append(str(caught.value))
    return found


def test_messages_need_their_links(npus: NpuPools) -> None:
    for rank, texts in enumerate(npus(2)(unprepared)):
        assert texts[0].startswith(f"send of q0: ranks {rank} and {1 - rank} have no connection for it (partials)")
        assert texts[1].startswith(f"receive of q0: ranks {1 - rank} and {rank} have no connection")


def late(here: Here) -> str:
    """A rank that does not come to the first contact is named, after HCCL's limit for it."""
    fresh(2.0)
    here.memory.pop(BATCH, None)
    moved: Any = kept_transport(here, BATCH)
    limits.connect = 1.0
    if here.rank == 1:
        with pytest.raises(PeerLost):
            moved.exchange(b"", "the others' wait")
        return ""
    with pytest.raises(Exception) as caught:
        moved.prepare([(0, 1, REQUESTS)], torch.device("npu"))
    here.memory.pop(BATCH, None)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_who_does_not_come_is_named(npus: NpuPools) -> None:
    with npus.expendable(2) as some:
        text = some(late)[0]
    assert text.startswith("PeerLost") and "HCCL_CONNECT_TIMEOUT" in text and "connected (requests)" in text


def test_memory_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "50")
    assert transport_target(BATCH).connection_bytes == 100 << 20
