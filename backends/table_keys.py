"""Name the tables that are kept of this machine's kernels and transports."""

from __future__ import annotations

import torch

from tokenring.backends.devices import device_of
from tokenring.backends.interfaces import AttentionKernel
from tokenring.display.console import machine
from tokenring.tables.kernel_rates import KernelKey
from tokenring.tables.transport_choice import Domain
from tokenring.tables.transport_times import TransportKey


def transfers_key(kind: str, domain: Domain, ranks: int) -> TransportKey:
    """Name the table of transports between so many ranks, of which this process is one, or could be."""
    name = machine() if kind == "cpu" else device_of(kind).name
    return TransportKey(kind, name, domain, ranks, torch.__version__)


def key_of(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int | None = None
) -> KernelKey:
    """Name the table of such calls on this machine, with as many threads as this process has."""
    name = device_of(device).name
    if device.type == "cpu":
        name += f", {torch.get_num_threads()} threads"
    return KernelKey(name, kernel.name, str(dtype).removeprefix("torch."), head_dim, torch.__version__, value_dim)
