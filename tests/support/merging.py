"""What every merger must do, checked against float64: one suite for all of them.

`check(merger, case)` raises AssertionError. `python -m merging` runs mergers in a process of their own, since Triton's
interpreter is chosen when triton is imported: it reads [["module:make", [check, ...]], ...] (no checks: all)
and prints [merger, check, null or what is wrong] of each, and [merger, "", exit code].
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
from oracle import relative_error

from tokenring.backends.interfaces import Merger

INF = math.inf
LSES = [  # of what is there, and of what comes
    (0.0, 0.0),
    (1.5, -2.0),
    (-2.0, 1.5),
    (-INF, 0.7),
    (0.7, -INF),
    (-INF, -INF),
    (9000.0, -9000.0),
    (-9000.0, 9000.0),
    (-9000.0, -9000.5),
    (9000.0, 9000.5),
    (1e30, -1e30),
    (-INF, 9000.0),
    (-INF, -9000.0),
]
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # out, lse, new_out, new_lse
Place = Callable[[torch.Tensor], torch.Tensor]  # a tensor's copy, in memory of some order


# ---------- where tensors lie


def in_order(x: torch.Tensor) -> torch.Tensor:
    """One block of memory, in the order of the axes."""
    return x.clone(memory_format=torch.contiguous_format)


def batch_first(x: torch.Tensor) -> torch.Tensor:
    """As a call's outputs: [B, rows, H, ...] in memory."""
    return in_order(x.transpose(0, 1)).transpose(0, 1)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """As some kernels' results: [B, H, rows, ...] in memory."""
    rest = range(3, x.dim())
    return in_order(x.permute(1, 2, 0, *rest)).permute(2, 0, 1, *rest)


def in_records(x: torch.Tensor) -> torch.Tensor:
    """As accumulators in the pool: a record for each row, in which other things lie too."""
    wide = x.new_full((x.shape[0], x[0].numel() + 12), 7.0)
    wide[:, 8:-4] = x.flatten(1)
    return wide[:, 8:-4].view(x.shape)


def some_heads(x: torch.Tensor) -> torch.Tensor:
    """A head group of more: the neighbours must stay as they are."""
    more = torch.cat([torch.full_like(x, 5.0), x, torch.full_like(x, 5.0)], dim=2)
    return more[:, :, x.shape[2] : 2 * x.shape[2]]


def columns_apart(x: torch.Tensor) -> torch.Tensor:
    """A last stride that is not 1."""
    return in_order(x.transpose(-1, -2)).transpose(-1, -2)


PLACES: dict[str, Place] = {
    each.__name__: each for each in (in_order, batch_first, heads_first, in_records, some_heads, columns_apart)
}


# ---------- cases


@dataclass(frozen=True)
class Case:
    """Shapes [13 rows, batch, heads, head_dim]; where the parts lie; what comes in `dtype`; how many axes there are."""

    name: str
    batch: int = 1
    heads: int = 2
    head_dim: int = 8
    dtype: torch.dtype = torch.float32
    place: str = "in_order"
    new_place: str = "in_order"
    dims: int = 4

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("plain"),
    Case("bf16 comes", dtype=torch.bfloat16),
    Case("fp16 comes", dtype=torch.float16),
    Case("a batch", batch=3, heads=4, head_dim=16),
    Case("outputs, bf16", batch=2, dtype=torch.bfloat16, place="batch_first", new_place="heads_first"),
    Case("outputs, fp32", batch=2, place="batch_first", new_place="batch_first"),
    Case("outputs of batch 1, fp32", place="batch_first", new_place="in_records"),
    Case("heads first", batch=2, heads=3, place="heads_first", new_place="batch_first"),
    Case("heads first, both", batch=2, heads=3, place="heads_first", new_place="heads_first"),
    Case("records", batch=2, place="in_records", new_place="in_records"),
    Case("records, bf16", batch=2, dtype=torch.bfloat16, place="in_records", new_place="batch_first"),
    Case("a head group", heads=3, place="some_heads", new_place="some_heads"),
    Case("columns apart", place="in_order", new_place="columns_apart"),
    Case("heads of 80", head_dim=80, place="in_records", dtype=torch.bfloat16),
    Case("heads of 128", heads=1, head_dim=128),
    Case("heads of 1", heads=32, head_dim=1),
    Case("heads of 640", heads=1, head_dim=640),
    Case("three axes", dims=3),
    Case("two axes", dims=2, heads=1),
)


def parts(case: Case, device: str = "cpu") -> Parts:
    """One row for each of LSES; out is 0 where lse is -inf."""
    random = torch.Generator().manual_seed(1)
    made: list[torch.Tensor] = []
    places = (PLACES[case.place], torch.float32), (PLACES[case.new_place], case.dtype)
    for which, (place, dtype) in enumerate(places):
        lse = torch.tensor([pair[which] for pair in LSES])[:, None, None].repeat(1, case.batch, case.heads)
        out = torch.randn(*lse.shape, case.head_dim, generator=random).masked_fill((lse == -INF)[..., None], 0.0)
        for x in (out.to(device, dtype), lse.to(device)):
            placed = in_order(x) if place is columns_apart and x.dim() == 3 else place(x)
            for _ in range(4 - case.dims):
                placed = placed.squeeze(1)
            made.append(placed)
    return made[0], made[1], made[2], made[3]


def wanted(out: torch.Tensor, lse: torch.Tensor, new_out: torch.Tensor, new_lse: torch.Tensor) -> list[torch.Tensor]:
    """From the definition in float64, each row shifted by its larger lse."""
    lses = torch.stack([lse, new_lse]).double()
    shift = lses.amax(dim=0).clamp_min(-1e300)
    weights = torch.exp(lses - shift)
    total = weights.sum(dim=0)
    both = (weights[..., None] * torch.stack([out.double(), new_out.double()])).sum(dim=0)
    return [both / total.clamp_min(1e-300)[..., None], torch.log(total) + shift]


def scratch_for(lse: torch.Tensor) -> torch.Tensor:
    """What is left there from before must not matter."""
    return torch.full((2, *lse.shape), math.nan, device=lse.device)


def check(merger: Merger, case: Case, device: str = "cpu") -> None:
    """In place, and with results that may be new: exact, nothing else changed."""
    for in_place in (True, False):
        given = parts(case, device)
        right = wanted(*(x.cpu() for x in given))
        came = given[2].clone(), given[3].clone()
        around = [_around(x) for x in given[:2]]
        if in_place:
            merger.merge_(*given, scratch_for(given[1]))
            made = given[:2]
        else:
            made = merger.merged(*given, scratch_for(given[1]))
        for x, before in zip(given[2:], came, strict=True):
            assert bool((x == before).all()), "what came was changed"
        if in_place:
            for x, before in zip(given[:2], around, strict=True):
                assert torch.equal(_around(x), before), "something beside the accumulators was changed"
        assert made[0].shape == given[0].shape and made[1].shape == given[1].shape
        assert made[0].dtype == made[1].dtype == torch.float32
        _check_rows(made[0].cpu(), made[1].cpu(), right)


def _check_rows(out: torch.Tensor, lse: torch.Tensor, right: list[torch.Tensor]) -> None:
    for row, pair in enumerate(LSES):
        errors = _out_error(out[row], right[0][row]), relative_error(lse[row], right[1][row])
        # fp32 holds an lse of 9000 to 1e-3, and so weights, where both parts have any.
        spacing = 1.2e-7 * abs(pair[0]) if abs(pair[0] - pair[1]) < 100 else 0.0
        assert all(error < 1e-6 + spacing for error in errors), f"lse {pair}: errors {errors}"  # NaN too


def _out_error(out: torch.Tensor, right: torch.Tensor) -> float:
    """Relative to numbers of the size that is drawn: parts that happen to cancel make no error larger."""
    least = 0.3 * math.sqrt(right.numel())
    if not bool(right.any()) or float(right.norm()) > least:
        return relative_error(out, right)
    return float((out.double() - right).norm()) / least


def _around(x: torch.Tensor) -> torch.Tensor:
    """What lies in the memory of x and not in x: other fields of records, other heads."""
    if x._base is None:
        return torch.empty(0)
    whole = x._base.clone()
    whole.as_strided(x.shape, x.stride(), x.storage_offset() - x._base.storage_offset()).zero_()
    return whole.cpu()


# ---------- kept, and whole softmaxes


def check_kept(merger: Merger, device: str = "cpu") -> None:
    """What comes to nothing leaves every bit as it was."""
    out, lse, new_out, new_lse = parts(CASES[0], device)
    before = out.clone(), lse.clone()
    merger.merge_(out, lse, torch.zeros_like(new_out), torch.full_like(new_lse, -INF), scratch_for(lse))
    assert bool((out == before[0]).all() & (lse == before[1]).all())


def check_nan(merger: Merger, device: str = "cpu") -> None:
    """What went wrong elsewhere must be seen in the end: NaN is no row that has seen nothing. Others are as ever."""
    out, lse, new_out, new_lse = parts(CASES[0], device)
    expected = wanted(*(x.cpu() for x in (out, lse, new_out, new_lse)))
    spoilt = {0: lse, 1: new_lse, 2: lse, 3: new_lse}
    for row, which in spoilt.items():
        which[row] = math.nan
    for row, other in ((2, new_lse), (3, lse)):
        other[row] = -INF
    out, lse = merger.merged(out, lse, new_out, new_lse, scratch_for(lse))
    for x, right in ((out, expected[0]), (lse, expected[1])):
        assert bool(x[: len(spoilt)].isnan().all()), "NaN is gone"
        assert relative_error(x[4:6].cpu(), right[4:6]) < 1e-6


def check_softmax(merger: Merger, count: int, device: str = "cpu") -> None:
    """Attention over `count` parts of the keys, some of which a row does not see, is attention over all."""
    random = torch.Generator().manual_seed(count)
    scores, values = (torch.randn(shape, generator=random) for shape in ((30, 8 * count), (8 * count, 16)))
    scores = scores * 5
    hidden = (torch.rand(30, count, generator=random) < 0.4).repeat_interleave(8, dim=1)
    hidden[0] = True
    scores = scores.masked_fill(hidden, -INF)
    out, lse = torch.zeros(30, 1, 1, 16, device=device), torch.full((30, 1, 1), -INF, device=device)
    for part in range(count):
        some = slice(8 * part, 8 * part + 8)
        part_lse = scores[:, some].logsumexp(dim=1)
        part_out = torch.exp(scores[:, some] - part_lse.clamp_min(-1e30)[:, None]) @ values[some]
        news = part_out[:, None, None].to(device), part_lse[:, None, None].to(device)
        out, lse = merger.merged(out, lse, *news, scratch_for(lse))
    weights = torch.softmax(scores.double(), dim=1).nan_to_num()
    found_out, found_lse = out.cpu()[:, 0, 0], lse.cpu()[:, 0, 0]
    assert relative_error(found_out, weights @ values.double()) < 1e-6
    assert relative_error(found_lse, scores.double().logsumexp(dim=1)) < 1e-6
    assert bool((found_out[0] == 0).all()) and float(found_lse[0]) == -INF


def suite(device: str = "cpu") -> dict[str, Callable[[Merger], None]]:
    """Everything, by name."""
    checks: dict[str, Callable[[Merger], None]] = {
        str(case): partial(check, case=case, device=device) for case in CASES
    }
    checks["what comes to nothing"] = partial(check_kept, device=device)
    checks["NaN"] = partial(check_nan, device=device)
    for count in (2, 3, 8):
        softmax = partial(check_softmax, count=count, device=device)
        checks[f"{count} parts of a softmax"] = softmax
    return checks


def checked(made_by: str, names: Collection[str]) -> None:
    """Print each check of the merger that a function makes, "module:function": its name, null or what is wrong."""
    module, _, function = made_by.partition(":")
    merger = getattr(import_module(module), function)()
    for name, run in suite().items():
        if names and name not in names:
            continue
        wrong = None
        try:
            run(merger)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        print(json.dumps([made_by, name, wrong]), flush=True)


def main(jobs: list[tuple[str, list[str]]]) -> None:
    """Each in a child, since what writes where it must not may end the process, and torch is imported once for all."""
    for made_by, names in jobs:
        child = os.fork()
        if child == 0:
            checked(made_by, names)
            sys.stdout.flush()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps([made_by, "", code]), flush=True)


if __name__ == "__main__":
    import_module("triton")
    main(json.load(sys.stdin))
