"""The emulated HCCL itself: what it carries, and what it refuses where the real one hangs or gives nonsense."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ascend.hccl_ledger import MEGABYTE, HcclError, labelled, ledger, limits
from ascend.hccl_ranks import fresh
from ascend.hccl_watch import watch
from ascend.ranks import NpuPools
from patience import patient
from ranks import Here, RankError

SHORT_SECONDS = 0.7


def group(here: Here) -> Any:
    """A new emulated group of all ranks; the ledger and the limits as in the beginning."""
    fresh(8.0)
    made = dist.new_group(backend="hccl")
    dist.barrier()
    return made


def npu(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to("npu")


def space(count: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype, device="npu")


@contextmanager
def refused() -> Iterator[list[str]]:
    """The text of the HcclError that the body must raise."""
    said: list[str] = []
    with pytest.raises(HcclError) as caught:
        yield said
    said.append(str(caught.value))
    ledger.in_use.clear()
    gc.collect()
    ledger.clear()


@contextmanager
def short_limits() -> Iterator[None]:
    limits.connect = limits.execute = SHORT_SECONDS
    yield
    limits.connect = limits.execute = 8.0


@contextmanager
def environment(**values: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in values.items():
            patched.setenv(name, value)
        yield


# ---------- what it carries


def exchanged(here: Here) -> list[Any]:
    made, peer = group(here), 1 - here.rank
    into, sent = space(), npu(here.rank, 10.0)
    lower = here.rank == 0
    first = made.send([sent], peer, 7) if lower else made.recv([into], peer, 8)
    then = made.recv([into], peer, 9) if lower else made.send([sent], peer, 7)
    before = into.cpu()
    for work in (then, first):
        work.wait()
    ledger.check_all_waited()
    return [bool(before.isnan().all()), into.cpu().tolist(), [tuple(each) for each in ledger.communicators]]


def test_messages_appear_at_their_wait_whatever_their_tags(npus: NpuPools) -> None:
    """Trap 9: tags are ignored; and one communicator, lazily made, has both directions."""
    for rank, (hidden, got, made) in enumerate(npus(2)(exchanged)):
        assert hidden and got == [1.0 - rank, 10.0]
        assert [each[1:] for each in made] == [("0:1", 40 * MEGABYTE)]


def public_functions(here: Here) -> list[Any]:
    """What users call: a world of hccl alone would do the same."""
    made, peer = group(here), 1 - here.rank
    ones, into = npu(1.0, 2.0), space()
    dist.all_reduce(ones, group=made)
    outputs = [space(1), space(1)]
    dist.all_gather(outputs, npu(float(here.rank)), group=made)
    dist.all_to_all(split := [space(1), space(1)], [npu(10.0 * here.rank), npu(10.0 * here.rank + 1)], group=made)
    dist.barrier(group=made)
    after = [tuple(each)[1:] for each in ledger.communicators]
    ops = [dist.P2POp(dist.isend, npu(here.rank, 3.0), peer, made), dist.P2POp(dist.irecv, into, peer, made)]
    works = dist.batch_isend_irecv(ops)
    for work in works:
        work.wait()
    ledger.check_all_waited()
    values = [x.cpu().tolist() for x in (ones, *outputs, *split, into)]
    return [values, after, len(works), len(ledger.communicators)]


def test_collectives_and_batches_use_the_communicator_of_the_group(npus: NpuPools) -> None:
    """Traps 10 and 14: that one takes 2 × 200 MB; a batch is one work, on the same communicator."""
    for rank, (values, after, works, communicators) in enumerate(npus(2)(public_functions)):
        assert values == [[2.0, 4.0], [0.0], [1.0], [float(rank)], [10.0 + rank], [1.0 - rank, 3.0]]
        assert after == [("all", 400 * MEGABYTE)]
        assert (works, communicators) == (1, 1)


def unequal(here: Here, short: bool) -> list[Any]:
    """Gather parts of 1, 2 and 3 numbers, and sum what each rank is given of them; short: rank 0 gives one too few."""
    made, mine = group(here), here.rank + 1 - (short and here.rank == 0)
    outputs = [space(n) for n in (1, 2, 3)]
    dist.all_gather(outputs, npu(*[float(here.rank)] * mine), group=made)
    total = space(here.rank + 1)
    dist.reduce_scatter(total, [npu(*[10.0 * here.rank + n] * n) for n in (1, 2, 3)], group=made)
    ledger.check_all_waited()
    return [[x.cpu().tolist() for x in outputs], total.cpu().tolist()]


def test_parts_of_other_sizes_are_gathered_and_summed(npus: NpuPools) -> None:
    """As HcclAllGatherV and HcclReduceScatterV do."""
    for rank, (gathered, summed) in enumerate(npus(3)(unequal, False)):
        assert gathered == [[0.0], [1.0, 1.0], [2.0, 2.0, 2.0]]
        assert summed == [30.0 + 3 * (rank + 1)] * (rank + 1)


def test_a_part_too_short_is_refused(npus: NpuPools) -> None:
    with pytest.raises(RankError, match="meets rank"), npus.expendable(3) as ranks:
        ranks(unequal, True)


def stands_behind(here: Here, expected: bool, streams: int | None = None) -> bool:
    """Tell whether what rank 0 sends to rank 2 waits until rank 1 has what was sent to it before.

    Rank 1 comes after that message, which must not wait for it; or, where that is expected, after a second.
    """
    made, store = group(here), dist.distributed_c10d._get_default_store()
    limits.streams = streams
    for peer in (1, 2):  # connected beforehand
        if here.rank in (0, peer):
            (made.send([npu(1.0)], peer, 0) if here.rank == 0 else made.recv([space(1)], 0, 0)).wait()
    came, sent = f"{made.group_id} came", f"{made.group_id} sent"
    dist.barrier()
    if here.rank == 0:
        late, prompt = made.send([npu(1.0)], 1, 0), made.send([npu(2.0)], 2, 0)
        prompt.wait()
        waited = bool(store.check([came]))
        store.set(sent, "")
        late.wait()
        return waited
    if here.rank == 1:
        time.sleep(patient(1.0)) if expected else store.wait([sent], timedelta(seconds=patient(limits.execute)))
        store.set(came, "")
    made.recv([space(1)], 0, 0).wait()
    return False


def test_different_peers_overlap_and_in_one_queue_they_do_not(npus: NpuPools) -> None:
    assert not npus(3)(stands_behind, False)[0]
    assert npus(3)(in_one_queue)[0]


@pytest.mark.parametrize(("streams", "overlap"), [(2, True), (1, False)])
def test_communicators_share_the_streams_of_a_small_pool(streams: int, overlap: bool, npus: NpuPools) -> None:
    """torch_npu takes them round-robin: what stands behind a message to somebody else waits for that one."""
    assert npus(3)(stands_behind, not overlap, streams)[0] is not overlap


def in_one_queue(here: Here) -> bool:
    with environment(P2P_HCCL_BUFFSIZE="0"):
        return stands_behind(here, True)


def memory(here: Here) -> int:
    with environment(P2P_HCCL_BUFFSIZE="3"):
        made = group(here)
        for peer in range(here.world_size):
            if peer < here.rank:
                made.recv([space(1)], peer, 0).wait()
            elif peer > here.rank:
                made.send([npu(1.0)], peer, 0).wait()
        return ledger.nbytes


def test_every_pair_and_group_takes_twice_its_buffer(npus: NpuPools) -> None:
    assert npus(3)(memory) == [2 * 2 * 3 * MEGABYTE] * 3


# ---------- what it refuses


def mismatched(here: Here, how: str) -> str:
    """Rank 0 does what is right, rank 1 something else."""
    made, peer = group(here), 1 - here.rank
    wrong = here.rank == 1
    text = f"step {here.rank}, kv1" if how != "label" else f"step 2, kv{here.rank}"
    acts: dict[str, Callable[[], Any]] = {
        "label": lambda: made.recv([space(2)], peer, 0) if wrong else made.send([npu(1.0, 2.0)], peer, 0),
        "both send": lambda: made.send([npu(1.0, 2.0)], peer, 0),
        "both receive": lambda: made.recv([space()], peer, 0),
        "count": lambda: made.recv([space(3)], peer, 0) if wrong else made.send([npu(1.0, 2.0)], peer, 0),
        "dtype": lambda: (
            made.recv([space(2, torch.bfloat16)], peer, 0) if wrong else made.send([npu(1.0, 2.0)], peer, 0)
        ),
    }
    with refused() as said, labelled(text):
        acts[how]().wait()
    return said[0]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("both send", "both send, which would hang"),
        ("both receive", "both receive, which would hang"),
        ("count", "the counts differ"),
        ("dtype", "the dtypes differ"),
        ("label", "another message of the same size, which would go unnoticed"),
    ],
)
def test_ends_that_do_not_match(how: str, says: str, npus: NpuPools) -> None:
    """Trap 9: at once, with ranks and labels, not after 1836 s."""
    for rank, text in enumerate(npus(2)(mismatched, how)):
        assert says in text and text.startswith(f"rank {rank}: ") and f"rank {1 - rank}'s" in text, text
        for label in ("step 2, kv0", "step 2, kv1") if how == "label" else ("step 0, kv1", "step 1, kv1"):
            assert f"({label}; " in text


def tensors_refused(here: Here) -> list[str]:
    made, texts = group(here), []
    for each in (torch.ones(2), space(4)[::2], space(2, torch.bool), space(2, torch.complex64)):
        with refused() as said:
            made.send([each], 1 - here.rank, 0)
        texts += said
    with refused() as said, environment(HCCL_OP_EXPANSION_MODE="AIV"):  # trap 14
        made.send([npu(1.0)], 1 - here.rank, 0)
    return texts + said


def test_tensors_that_cannot_be_sent(npus: NpuPools) -> None:
    says = (
        "No backend type associated with device type cpu", "not contiguous", "no data type for torch.bool",
        "no data type for torch.complex64", "AIV does not serve send and receive",
    )  # fmt: skip
    for texts in npus(2)(tensors_refused):
        for text, wanted in zip(texts, says, strict=True):
            assert wanted in text


def touched(here: Here, how: str) -> str:
    """Rank 1 touches a buffer between post and wait."""
    made, into, sent = group(here), space(), npu(1.0, 2.0)
    with labelled("step 2, kv3"):
        work = made.send([sent], 1, 0) if here.rank == 0 else made.recv([into], 0, 0)
    if (how == "sent, written") == (here.rank == 1):
        work.wait()
        return ""
    with refused() as said:
        if how == "sent, written":
            sent.fill_(3.0)
            work.wait()
        elif how == "received, written":
            into.fill_(3.0)
            work.wait()
        elif how == "received, sent on":
            made.send([into], 0, 0)
        else:
            with watch():
                into.add(1.0)
    return said[0]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("sent, written", "rank 0: the buffer of send to rank 1 (step 2, kv3"),
        ("received, written", "rank 1: the buffer of receive from rank 0 (step 2, kv3"),
        ("received, sent on", "reads the buffer of rank 1's receive from rank 0 (step 2, kv3"),
        ("received, read", "operator aten::add.Tensor reads the buffer of rank 1's receive from rank 0 (step 2, kv3"),
    ],
)
def test_buffers_touched_before_the_wait(how: str, says: str, npus: NpuPools) -> None:
    texts = npus(2)(touched, how)
    assert says in texts[0 if how == "sent, written" else 1]


def dropped(here: Here) -> str:
    made = group(here)
    with labelled("step 5, q0"):
        work = made.send([npu(1.0)], 1, 0) if here.rank == 0 else made.recv([space(1)], 0, 0)
    if here.rank == 0:
        work.wait()
        ledger.check_all_waited()
        return ""
    del work
    with refused() as said:
        ledger.check_all_waited()
    return said[0]


def test_a_dropped_wait(npus: NpuPools) -> None:
    assert "never waited for: rank 1's receive from rank 0 (step 5, q0" in npus(2)(dropped)[1]


def alone(here: Here, connected: bool) -> str:
    """Rank 0 sends what rank 1 never receives: a send waits for its other end, too."""
    made, text = group(here), ""
    if connected:
        (made.send([npu(1.0)], 1, 0) if here.rank == 0 else made.recv([space(1)], 0, 0)).wait()
    if here.rank == 0:
        with short_limits(), refused() as said, labelled("step 1, kv0"):
            made.send([npu(1.0)], 1, 0).wait()
        text = said[0]
    dist.barrier()
    return text


def test_a_peer_that_does_not_come(npus: NpuPools) -> None:
    assert "HCCL_CONNECT_TIMEOUT: rank 0 made communicator 0:1" in npus(2)(alone, False)[0]
    text = npus(2)(alone, True)[0]
    assert "HCCL_EXEC_TIMEOUT: rank 0" in text and "send to rank 1 (step 1, kv0" in text


def late(here: Here) -> list[str]:
    """As on the device, a wait does not raise: the next call does."""
    made, texts = group(here), []
    if here.rank == 0:
        (into := space(1)).zero_()
    for work in [made.send([npu(1.0)], 1, 0) if here.rank == 0 else made.recv([space(1)], 0, 0)]:
        work.wait()
    if here.rank == 0:
        limits.late_errors = True
        with short_limits():
            assert made.recv([into], 1, 0).wait()
            texts.append(str(into.cpu().tolist()))
            with refused() as said:
                made.send([npu(1.0)], 1, 0)
        texts += said
        limits.late_errors = False
    dist.barrier()
    return texts


def test_errors_that_come_late(npus: NpuPools) -> None:
    received, text = npus(2)(late)[0]
    assert received == "[nan]" and "HCCL_EXEC_TIMEOUT" in text


def alternating_ring(here: Here, seconds: float) -> str:
    """Even ranks send first, odd ones receive first, sends of even ranks and receives in groups of their own."""
    first = group(here)
    second = dist.new_group(backend="hccl")
    after, before = (here.rank + 1) % here.world_size, (here.rank - 1) % here.world_size
    dist.barrier()
    text = ""
    limits.connect = limits.execute = seconds
    try:
        with labelled("round 0"):
            if here.rank % 2 == 0:
                works = [first.send([npu(1.0)], after, 0), second.recv([space(1)], before, 0)]
            else:
                works = [first.recv([space(1)], before, 0), second.send([npu(1.0)], after, 0)]
            for work in works:
                work.wait()
    except HcclError as error:
        text = str(error)
    ledger.in_use.clear()
    dist.barrier()
    return text


def test_a_ring_that_alternates_over_two_groups(npus: NpuPools) -> None:
    """Trap 12: fine on even rings; on odd ones the two ends of the last link are in different groups."""
    assert npus(4)(alternating_ring, 8.0) == [""] * 4
    texts = npus(3)(alternating_ring, SHORT_SECONDS)
    assert any("HCCL_CONNECT_TIMEOUT" in text and "0:2" in text for text in texts), texts


def different_collectives(here: Here) -> str:
    made = group(here)
    with refused() as said:
        dist.all_reduce(npu(*([1.0] * (1 + here.rank))), group=made)
    dist.barrier()
    return said[0]


def test_collectives_that_differ(npus: NpuPools) -> None:
    for rank, text in enumerate(npus(2)(different_collectives)):
        assert text.startswith(f"rank {rank} in ") and f"meets rank {1 - rank} in" in text
