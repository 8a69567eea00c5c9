"""Keys without the mean that they share: attention is the same, and what a wire format rounds is smaller."""

from __future__ import annotations

import torch

from tokenring.api.collectives import all_reduce
from tokenring.api.context import ContextParallel
from tokenring.api.inputs import check_context, check_tensor
from tokenring.api.tensor_parallel import TensorParallel
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.runtime.agreement import refusing
from tokenring.sequence.workload import DTYPES


def centered(k: torch.Tensor, cp: ContextParallel) -> torch.Tensor:
    """Return keys less their mean over all tokens of all ranks, one vector for each sample and head.

    k: [B, T, H, D], this rank's part. Scores of a query all change by the same then, so that `attention` gives the same
    out and gradients, which go to k unchanged; its lse is less by scale · q · mean. Not so with softcap or sinks.
    A wire format (ContextParallel(wire=...)) rounds keys by their size: without a mean, by what scores are made of.
    All ranks call it together: it costs a message of B · H · D numbers in fp32 to each, and a pass over k.

    Raises ConfigurationError (shapes, ranks that differ), UnsupportedError and PeerLost.
    """
    check_context(cp)
    with refusing(cp, "forward", k):
        cp.check_open()
        if not isinstance(k, torch.Tensor):
            raise ConfigurationError(f"centered was given a {type(k).__name__}: give keys [B, T, H, D]")
        check_tensor("centered", k)
        if k.dim() != 4 or 0 in (k.shape[0], *k.shape[2:]):
            raise ConfigurationError(f"centered was given {list(k.shape)}: give keys [B, T, H, D]")
        if k.dtype not in DTYPES:
            raise UnsupportedError(f"centered in {k.dtype} is not supported; use float32, bfloat16 or float16")
    with torch.no_grad(), torch.autocast(k.device.type, enabled=False):
        own = k.detach().sum(1, dtype=torch.float32).flatten()
        both = torch.cat((own, own.new_tensor([float(k.shape[1])])))  # with how many they are: ranks may differ
        if cp.world_size > 1:
            both = all_reduce(both, _adder(cp, k.device))
        mean = (both[:-1] / both[-1].clamp(min=1.0)).view(k.shape[0], 1, *k.shape[2:])
    return (k.float() - mean).to(k.dtype)


def _adder(cp: ContextParallel, device: torch.device) -> TensorParallel:
    """Return what adds up over the ranks of a context, made at its first use and kept with it."""
    kept: dict[str, object] = vars(cp)
    made = kept.get("_adder")
    if not isinstance(made, TensorParallel):
        transport = cp.transport_for(device)
        assert transport is not None  # there are several ranks
        made = kept["_adder"] = TensorParallel(cp.group, "direct-q", transport, timeout_seconds=cp.timeout_seconds)
    return made
