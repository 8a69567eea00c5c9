"""What a naive port to Ascend gets wrong, one test for each: a kernel or a call that does so is refused or found.

Traps 1 and 2 in packed calls are with the packed calls' tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ascend.operators import calls, register
from ascend.ranks import NpuPools
from conformance import check
from oracle import relative_error
from ranks import Here
from test_ascend_kernel import BY_NAME, npu_kernel
from test_ascend_operators import OPERATORS, draw, triangle

from tokenring.backends.kernels import npu_call, npu_fusion, npu_masks, npu_operator
from tokenring.backends.kernels.npu_fusion import NpuFusion
from tokenring.backends.kernels.npu_operator import canonical, find, row_lse, statistics
from tokenring.backends.kernels.reference import dense_mask
from tokenring.backends.merging.torch_merger import merge_
from tokenring.errors import BackendUnavailable
from tokenring.sequence.region import Patch

Spoil = Callable[[pytest.MonkeyPatch], None]


# ---------- mutants of the kernel, and what finds them


def first_spelling_only(patched: pytest.MonkeyPatch) -> None:
    """Trap 3: takes the names of one operator for those of all."""
    patched.setattr(npu_operator, "SPELLINGS", npu_operator.SPELLINGS | {"scale": ("scale",)})


def without_mask(patched: pytest.MonkeyPatch) -> None:
    """Trap 4: asks for a causal mode and gives no mask."""
    kept = npu_masks.options

    def options(*what: Any) -> dict[str, object]:
        return kept(*what) | {"atten_mask": None}

    patched.setattr(npu_fusion, "options", options)


def visible_is_true(patched: pytest.MonkeyPatch) -> None:
    """Trap 4: gives the mask as torch's attention takes it."""

    def hidden(patch: Patch, device: torch.device) -> torch.Tensor:
        visible = dense_mask(patch, device)
        assert visible is not None
        return visible

    patched.setattr(npu_masks, "_hidden", hidden)


def mask_of_the_tile(patched: pytest.MonkeyPatch) -> None:
    """Trap 4: gives a compressed mode a mask of the tile's size."""

    def small(device: torch.device) -> torch.Tensor:
        return torch.ones(16, 16, dtype=torch.bool, device=device).triu(1)

    patched.setattr(npu_masks, "compressed_mask", small)


def rows_as_they_come(patched: pytest.MonkeyPatch) -> None:
    """Trap 5: passes on what the operator says about rows with every key masked."""
    patched.setattr(npu_fusion, "canonical", lambda out, lse: (out, lse))


def all_copies(patched: pytest.MonkeyPatch) -> None:
    """Adds up the eight copies of the sum."""
    patched.setattr(npu_fusion, "row_lse", lambda most, total: most[..., 0] + total.sum(dim=-1).log())


def local_statistics(patched: pytest.MonkeyPatch) -> None:
    """Gives the gradient a maximum of 0, as if rows had seen nothing."""
    patched.setattr(npu_call, "statistics", lambda lse: statistics(torch.zeros_like(lse)))


def infinite_statistics(patched: pytest.MonkeyPatch) -> None:
    """Gives the gradient the lse of rows that see nothing as it is."""

    def as_it_is(lse: torch.Tensor) -> dict[str, torch.Tensor]:
        largest = lse[..., None].expand(*lse.shape, 8).contiguous()
        return {"softmax_max": largest, "softmax_sum": torch.ones_like(largest)}

    patched.setattr(npu_call, "statistics", as_it_is)


MUTANTS: dict[str, tuple[Spoil, str, type[Exception], str]] = {
    "3, scale": (first_spelling_only, "full", RuntimeError, "Unknown keyword argument 'scale'"),
    "4, no mask": (without_mask, "causal, square", AssertionError, "out: error"),
    "4, polarity": (visible_is_true, "unequal steps", AssertionError, "out: error"),
    "4, size": (mask_of_the_tile, "causal, square", RuntimeError, r"takes a mask of \[2048, 2048\], not \[16, 16\]"),
    "5": (rows_as_they_come, "unequal steps, rows see nothing", AssertionError, "out: error"),
    "copies": (all_copies, "full", AssertionError, "lse: error"),
    "local statistics": (local_statistics, "full", AssertionError, "dq: error"),
    "infinite": (infinite_statistics, "unequal steps, rows see nothing", RuntimeError, "holds inf or nan"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants(npus: NpuPools, name: str) -> None:
    npus(1)(mutated, name)


def mutated(here: Here, name: str) -> None:
    register("2.13.0")
    spoil, tile, kind, says = MUTANTS[name]
    check(npu_kernel(), BY_NAME[tile], "npu")
    with pytest.MonkeyPatch.context() as patched:
        spoil(patched)
        with pytest.raises(kind, match=says):
            check(npu_kernel(), BY_NAME[tile], "npu")


def test_3_the_other_spelling(npus: NpuPools) -> None:
    """Where only the second version is there, pre_tockens is unknown."""
    npus(1)(other_spelling)


def other_spelling(here: Here) -> None:
    register("second version only")
    check(npu_kernel(), BY_NAME["band"], "npu")
    kernel = npu_kernel()
    assert (kernel._forward._names["before"], kernel._gradient._names["scale"]) == ("pre_tokens", "scale_value")
    kernel._forward._names |= {"before": "pre_tockens"}
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'pre_tockens'"):
        check(kernel, BY_NAME["band"], "npu")


def test_4_a_mode_without_a_mask_is_full_attention(npus: NpuPools) -> None:
    npus(1)(silently_full)


def silently_full(here: Here) -> None:
    register("2.13.0")
    x = draw(1, 2, 6, 8)
    full = OPERATORS.npu_fusion_attention(x, x, x, 2, "BNSD")[0]
    silent = OPERATORS.npu_fusion_attention(x, x, x, 2, "BNSD", sparse_mode=3)[0]
    causal = OPERATORS.npu_fusion_attention(x, x, x, 2, "BNSD", sparse_mode=3, atten_mask=triangle())[0]
    assert torch.equal(silent, full) and not torch.equal(causal, full)


# ---------- 2: lengths


def test_2_lengths_of_the_ring_update(npus: NpuPools) -> None:
    """On the device, in int64, with a leading 0: the opposite of the attention operator's in each respect."""
    npus(1)(ring_lengths)


def ring_lengths(here: Here) -> None:
    register("2.13.0")
    q, k = draw(7, 2, 8), draw(7, 2, 8)
    lengths = {"actual_seq_qlen": [3, 7], "actual_seq_kvlen": [3, 7]}
    parts = [OPERATORS.npu_fusion_attention(q, x, x, 2, "TND", **lengths)[:3] for x in (k, k * 2)]

    def update(ends: Any) -> Any:
        return OPERATORS.npu_ring_attention_update(*parts[0], *parts[1], input_layout="TND", actual_seq_qlen=ends)

    made = update(torch.tensor([0, 3, 7], device="npu"))
    assert bool(made[0].isfinite().all())
    for wrong, says in (
        (torch.tensor([3, 7], device="npu"), "must go from 0 to 7"),
        (torch.tensor([0, 3, 7], device="npu", dtype=torch.int32), "must be int64"),
        (torch.tensor([0, 3, 7]), "Expected NPU tensor"),
    ):
        with pytest.raises(RuntimeError, match=says):
            update(wrong)


def test_2_the_last_end_is_not_the_count_of_tokens(npus: NpuPools) -> None:
    npus(1)(zero_tail)


def zero_tail(here: Here) -> None:
    """Ends of [2, 5, 0, 0] over nine tokens: whoever takes the last for a count sees none, and the rest is poison."""
    register("2.13.0")
    x = draw(9, 2, 8)
    lengths = {"actual_seq_qlen": [2, 5, 0, 0], "actual_seq_kvlen": [2, 5, 0, 0], "softmax_layout": "TND"}
    out, largest, _ = OPERATORS.npu_fusion_attention(x, x, x, 2, "TND", **lengths)[:3]
    assert bool(out[:5].isfinite().all()) and bool(out[5:].isnan().all())
    assert bool(largest[:5].isfinite().all()) and bool(largest[5:].isnan().all())


# ---------- 5: rows with every key masked


def test_5_merging_masked_rows_by_maximum_and_sum(npus: NpuPools) -> None:
    npus(1)(masked_merges)


def masked_merges(here: Here) -> None:
    """Two tiles that a row sees nothing of, then one that it sees: NaN by the ring update, exact by lse."""
    register("2.13.0")
    q, k, hidden = draw(1, 4, 1, 64), draw(1, 4, 1, 64), torch.ones(4, 4, dtype=torch.bool, device="npu")
    sbh = [x.transpose(0, 1).contiguous().flatten(2) for x in (q, k, k)]
    nothing = OPERATORS.npu_fusion_attention(
        *sbh, 1, "SBH", atten_mask=hidden, sparse_mode=1, inner_precise=2, scale=0.1
    )
    something = OPERATORS.npu_fusion_attention(*sbh, 1, "SBH", scale=0.1)
    twice = OPERATORS.npu_ring_attention_update(*nothing[:3], *nothing[:3])
    assert bool(OPERATORS.npu_ring_attention_update(*twice, *something[:3])[0].isnan().all())
    outs, lses = zip(*[canonical(each[0].transpose(0, 1)[:, None], row_lse(*each[1:3])) for each in (
        nothing, nothing, something)], strict=True)  # fmt: skip
    out, lse = outs[0].clone(), lses[0].clone()
    for new in (1, 2):
        merge_(out, lse, outs[new], lses[new], torch.empty(2, 1, 1, 4, device="npu"))
    assert torch.equal(out, outs[2]) and torch.equal(lse, lses[2])


def test_5_hidden_tiles_are_not_computed(npus: NpuPools) -> None:
    assert npus(1)(calls_for_nothing) == [0]


def calls_for_nothing(here: Here) -> int:
    register("2.13.0")
    out, lse = npu_kernel().forward(*[draw(1, 2, 3, 8)] * 3, patch=Patch(0, 3, 0, 3, 5), scale=1.0)
    assert bool((out == 0).all()) and bool((lse == -math.inf).all())
    return len(calls)


# ---------- 6: gradients


def test_6_gradients_are_not_the_same_twice(npus: NpuPools) -> None:
    """A test that compares gradients bit by bit fails here as it would there."""
    npus(1)(unsteady)


def unsteady(here: Here) -> None:
    register("2.13.0")
    x, zeros = draw(1, 2, 32, 8), torch.zeros(1, 2, 32, device="npu")

    def gradients() -> tuple[torch.Tensor, ...]:
        return npu_kernel().backward(x, x, x, x, zeros, zeros, patch=Patch(0, 32, 0, 32), scale=0.1)

    first, second = gradients(), gradients()
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(relative_error(a.cpu(), b.cpu().double()) < 3e-7 for a, b in zip(first, second, strict=True))
    torch.use_deterministic_algorithms(True)
    try:
        assert all(torch.equal(a, b) for a, b in zip(gradients(), gradients(), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
    forward = [npu_kernel().forward(x, x, x, patch=Patch(0, 32, 0, 32), scale=0.1)[0] for _ in range(2)]
    assert torch.equal(*forward)


# ---------- 7: precision of the running output

BLOCKS, ROWS, HEAD_DIM = 8, 128, 128


def test_7_a_running_output_in_bf16_costs_accuracy(npus: NpuPools) -> None:
    ((one_call, ours, in_bf16, ring_update, one_update),) = npus(1)(running_outputs)
    assert ours < 1.5 * one_call
    assert ring_update > 1.5 * one_call and in_bf16 > 1.5 * one_call
    assert one_update < 1.5 * one_call


def running_outputs(here: Here) -> tuple[float, ...]:
    """Errors of: one call; our merge in fp32, in bf16; both operators that merge, given bf16."""
    register("2.13.0")
    half = torch.bfloat16
    q = draw(1, 1, ROWS, HEAD_DIM, dtype=half)
    k, v = (draw(1, 1, BLOCKS * ROWS, HEAD_DIM + more).to(half)[..., :HEAD_DIM].contiguous() for more in (0, 1))
    scale, full, kernel = HEAD_DIM**-0.5, Patch(0, ROWS, 0, ROWS), npu_kernel()
    s = q.cpu().double() @ k.cpu().double().transpose(-1, -2) * scale
    right = s.softmax(-1) @ v.cpu().double()
    whole = kernel.forward(q, k, v, patch=Patch(0, ROWS, 0, BLOCKS * ROWS), scale=scale)[0]
    pieces = [slice(i * ROWS, (i + 1) * ROWS) for i in range(BLOCKS)]
    parts = [kernel.forward(q, *(x[:, :, piece].contiguous() for x in (k, v)), patch=full, scale=scale)
             for piece in pieces]  # fmt: skip
    merged = []
    for dtype in (torch.float32, half):
        out, lse = parts[0][0].to(dtype), parts[0][1].clone()
        for new_out, new_lse in parts[1:]:
            wide, scratch = out.float(), torch.empty(2, *lse.shape, device="npu")
            merge_(wide, lse, new_out, new_lse, scratch)
            out = wide.to(dtype)
        merged.append(out)
    sbh = [x[0, 0][:, None].contiguous() for x in (q, k, v)]
    state: Any = None
    for piece in pieces:
        new = OPERATORS.npu_fusion_attention(
            sbh[0], sbh[1][piece].contiguous(), sbh[2][piece].contiguous(), 1, "SBH", scale=scale
        )[:3]
        state = new if state is None else OPERATORS.npu_ring_attention_update(*state, *new)
    flat = [(lse.flatten(), out.flatten(0, 2)) for out, lse in parts]
    one = OPERATORS.npu_attention_update([lse for lse, _ in flat], [out for _, out in flat], 0)[0]
    outs = (whole, *merged, state[0].transpose(0, 1)[None], one[None, None])
    return tuple(relative_error(x.cpu(), right) for x in outs)


def test_7_our_merge_and_the_operator_agree_in_fp32(npus: NpuPools) -> None:
    assert npus(1)(both_merges)[0] < 2e-7


def both_merges(here: Here) -> float:
    register("2.9.1")
    kernel, q = npu_kernel(), draw(2, 4, 24, 16)
    parts = [kernel.forward(q, draw(2, 2, 24 + i, 16), draw(2, 2, 24 + i, 16), patch=Patch(0, 24, 0, 24 + i),
                            scale=0.3) for i in range(3)]  # fmt: skip
    out, lse = parts[0][0].clone(), parts[0][1].clone()
    for new_out, new_lse in parts[1:]:
        merge_(out, lse, new_out, new_lse, torch.empty(2, *lse.shape, device="npu"))
    flat = [(part_lse.flatten(), part.reshape(-1, 16).contiguous()) for part, part_lse in parts]
    theirs = OPERATORS.npu_attention_update([x for x, _ in flat], [x for _, x in flat], 1)
    assert relative_error(lse.flatten().cpu(), theirs[1].cpu().double()) < 2e-7
    return relative_error(out.reshape(-1, 16).cpu(), theirs[0].cpu().double())


# ---------- 8: the ring update is not everywhere


def test_8_it_is_asked_for_not_assumed(npus: NpuPools) -> None:
    npus(1)(ring_update_absent)


def ring_update_absent(here: Here) -> None:
    register("2.9.1")
    check(npu_kernel(), BY_NAME["causal, square"], "npu")  # the kernel needs none

    class Needy(NpuFusion):
        """Takes for granted that it is there."""

        def __init__(self) -> None:
            super().__init__()
            self._update = find("npu_ring_attention_update")

    with pytest.raises(BackendUnavailable, match="needs the operator npu_ring_attention_update"):
        Needy()
    register("2.13.0")
    check(Needy(), BY_NAME["causal, square"], "npu")
    x = draw(1, 2, 6, 8)
    parts = OPERATORS.npu_fusion_attention(x, x, x, 2, "BNSD")[:3]
    with pytest.raises(RuntimeError, match="input_layout is SBH or TND"):
        OPERATORS.npu_ring_attention_update(*parts, *parts, input_layout="BNSD")
