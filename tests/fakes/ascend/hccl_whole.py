"""What Megatron's own groups ask of HCCL beside messages: collectives of single tensors."""

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


class _Done:
    def wait(self) -> None: ...
