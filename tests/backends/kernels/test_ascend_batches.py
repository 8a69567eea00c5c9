"""Trap 10: a batch of messages uses the group's communicator, and may come back as one work for all of them.

A transport that posts what stands in a row with batch_isend_irecv is exact on the emulated HCCL if each message waits
for all works of its batch; if it pairs works with messages (the mutant), it is found out.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from ascend.hccl_ledger import HcclError, labelled, ledger, limits
from ascend.hccl_ranks import fresh, run_case, small_case
from ascend.ranks import NpuPools
from cases import Case, Local, check_exact
from patience import patient
from ranks import Here

import tokenring as tr
from tokenring.backends.interfaces import Work
from tokenring.backends.transports.hccl import HcclTransport
from tokenring.lowering.target import Target

KEPT = "in batches"  # in a rank's memory


class InBatches(HcclTransport):
    """Its messages go in batches, of one group. paired: the mutant."""

    paired = False
    target = Target(early_receives=False, channels=1, pair_serial=True, grouping=True)

    def __init__(self, group: Any, timeout_seconds: float) -> None:
        super().__init__(group, timeout_seconds)
        self.batched = dist.new_group(backend="hccl")
        self.open: list[tuple[dist.P2POp, _Batched]] = []
        self.works_of: list[tuple[int, int]] = []  # messages and works of each batch

    @classmethod
    def target_in(cls, environment: Any) -> Target:
        return cls.target

    def prepare(self, links: Any, device: torch.device) -> None:
        """Batches need the communicator of the group alone."""
        self._serve(device)

    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> Work:
        self.sent_bytes[dst] += data.numel() * data.element_size()
        return self._later(dist.isend, data, dst)

    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> Work:
        return self._later(dist.irecv, data, src)

    def _later(self, act: Any, data: torch.Tensor, peer: int) -> Work:
        made = _Batched()
        self.open.append((dist.P2POp(act, data, peer, self.batched), made))
        return made

    def go(self) -> None:
        posts, self.open = self.open, []
        if not posts:
            return
        with labelled(f"batch {len(self.works_of)}"):
            works = dist.batch_isend_irecv([operation for operation, _ in posts])
        self.works_of.append((len(posts), len(works)))
        if self.paired:
            for (_, message), work in zip(posts, works, strict=False):
                message.works = [work]
        else:
            for _, message in posts:
                message.works = works


class _Batched:
    works: list[Any] = []  # noqa: RUF012  # of a message that got none

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def computed(here: Here, case: Case, paired: bool) -> tuple[Local | str, Any]:
    """A whole call, or what is found; then the batches and the communicators."""
    fresh(20.0 if not paired else 2.0)
    here.memory[KEPT] = made = InBatches(dist.group.WORLD, patient(20.0))
    made.paired = paired
    limits.execute = 20.0 if not paired else 2.0
    try:
        found: Local | str = run_case(here, case, KEPT)
    except (tr.TokenRingError, HcclError) as error:
        found = str(error)
    return found, (made.works_of, {each.peers for each in ledger.communicators})


RANKS = 2  # so that a message stands in batches of one size at both its ends: the emulation needs that


def test_10_all_works_of_a_batch_are_waited_for(npus: NpuPools) -> None:
    case = small_case(RANKS, "ring")
    found = npus(RANKS)(computed, case, False)
    assert not [part for part, _ in found if isinstance(part, str)], found
    check_exact(case.whole([part for part, _ in found]), case.reference())  # type: ignore[misc]
    for _, (batches, peers) in found:
        assert batches and all(works == 1 for _, works in batches)
        assert max(messages for messages, _ in batches) > 1
        assert peers == {"all"}


def test_10_works_that_are_paired_with_messages_are_found(npus: NpuPools) -> None:
    """Some message has no work: it is used before it has come, or never waited for."""
    with npus.expendable(RANKS) as some:
        said = [part for part, _ in some(computed, small_case(RANKS, "ring"), True)]
    says = r"before that is waited for|never waited for"
    assert any(isinstance(each, str) and re.search(says, each) for each in said), said
