"""Several patches of a tile in one call: exact in both memory orders of the statistics, and only where it may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from ascend import refusals
from ascend.operators import calls, register
from ascend.ranks import NpuPools
from conformance import Tile, operands
from oracle import attention64, relative_error
from ranks import Here
from test_ascend_kernel import npu_kernel

from tokenring.backends.kernels import npu_packed
from tokenring.backends.kernels.npu_fusion import NpuFusion
from tokenring.backends.kernels.npu_packed import NpuPacking
from tokenring.lowering.program import Attend, Instruction, Span, Wait
from tokenring.runtime.bound_kernel import patches, together
from tokenring.sequence.region import Patch

WITHOUT_LAYOUT, WITH_LAYOUT = "op-plugin 7.1.0", "2.9.1"  # whether the statistics can be asked for in token order
REST = 3  # columns that all rows see elsewhere


def causal(row: int, rows: int, col: int | None = None) -> Patch:
    col = row if col is None else col
    return Patch(row, row + rows, col, col + rows, None, 0)


CASES: dict[str, tuple[Patch, ...]] = {
    "two documents": (causal(0, 4), causal(4, 9)),
    "one token, many": (causal(0, 1), causal(1, 1), causal(2, 11)),
    "padding before, between and after": (causal(2, 5), causal(9, 3)),
    "full": (Patch(0, 4, 0, 7), Patch(4, 9, 7, 8)),
    "columns apart": (causal(0, 4, 3), causal(4, 5, 9)),
    "windows": (Patch(0, 9, 0, 9, -3, 0), Patch(9, 12, 9, 12, None, 0), Patch(12, 20, 12, 20, -3, 0)),
    "tall": (Patch(0, 6, 0, 4, None, 0), Patch(6, 8, 4, 9, None, 0)),
    "eight documents": tuple(causal(start, 3) for start in range(0, 24, 3)),
}


class Checked:
    """What a packed call gives, against float64 patch by patch."""

    def __init__(self, kernel: NpuFusion, parts: Sequence[Patch], tile: Tile, device: str = "npu") -> None:
        self.kernel, self.parts, self.tile, self.scale, self.device = kernel, parts, tile, 0.3, device
        self.given = operands(tile, torch.device(device))

    def check(self) -> None:
        made = self.kernel.forward_packed(self.given.q, *self.given.tile, patches=self.parts, scale=self.scale)
        self._check_forward(made)
        for by in ("out", "delta"):
            self._check_backward(by)

    def _wanted(self, part: Patch) -> dict[str, torch.Tensor]:
        """Of the patch's rows over its own columns and the rest's, as kernels shape it."""
        rows, cols = slice(part.row0, part.row1), slice(part.col0, part.col1)
        q, dout = (x.cpu()[:, :, rows] for x in (self.given.q, self.given.dout))
        k, v = (x.cpu()[:, :, cols] for x in self.given.tile)
        columns = torch.arange(part.cols)[None, :] - torch.arange(part.rows)[:, None]
        shown = (columns <= (part.high if part.high is not None else part.cols)) & (
            columns >= (part.low if part.low is not None else -part.rows)
        )
        alone = self._attention(q, k, v, dout, shown)
        rest = [x.cpu()[:, :, :REST] for x in self.given.rest]
        longer = [torch.cat([x, y], dim=2) for x, y in zip((k, v), rest, strict=True)]
        all_shown = torch.cat([shown, torch.ones(part.rows, REST, dtype=torch.bool)], dim=1)
        whole = self._attention(q, longer[0], longer[1], dout, all_shown)
        named = {f"whole {name}": x for name, x in whole.items()} | alone
        p_all = {name: named[f"whole {name}"][:, :, : part.cols] for name in ("dk", "dv")}
        return named | p_all | {"delta": (named["whole out"] * dout.double()).sum(-1)}

    def _attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, shown: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        q, k, v, dout = (x.transpose(1, 2) for x in (q, k, v, dout))
        made = attention64(q, k, v, dout, shown, self.scale)
        return {name: x if name == "lse" else x.transpose(1, 2) for name, x in made._asdict().items()}

    def _check_forward(self, made: list[tuple[torch.Tensor, ...]]) -> None:
        assert len(made) == len(self.parts)
        for part, (out, lse) in zip(self.parts, made, strict=True):
            wanted = self._wanted(part)
            assert lse.dtype == torch.float32 and out.shape == wanted["out"].shape
            assert relative_error(out.cpu(), wanted["out"]) < self._limit(), f"out of {part}"
            assert relative_error(lse.cpu(), wanted["lse"]) < 2e-6, f"lse of {part}"

    def _check_backward(self, by: str) -> None:
        """With the lse of rows that see more than the tile; rows outside all patches hold what must not matter."""
        given, shape = self.given, self.given.q.shape
        lse, delta = torch.full(shape[:3], -torch.inf), torch.full(shape[:3], 7.0)
        out = torch.full(given.dout.shape, 7.0, dtype=self.tile.dtype)
        wanted = [self._wanted(part) for part in self.parts]
        for part, right in zip(self.parts, wanted, strict=True):
            rows = slice(part.row0, part.row1)
            lse[:, :, rows], delta[:, :, rows] = right["whole lse"].float(), right["delta"].float()
            out[:, :, rows] = right["whole out"].to(self.tile.dtype)
        kept = {"out": out.to(self.device)} if by == "out" else {}
        made = self.kernel.backward_packed(
            given.dout, given.q, *given.tile, lse.to(self.device),
            delta.to(self.device) if by == "delta" else None, patches=self.parts, scale=self.scale, **kept,
        )  # fmt: skip
        for part, (dq, dk, dv), right in zip(self.parts, made, wanted, strict=True):
            assert dq.shape == right["whole dq"].shape
            for name, x in (("dk", dk), ("dv", dv)):
                assert relative_error(x.cpu(), right[name]) < 3 * self._limit(), f"{name} of {part} by {by}"
            # dq of the patch's own columns: what the rest adds is taken away.
            ds = right["whole dq"] - self._rest_dq(part, right)
            least = float(right["whole dq"].norm())
            assert float((dq.cpu().double() - ds).norm()) < 6 * self._limit() * least, f"dq of {part} by {by}"

    def _rest_dq(self, part: Patch, right: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = slice(part.row0, part.row1)
        repeats = self.given.q.shape[1] // self.given.tile[0].shape[1]
        q, dout = (x.cpu()[:, :, rows].double() for x in (self.given.q, self.given.dout))
        k, v = (x.cpu()[:, :, :REST].double().repeat_interleave(repeats, dim=1) for x in self.given.rest)
        p = torch.exp(q @ k.transpose(-1, -2) * self.scale - right["whole lse"][..., None])
        return (p * (dout @ v.transpose(-1, -2) - right["delta"][..., None]) * self.scale) @ k

    def _limit(self) -> float:
        return {torch.float32: 2e-6, torch.bfloat16: 4e-3}[self.tile.dtype]


def tile_of(parts: Sequence[Patch], **options: Any) -> Tile:
    whole = Patch(0, parts[-1].row1 + 2, 0, parts[-1].col1 + 2)
    return replace(Tile("packed", whole, heads=(4, 2), head_dim=8), **options)


def test_2_lists_of_ours_may_end_in_zeros(npus: NpuPools) -> None:
    """Exact, forward and backward; whoever then takes the last end for the count of tokens is among the mutants."""
    npus(1)(padded_lists)


def padded_lists(here: Here) -> None:
    register(WITH_LAYOUT)
    parts = CASES["two documents"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tokenring.backends.kernels.npu_packed.NpuPacking", ZeroTail)
        Checked(npu_kernel(), parts, tile_of(parts)).check()
    assert {call.arguments["actual_seq_qlen"][-1] for call in calls} == {0}


@pytest.mark.sampled(48)
@pytest.mark.parametrize("options", [{}, {"token_major": True}, {"batch": 1}, {"dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("offer", [WITHOUT_LAYOUT, WITH_LAYOUT, "second version only"])
@pytest.mark.parametrize("name", CASES)
def test_exact(npus: NpuPools, name: str, offer: str, options: dict[str, Any]) -> None:
    npus(1)(exact, name, offer, options)


def exact(here: Here, name: str, offer: str, options: dict[str, Any]) -> None:
    register(offer)
    kernel, parts = npu_kernel(), CASES[name]
    assert kernel.packs(parts)
    Checked(kernel, parts, tile_of(parts, **options)).check()
    assert len(calls) == 3 and {call.arguments["input_layout"] for call in calls} == {"TND"}
    layouts = {call.arguments.get("softmax_layout", "") for call in calls}
    assert layouts == ({""} if offer == WITHOUT_LAYOUT else {"TND"})
    if name == "padding before, between and after" and options.get("batch") == 1:
        assert calls[0].arguments["actual_seq_qlen"] == [5, 8]


MANY = tuple(causal(2 * at, 2) for at in range(80))
FEW_SEQUENCES = 32  # where the operator takes 1024, so that tests are short


@pytest.mark.parametrize(("count", "batch", "made"), [(80, 1, 3), (12, 3, 2), (3, 2, 1)])
def test_many_documents_take_several_calls(npus: NpuPools, count: int, batch: int, made: int) -> None:
    """The emulated operator refuses more sequences in a call."""
    assert npu_packed.MOST_SEQUENCES == refusals.MOST_SEQUENCES == 1024  # the least that documents say
    npus(1)(many, count, batch, made)


def many(here: Here, count: int, batch: int, made: int) -> None:
    """As if each document were alone."""
    with pytest.MonkeyPatch.context() as limits:
        for module in (refusals, npu_packed):
            limits.setattr(module, "MOST_SEQUENCES", FEW_SEQUENCES)
        check_many(count, batch, made)
        limits.setattr(npu_packed, "MOST_SEQUENCES", 99)
        if count * batch > FEW_SEQUENCES:
            with pytest.raises(RuntimeError, match="more than 32 sequences"):  # the mutant: one call for all
                check_many(count, batch, made)


def check_many(count: int, batch: int, made: int) -> None:
    register(WITH_LAYOUT)
    kernel, parts = npu_kernel(), MANY[:count]
    given = operands(tile_of(parts, batch=batch), torch.device("npu"))
    found = kernel.forward_packed(given.q, *given.tile, patches=parts, scale=0.3)
    assert len(calls) == made and len(found) == count
    for at in (0, count // 2, count - 1):
        rows, patch = slice(2 * at, 2 * at + 2), Patch(0, 2, 0, 2, None, 0)
        operand = [x[:, :, rows].contiguous() for x in (given.q, *given.tile)]
        for x, wanted in zip(found[at], kernel.forward(*operand, patch=patch, scale=0.3), strict=True):
            assert relative_error(x.cpu(), wanted.cpu()) < 1e-6
    calls.clear()
    lse = torch.cat([lse for _, lse in found], dim=2)
    lse = torch.nn.functional.pad(lse.cpu(), (0, given.q.shape[2] - lse.shape[2])).to("npu")
    delta = torch.zeros_like(lse)
    gradients = kernel.backward_packed(
        given.dout, given.q, *given.tile, lse, delta, patches=parts, scale=0.3
    )  # fmt: skip
    assert len(calls) == made and len(gradients) == count
    last = slice(2 * count - 2, 2 * count)
    operand = [x[:, :, last].contiguous() for x in (given.dout, given.q, *given.tile, lse, delta)]
    for x, wanted in zip(gradients[-1], kernel.backward(*operand, patch=patch, scale=0.3), strict=True):
        assert relative_error(x.cpu(), wanted.cpu()) < 1e-5


def test_limits_cut_patches_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each call gets: its patches, and the entries of the batch."""

    def cut(parts: Sequence[Patch], batch: int) -> list[tuple[int, slice]]:
        found: list[tuple[int, slice]] = []

        def call(how: NpuPacking, entries: slice) -> list[tuple[torch.Tensor, ...]]:
            assert how.batch == entries.stop - entries.start
            found.append((len(how.patches), entries))
            return [(torch.zeros(how.batch),) for _ in how.patches]

        made = npu_packed.in_calls(parts, batch, call)
        assert [x.shape for (x,) in made] == [(batch,)] * len(parts)
        return found

    parts = [causal(4 * at, 4) for at in range(5)]
    assert cut(parts, 2) == [(5, slice(0, 2))]
    monkeypatch.setattr(npu_packed, "MOST_SEQUENCES", 6)
    assert cut(parts, 2) == [(3, slice(0, 2)), (2, slice(0, 2))]
    monkeypatch.setattr(npu_packed, "MOST_TOKENS", 16)
    assert cut(parts, 2) == [(2, slice(0, 2)), (2, slice(0, 2)), (1, slice(0, 2))]
    monkeypatch.setattr(npu_packed, "MOST_TOKENS", 4)
    assert cut(parts[:1], 3) == [(1, slice(at, at + 1)) for at in range(3)]


def test_what_goes_together(npus: NpuPools) -> None:
    npus(1)(goes_together)


def goes_together(here: Here) -> None:
    register("2.13.0")
    packs = npu_kernel().packs
    assert all(packs(parts) for parts in CASES.values())
    assert not packs((causal(0, 4), Patch(4, 9, 4, 9)))  # a triangle and a rectangle
    assert not packs((causal(0, 4), Patch(4, 9, 4, 9, None, 0, 3, 1)))  # steps
    assert not packs((causal(0, 4), Patch(4, 9, 4, 9, None, -2)))  # rows that see nothing


# ---------- which instructions


def attend(step: int, q: Span, kv: Span) -> Attend:
    return Attend(step, q, kv, Patch(0, q.rows, 0, kv.rows, None, 0), ())


class Takes:
    """A kernel that packs everything, or nothing, or up to so many; counts the patches that it was asked about."""

    def __init__(self, most: int) -> None:
        self.most, self.asked = most, 0

    def packs(self, parts: Sequence[Patch]) -> bool:
        self.asked += len(parts)
        return len(parts) <= self.most

    def forward_packed(self) -> None:
        """Not asked for here."""

    backward_packed = forward_packed


def grouped(instructions: list[Instruction], kernel: Any) -> list[int]:
    return [len(group) for group in together(instructions, kernel)]


class TestTogether:
    A = attend(0, Span(-1, 2, 5), Span(3, 0, 3))
    B = attend(0, Span(-1, 5, 7), Span(3, 6, 8))

    def test_of_one_tile(self) -> None:
        assert grouped([self.A, self.B, Wait(0), self.A], Takes(99)) == [2, 1, 1]
        assert grouped([self.A, self.B], Takes(1)) == [1, 1]
        assert grouped([self.A, self.B], object()) == [1, 1]  # a kernel that knows nothing of it
        assert patches((self.A, self.B)) == (Patch(0, 3, 0, 3, None, 0), Patch(3, 5, 6, 8, None, 0))

    @pytest.mark.parametrize(("most", "groups"), [(10_000, [512] * 4 + [452]), (3, [3] * 833 + [1]), (1, [1] * 2500)])
    def test_of_many_documents(self, most: int, groups: list[int]) -> None:
        """In time that grows with their number alone: each is asked about a few times, not with all before it."""
        kernel = Takes(most)
        found = [attend(0, Span(-1, 2 * at, 2 * at + 2), Span(3, 2 * at, 2 * at + 2)) for at in range(2500)]
        assert grouped([*found], kernel) == groups
        assert kernel.asked < 6 * len(found)

    @pytest.mark.parametrize(
        "other",
        [
            B._replace(step=1),
            B._replace(q=Span(-1, 4, 6)),  # a row of the first
            B._replace(kv=Span(3, 2, 4)),  # a column of the first
            B._replace(q=Span(0, 5, 7)),
            B._replace(kv=Span(4, 6, 8)),
            B._replace(q=Span(-1, 5, 7, 1), kv=Span(3, 6, 8, 1)),  # other heads
            B._replace(kept_q=Span(7, 5, 7)),
        ],
    )
    def test_apart(self, other: Attend) -> None:
        assert grouped([self.A, other], Takes(99)) == [1, 1]


# ---------- mutants: traps 1 and 2


class LeadingZero(NpuPacking):
    """Writes the lengths as flash-attn's cu_seqlens."""

    def _ends(self, spans: list[tuple[int, int]]) -> list[int]:
        return [0, *super()._ends(spans)]


class Lengths(NpuPacking):
    """Writes lengths, not ends."""

    def _ends(self, spans: list[tuple[int, int]]) -> list[int]:
        return [stop - start for start, stop in spans] * self.batch


class TokenOrder(NpuPacking):
    """Believes the shape [T, N, 8], whatever was asked for: trap 1."""

    def _row_lses(self, lse: torch.Tensor, in_token_order: bool) -> list[torch.Tensor]:
        return super()._row_lses(lse, True)


class TokenOrderBack(NpuPacking):
    """The same, in the statistics for the gradient."""

    def _packed_lse(self, lse: torch.Tensor, in_token_order: bool) -> torch.Tensor:
        return super()._packed_lse(lse, True)


class BlockOrder(NpuPacking):
    """Believes that the memory holds blocks, where token order was asked for."""

    def _row_lses(self, lse: torch.Tensor, in_token_order: bool) -> list[torch.Tensor]:
        return super()._row_lses(lse, False)


class ZeroTail(NpuPacking):
    """Pads its lists to a fixed number of sequences: no mutant, the operator skips them."""

    def _ends(self, spans: list[tuple[int, int]]) -> list[int]:
        return [*super()._ends(spans), 0, 0]


class LastIsTheCount(ZeroTail):
    """Takes as many tokens as the last end says: trap 2."""

    def _tokens(self, x: torch.Tensor, spans: list[tuple[int, int]]) -> torch.Tensor:
        return super()._tokens(x, spans)[: self._ends(spans)[-1]]


class LastIsTheCountOfOut(ZeroTail):
    """The same, in what it reads of the results."""

    def _parts(self, x: torch.Tensor, spans: list[tuple[int, int]]) -> list[torch.Tensor]:
        last = self._ends(spans)[-1]
        return super()._parts(torch.cat([x[:last], torch.zeros_like(x[last:])]), spans)


@pytest.mark.parametrize(
    ("mutant", "offer", "fails"),
    [
        (LastIsTheCount, WITH_LAYOUT, (RuntimeError, "there are 0 tokens|of no tokens")),
        (LastIsTheCountOfOut, WITH_LAYOUT, (AssertionError, "out of")),
        (LeadingZero, WITH_LAYOUT, (RuntimeError, "begins with 0")),
        (Lengths, WITH_LAYOUT, (RuntimeError, "decreases")),
        (TokenOrder, WITHOUT_LAYOUT, (AssertionError, "lse of")),
        (TokenOrderBack, WITHOUT_LAYOUT, (AssertionError, "of Patch.* by out")),
        (BlockOrder, WITH_LAYOUT, (AssertionError, "lse of")),
    ],
)
def test_mutants(npus: NpuPools, mutant: type[NpuPacking], offer: str, fails: tuple[type[Exception], str]) -> None:
    npus(1)(mutated, mutant, offer, fails)


def mutated(here: Here, mutant: type[NpuPacking], offer: str, fails: tuple[type[Exception], str]) -> None:
    register(offer)
    kind, says = fails
    parts = CASES["two documents"]
    with pytest.MonkeyPatch.context() as patched, pytest.raises(kind, match=says):
        patched.setattr("tokenring.backends.kernels.npu_packed.NpuPacking", mutant)
        Checked(npu_kernel(), parts, tile_of(parts)).check()
