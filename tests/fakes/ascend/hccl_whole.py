"""Collectives that Megatron's own groups ask of HCCL beside messages: of single tensors, and of unequal parts.

Lists of unequal tensors go as HcclAllGatherV and HcclReduceScatterV (torch_npu 9e73e708a, ProcessGroupHCCL.cpp:5645 and
6059), one operation each.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work


class WholeTensors:
    """The part of an emulated group that gathers, reduces, exchanges and spreads one tensor a rank."""

    def all_gather_single(self: Any, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        """Parts of all ranks, one after another."""

        def run(gloo: Any, x: list[torch.Tensor], into: list[torch.Tensor]) -> Any:
            return gloo.allgather([list(into[0].chunk(self.size()))], x)

        return self._collective("all_gather_single", [given], [output], run)  # type: ignore[no-any-return]

    def reduce_scatter_single(self: Any, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        """This rank's part of the sum over the ranks, by way of the whole sum."""

        def run(gloo: Any, x: list[torch.Tensor], into: list[torch.Tensor]) -> Any:
            total = x[0].clone()
            gloo.allreduce([total], dist.AllreduceOptions()).wait()
            into[0].copy_(total.chunk(self.size())[self.rank()])
            return _Done()

        return self._collective("reduce_scatter_single", [given], [output], run)  # type: ignore[no-any-return]

    def allgather(self: Any, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        """Gather a tensor of each rank, by sends and receives where their sizes differ: Gloo wants equal ones."""

        def run(gloo: Any, given: list[torch.Tensor], into: list[torch.Tensor]) -> Any:
            if len({x.shape for x in into}) == 1:
                return gloo.allgather([into], given)
            return _exchanged(gloo, given * len(into), into)

        return self._collective("all_gather", inputs, outputs[0], run)  # type: ignore[no-any-return]

    def reduce_scatter(
        self: Any, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> Work:
        """Sum the ranks' tensors for this rank."""

        def run(gloo: Any, given: list[torch.Tensor], into: list[torch.Tensor]) -> Any:
            parts = [torch.empty_like(into[0]) for _ in given]
            _exchanged(gloo, given, parts).wait()
            into[0].copy_(torch.stack(parts).sum(0))
            return _Done()

        return self._collective("reduce_scatter", inputs[0], outputs, run)  # type: ignore[no-any-return]

    def alltoall(self: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        """Exchange tensors by sends and receives: Gloo has no all_to_all of lists."""
        return self._collective("all_to_all", inputs, outputs, _exchanged)  # type: ignore[no-any-return]

    def all_to_all_single(
        self: Any, output: torch.Tensor, given: torch.Tensor, takes: Any, gives: Any, opts: Any = None
    ) -> Work:
        """Rows for each rank, in equal parts where no sizes are given."""
        into, out = (
            list(torch.split(x, [int(n) for n in sizes]) if len(sizes) else x.chunk(self.size()))
            for x, sizes in ((output, takes), (given, gives))
        )
        return self.alltoall(into, out)  # type: ignore[no-any-return]

    def broadcast(self: Any, tensors: list[torch.Tensor], opts: Any) -> Any:
        def run(gloo: Any, x: list[torch.Tensor], into: list[torch.Tensor]) -> Any:
            into[0].copy_(x[0])
            return gloo.broadcast([into[0]], opts)

        return self._collective("broadcast", tensors, tensors, run)


def _exchanged(gloo: Any, given: list[torch.Tensor], into: list[torch.Tensor]) -> Any:
    """Give a tensor to each rank and take one of each."""
    others = [rank for rank in range(gloo.size()) if rank != gloo.rank()]
    into[gloo.rank()].copy_(given[gloo.rank()])
    works = [gloo.recv([into[rank]], rank, 1) for rank in others]
    works += [gloo.send([given[rank]], rank, 1) for rank in others]
    return _All(works)


class _All:
    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for each in self._works:
            each.wait()


class _Done:
    def wait(self) -> None: ...
