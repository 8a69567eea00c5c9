"""Ranks with emulated NPUs: processes apart from all others, since the device cannot be taken out again.

    def test_it(npus: NpuPools) -> None:
        assert npus(2)(rank_of, 2) == [0, 2]
"""

from __future__ import annotations

from ranks import Here, RankPools, Ranks

from ascend.device import install


def on_npu(here: Here, count: int = 8) -> None:
    """Gives this rank NPUs; the one with its own number is the current one."""
    import torch

    install(count)
    torch.get_device_module("npu").set_device(here.rank % count)


class NpuPools(RankPools):
    """Pools whose ranks have NPUs."""

    def _make(self, world_size: int) -> Ranks:
        made = super()._make(world_size)
        made(on_npu)
        return made
