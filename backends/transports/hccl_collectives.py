"""HCCL with its own collectives: exchanges go as all-to-alls and all-gathers, all other messages as over `hccl`.

An exchange (`lowering.exchanges`) then takes one operation and one communicator of all its ranks, whose buffers are
2 × HCCL_BUFFSIZE (200 MB where it is not set), in place of messages in the queues of all their pairs. HCCL chooses the
algorithm by what joins the ranks (on a mesh, all links at once) and by HCCL_ALGO. Which way is faster, hardware has to
say (docs/transports.md), so nothing takes this transport but who asks for it by name.

torch_npu's forms for lists of tensors are used, since what a rank gives and takes lies in slots of its own: they copy
through one buffer for all that is given and one for all that is taken, outside the pool.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from tokenring.backends.interfaces import Work
from tokenring.backends.transports.hccl import FIRST_CONTACT, LATE, HcclTransport, Ranks, _Handle
from tokenring.backends.transports.hccl_environment import GROUP_MEGABYTES, MEGABYTE, group_bytes
from tokenring.errors import ConfigurationError
from tokenring.lowering.target import Target


class HcclCollectivesTransport(HcclTransport):
    """A transport with exchanges as collectives, in groups of their ranks, made when a program first has one."""

    name = "hccl/collectives"
    target = replace(HcclTransport.target, collectives=True, group_bytes=2 * GROUP_MEGABYTES * MEGABYTE)

    @classmethod
    def target_in(cls, environment: Mapping[str, str]) -> Target:
        """Return its target with buffers as large as this environment asks for."""
        return replace(super().target_in(environment), group_bytes=group_bytes(environment))

    def prepare_groups(self, groups: Iterable[Ranks], device: torch.device) -> None:
        """Make the communicators of these groups, on all ranks in one order. Raises ConfigurationError, PeerLost.

        As those of pairs: HCCL blocks all their hosts until they meet.
        """
        self._serve(device)
        groups = sorted(set(groups))
        self._allow(groups=groups)
        for ranks in groups:
            if self.rank in ranks and _lane(ranks) not in self._groups:
                self._meet(ranks, device)

    def _meet(self, ranks: Ranks, device: torch.device) -> None:
        """Make the communicator of these ranks by an all-to-all of one byte."""
        group = self._make(_lane(ranks), ranks)
        mine, theirs = (self._bytes(ranks, device) for _ in range(2))
        try:
            group.alltoall(theirs, mine).wait()
        except RuntimeError as error:
            what = f"connected ranks {ranks}"
            raise self._failed(error, self._after(ranks), what, FIRST_CONTACT) from error
        self._groups[_lane(ranks)] = group

    def _bytes(self, ranks: Ranks, device: torch.device) -> list[torch.Tensor]:
        return [torch.zeros(int(rank != self.rank), dtype=torch.uint8, device=device) for rank in ranks]

    def all_to_all(
        self, sends: Mapping[int, torch.Tensor], recvs: Mapping[int, torch.Tensor], ranks: Ranks, label: str
    ) -> Work:
        """Post an all-to-all on the group of these ranks; see Transport.all_to_all."""
        group = self._group_of(ranks, [*sends.values(), *recvs.values()], label)
        for rank, data in sends.items():
            self.sent_bytes[rank] += data.nbytes
        nothing = next(iter(sends.values()))[:0]
        given, taken = ([some.get(rank, nothing) for rank in ranks] for some in (sends, recvs))
        return self._begin(lambda: group.alltoall(taken, given), (given, taken), ranks, label)

    def all_gather(self, data: torch.Tensor, recvs: Mapping[int, torch.Tensor], ranks: Ranks, label: str) -> Work:
        """Post an all-gather on the group of these ranks; see Transport.all_gather."""
        group = self._group_of(ranks, [data, *recvs.values()], label)
        for rank in recvs:
            self.sent_bytes[rank] += data.nbytes
        taken = [recvs.get(rank, data) for rank in ranks]  # the rank's own in place
        return self._begin(lambda: group.allgather([taken], [data]), (data, taken), ranks, label)

    def _begin(self, post: Any, data: object, ranks: Ranks, label: str) -> Work:
        peer = self._after(ranks)
        try:
            work = post()
        except RuntimeError as error:
            raise self._failed(error, peer, f"cannot begin {label}", LATE) from error
        return _Handle(self, work, data, peer, f"waited for {label}")

    def _after(self, ranks: Ranks) -> int:
        """Return the rank to begin with when a collective, which waits for many, is asked who is lost."""
        return ranks[(ranks.index(self.rank) + 1) % len(ranks)]

    def _group_of(self, ranks: Ranks, some: list[torch.Tensor], label: str) -> Any:
        """Return the group for a collective that can begin. Raises ConfigurationError."""
        for each in some:
            self._check_movable(each, label)
        if (group := self._groups.get(_lane(ranks))) is None:
            raise ConfigurationError(
                f"{label}: ranks {ranks} have no connection for it: prepare_groups() makes those of a program before "
                f"it runs, on all ranks together"
            )
        return group


def _lane(ranks: Ranks) -> str:
    """Return a group's name: short, as HCCL wants it, and different for different ranks."""
    return f"{len(ranks)} ranks {zlib.crc32(str(ranks).encode()):08x}"
