"""One call of attention on tokens that a trainer has cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import pad

from tokenring.api.attention import attend
from tokenring.api.context import ContextParallel
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.integrations.mindspeed_fsdp2.cuts import CutCall, Ends
from tokenring.sequence.mask import Causal, Full, Mask, SlidingWindow

DROPOUT = "its mask cannot be the same under every split; set attention_dropout to 0"
WHY = {  # keywords of layers that change the result
    "output_attentions": "no rank has the weights of all tokens",
    "head_mask": "heads are not masked here",
    "position_bias": "only masks of positions are supported",
    "attn_bias": "only masks of positions are supported",
    "block_indices": "an indexer chooses what tokens see, which no mask of positions says",
}


def attend_cut(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cp: ContextParallel,
    call: CutCall,
    scale: float | None,
    training: bool,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Return out [B, T, Hq, Dv] of q [B, T, Hq, D], k [B, T', Hkv, D] and v [B, T', Hkv, Dv], as `call` says.

    T' may differ from T under a full mask alone. All ranks get here together.
    """
    tokens = q.shape[1]
    if call.tokens is not None:
        more = max(call.tokens) - tokens
        q, k, v = (pad(x, (0, 0, 0, 0, 0, more)) for x in (q, k, v)) if more else (q, k, v)
    out, _ = attend(q, k, v, cp, call.mask, scale, training, None, sinks, softcap, call.layout, wants_lse=False)
    return out[:, :tokens]


def check_tokens(call: CutCall, rank: int, *held: int) -> None:
    """Raise ConfigurationError unless this rank holds the tokens that a call with padding takes it to hold."""
    if call.tokens is not None and any(each != call.tokens[rank] for each in held):
        raise ConfigurationError(
            f"rank {rank} holds {' and '.join(map(str, held))} tokens of q and k, and by the lengths that its layer "
            f"gives {call.tokens[rank]}: give the lengths of the whole sequence"
        )


def mask_of_layer(layer: str, is_causal: bool, window: int | None) -> Mask:
    """Return the mask of one document. window: how many tokens before its own a token sees; None: all."""
    if not is_causal:
        if window is not None:
            raise UnsupportedError(f"{layer} with a sliding window and is_causal=False is not supported")
        return Full()
    return Causal() if window is None else Causal() & SlidingWindow(window)


def check_layer(module: torch.nn.Module, dropout: float, more: dict[str, Any]) -> None:
    """Raise UnsupportedError for what a layer asks of its attention and tokenring does not compute."""
    layer = type(module).__name__
    if dropout:
        raise UnsupportedError(f"{layer} with dropout {dropout} is not supported: {DROPOUT}")
    for name, why in WHY.items():
        if more.get(name) is not None and more[name] is not False:
            raise UnsupportedError(f"{layer} gives its attention {name}, which is not supported: {why}")


def is_training(module: torch.nn.Module) -> bool:
    """Tell whether a backward pass follows, also in the forward pass of a checkpoint."""
    return module.training or torch.is_grad_enabled()


class LastRead:
    """Hold what was read last of a tensor or list: all layers get the same, and reading waits for the device."""

    def __init__(self, read: Callable[..., Any]) -> None:
        self._read = read
        self._given: Any = None  # lives on here: an address alone could be another tensor's by now
        self._version: object = None
        self._found: Any = None

    def of(self, given: Any, *more: Any) -> Any:
        """Return what is read of it, and of `more`, which is the same at every call."""
        seen = isinstance(given, torch.Tensor) and not given.is_inference()
        version = given._version if seen else object()  # of what may change unseen: always another
        if given is not self._given or version != self._version:
            self._found = self._read(given, *more)
            self._given, self._version = given, version
        return self._found


def ends_of(given: torch.Tensor | Sequence[int]) -> Ends:
    """Return ends of documents from 0 on, of ends with or without the 0. Raises ConfigurationError."""
    found = [int(each) for each in (given.flatten().tolist() if isinstance(given, torch.Tensor) else given)]
    ends = found if found[:1] == [0] else [0, *found]
    if len(ends) < 2 or any(a > b for a, b in pairwise(ends)):
        raise ConfigurationError(f"packed documents end at {ends[1:9]}: ends must rise to the length of the sequence")
    return tuple(dict.fromkeys(ends))  # without empty documents
