"""MindSpeed's general masks, which are tensors, as masks of ours."""

from __future__ import annotations

from importlib import import_module
from itertools import groupby
from typing import Any, NamedTuple

import torch

from tokenring.errors import UnsupportedError
from tokenring.sequence.mask import Mask, Slices
from tokenring.sequence.slices import MOST_SLICES, Slice


class _Runs(NamedTuple):
    """Neighbouring columns that rows from `top` on see, [starts[i], stops[i]) of the i-th."""

    top: int
    starts: list[int]
    stops: list[int]

    @property
    def bottom(self) -> int:
        return self.top + len(self.starts)


class LastMask:
    """The mask that was read last from a tensor: all layers of a step get the same one."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._tensor: torch.Tensor | None = None  # it lives on here: an address alone could be another tensor's by now
        self._mask = Mask()

    def of(self, given: torch.Tensor | None, length: int, window: object = None, config: Any = None) -> Mask:
        """Return `mask_of_tensor` of a call's mask, else of the one that MindSpeed keeps. Raises UnsupportedError.

        config: with the flags of MindSpeed's operator, which may hide what the mask shows.
        """
        if window is not None:
            raise UnsupportedError(
                "a sliding window beside --attention-mask-type general is not supported: leave the window out where "
                "the mask has it, or use causal masks"
            )
        if given is None:
            given = import_module("mindspeed.model.transformer").get_attention_mask()
        if not isinstance(given, torch.Tensor) or tuple(given.shape[-2:]) != (length, length):
            found = f"one of {tuple(given.shape)}" if isinstance(given, torch.Tensor) else type(given).__name__
            raise UnsupportedError(
                f"--attention-mask-type general expects a mask [..., {length}, {length}] of the whole sequence on each "
                f"rank, and got {found}: use --context-parallel-algo ulysses_cp_algo, or causal masks"
            )
        key = (id(given), None if given.is_inference() else given._version)
        if key != self._key or given.is_inference():
            mask = mask_of_tensor(given)
            check_operator_flags(mask, length, config)
            self._mask, self._tensor, self._key = mask, given, key
        return self._mask


def check_operator_flags(mask: Mask, length: int, config: Any) -> None:
    """Raise UnsupportedError where flags of MindSpeed's attention operator hide what a general mask shows.

    --sparse-mode 0, the default, computes the band of --pre-tockens and --next-tockens only, and 1 all of the mask;
    others read the tensor as something else than a mask of all pairs.
    """
    mode = getattr(config, "sparse_mode", None) or 0
    if mode not in (0, 1):
        raise UnsupportedError(
            f"--sparse-mode {mode} with --attention-mask-type general is not supported: in that mode the tensor is no "
            f"mask of all pairs; use 0 or 1"
        )
    for name in ("pre_tockens", "next_tockens") if mode == 0 else ():
        count, flag = getattr(config, name, None), f"--{name.replace('_', '-')}"
        if count is None:
            continue
        beyond = Mask(high=-count - 1) if name == "pre_tockens" else Mask(low=count + 1)
        if (mask & beyond).within(Slice(0, length, 0, length)):
            raise UnsupportedError(
                f"{flag} {count} hides what the mask of --attention-mask-type general shows, and tokenring cannot tell "
                f"which is meant: say {flag} {length}, or take it out of the mask"
            )


def mask_of_tensor(hidden: torch.Tensor) -> Mask:
    """Return the mask that a tensor says: booleans [..., s, s], True where a row sees no column, all alike.

    Raises UnsupportedError for a tensor that differs in a batch, or is not made of slices: bands, blocks, triangles.
    """
    whole = hidden.reshape(-1, *hidden.shape[-2:])
    if any(not torch.equal(whole[0], each) for each in whole[1:]):
        raise UnsupportedError(
            "--attention-mask-type general with masks that differ in a batch is not supported: set --micro-batch-size 1"
        )
    slices = [row for each in _joined(~whole[0].bool().cpu()) for row in [_slice(each)]]
    if len(slices) > MOST_SLICES:
        raise UnsupportedError(
            f"--attention-mask-type general with a mask of {len(slices)} slices is not supported (at most "
            f"{MOST_SLICES}): use masks of blocks, bands and triangles, or --context-parallel-attention mindspeed"
        )
    return Slices(slices, q_start=None) if slices else Mask(slices=())


def _joined(seen: torch.Tensor) -> list[_Runs]:
    """Return the runs of columns of all rows, joined where those below go on: an end stays, or moves by one."""
    edges = torch.diff(torch.nn.functional.pad(seen.to(torch.int8), (1, 1)), dim=1)
    starts, stops = ((edges == sign).nonzero().tolist() for sign in (1, -1))
    done: list[_Runs] = []
    above: list[_Runs] = []
    pairs = zip(starts, stops, strict=True)
    for row, found in groupby(pairs, lambda pair: int(pair[0][0])):
        open_now = []
        for (_, start), (_, stop) in found:
            fits = [each for each in above if each.bottom == row and _goes_on(each, start, stop)]
            if fits:
                runs = fits[0]
                above.remove(runs)
                runs.starts.append(start)
                runs.stops.append(stop)
            else:
                runs = _Runs(row, [start], [stop])
                done.append(runs)
            open_now.append(runs)
        above = open_now
    return done


def _goes_on(runs: _Runs, start: int, stop: int) -> bool:
    """Tell whether a run of the next row keeps the runs a slice: each end stays for good, or moves for good."""
    return all(
        new - ends[-1] in ((0, 1) if len(ends) == 1 else (ends[1] - ends[0],))
        for ends, new in ((runs.starts, start), (runs.stops, stop))
    )


def _slice(runs: _Runs) -> tuple[int, int, int, int, int | None, int | None]:
    starts, stops, last = runs.starts, runs.stops, len(runs.starts) - 1
    low = starts[0] - runs.top if last and starts[1] > starts[0] else None
    high = stops[0] - 1 - runs.top if last and stops[1] > stops[0] else None
    return runs.top, runs.bottom, starts[0], stops[last], low, high
