"""The self-attention of MindSpeed-MM's Wan, a diffusion transformer: whole on every rank but for its attention.

Read at 57069cd5, models/wan2_2/modeling_wan2_2.py:365. Every rank has all tokens x [B, S, width]; the layer cuts q, k
and v, attends under a full mask, and gathers what comes out. Tokens at the end of x may be padding (:1120), of which no
output is used. Cross-attention (:461) is computed whole on every rank, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from tokenring.errors import UnsupportedError
from tokenring.integrations.mindspeed_fsdp2.calls import LastRead, attend_cut, is_training
from tokenring.integrations.mindspeed_fsdp2.contexts import TrainerContexts
from tokenring.integrations.mindspeed_fsdp2.cuts import KEPT, CutCall
from tokenring.integrations.mindspeed_fsdp2.replacing import Replaced, while_used
from tokenring.integrations.versions import MINDSPEED_MM
from tokenring.runtime.agreement import refusing
from tokenring.sequence.layout import contiguous
from tokenring.sequence.mask import Full, Slices

HOME, NAME = "mindspeed_mm.fsdp.models.wan2_2.modeling_wan2_2", "WanSelfAttention.forward"
MOVES = "mindspeed_mm.fsdp.distributed.context_parallel.communication"
SPLIT = ("input_", "process_group", "dim", "split_sizes", "grad_scale")
GATHER = ("input_", "process_group", "dim", "gather_sizes", "grad_scale")


def replace(contexts: TrainerContexts) -> list[Replaced]:
    """Return how our self-attention stands in for theirs."""
    home, own = MINDSPEED_MM.function(HOME, NAME, ("self", "x", "seq_lens", "grid_sizes", "freqs"))
    _, split = MINDSPEED_MM.function(MOVES, "split_forward_gather_backward", SPLIT)
    _, gather = MINDSPEED_MM.function(MOVES, "gather_forward_split_backward", GATHER)
    ours = while_used(own, attention_of(home, own, contexts, split, gather), contexts)
    return [Replaced(home.WanSelfAttention, NAME.partition(".")[2], own, ours)]


def attention_of(
    home: Any, own: Callable[..., Any], contexts: TrainerContexts, split: Callable[..., Any], gather: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the method that runs in the place of theirs. split, gather: theirs, whose gradients match each other."""

    lengths = LastRead(_real_tokens)

    def forward(self: Any, x: torch.Tensor, seq_lens: torch.Tensor, grid_sizes: Any, freqs: Any) -> Any:
        state = home.get_parallel_state()
        if not state.is_cp_enable():
            return own(self, x, seq_lens, grid_sizes, freqs)
        group, shape = state.get_cp_group(), (*x.shape[:2], self.num_heads, self.head_dim)
        cp = contexts.of(group)
        with refusing(cp, "forward", x):
            real = lengths.of(seq_lens)
        q = home.rope_apply(self.norm_q(self.q(x)).view(shape), grid_sizes, freqs)
        k = home.rope_apply(self.norm_k(self.k(x)).view(shape), grid_sizes, freqs)
        v = self.v(x).view(shape)
        call, tokens = _call(real, cp.world_size)
        q, k, v = (_cut_or_padded(each.to(v.dtype), tokens) for each in (q, k, v))
        sizes = [tokens // cp.world_size] * cp.world_size
        q, k, v = (split(each, group, dim=1, split_sizes=sizes) for each in (q, k, v))
        out = attend_cut(q, k, v, cp, call, None, is_training(self))
        out = gather(out, group, dim=1, gather_sizes=sizes)
        out = _cut_or_padded(out, x.shape[1])
        return self.o(out.flatten(2))

    return forward


@lru_cache(maxsize=KEPT)
def _call(real: int, ranks: int) -> tuple[CutCall, int]:
    """Return how a call of so many tokens is made, and of how many with padding, which no token sees.

    Parts are then equal: not every backend gathers others.
    """
    tokens = -(-real // ranks) * ranks
    mask = Full() if tokens == real else Slices([(0, tokens, 0, real)])
    return CutCall(mask, contiguous(ranks, tokens)), tokens


def _cut_or_padded(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return x [B, S, ...] with so many tokens: the first ones, or zeros behind all."""
    more = tokens - x.shape[1]
    return x[:, :tokens] if more <= 0 else torch.nn.functional.pad(x, (0, 0, 0, 0, 0, more))


def _real_tokens(lengths: torch.Tensor) -> int:
    """Return the tokens of each sequence without padding. Raises UnsupportedError where they differ."""
    found = set(lengths.tolist())
    if len(found) != 1:
        raise UnsupportedError(
            f"videos of {sorted(found)} tokens in one batch are not supported under context parallelism: batch videos "
            f"of one size"
        )
    return int(found.pop())
