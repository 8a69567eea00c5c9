"""Patches as calls: each visible pair in exactly one, and each call one that the operator has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from conformance import PATCHES, visible
from cuda_ops import golden

from tokenring.backends.kernels import patch_parts as module
from tokenring.backends.kernels.flash_common import second_version, window
from tokenring.backends.kernels.patch_parts import Part, parts
from tokenring.sequence.region import Patch


def square(patch: Patch) -> bool:
    return patch.is_full or (patch.is_causal and patch.rows == patch.cols)


def top_left(patch: Patch) -> bool:
    return patch.is_full or patch.is_causal


def windows_of_2(patch: Patch) -> bool:
    return second_version(patch) is not None


def windows(patch: Patch) -> bool:
    return window(patch) is not None


SAYS = {"squares": square, "top left": top_left, "windows of 2": windows_of_2, "windows": windows}


def covered(patch: Patch, made: tuple[Part, ...]) -> torch.Tensor:
    """How often each pair is computed: [rows, columns]."""
    count = torch.zeros(patch.rows, patch.cols, dtype=torch.int64)
    for part in made:
        seen = visible(part.patch).long()
        view = count[part.rows, part.cols]
        assert view.shape == seen.shape
        view += seen.flip(0, 1) if part.turned else seen
    return count


def all_patches(most: int = 6) -> Iterator[Patch]:
    bounds = (None, *range(-most, most + 1))
    for rows in range(1, most + 1):
        for cols in range(1, most + 1):
            for low in bounds:
                for high in bounds:
                    yield Patch(2, 2 + rows, 3, 3 + cols, low, high)


def check(patch: Patch, says: Callable[[Patch], bool]) -> int:
    made = parts(patch, says)
    assert torch.equal(covered(patch, made), visible(patch).long()), patch
    assert all(says(part.patch) for part in made), patch
    # No operator meets a row or a column that sees nothing.
    assert all(visible(part.patch).any(dim=0).all() and visible(part.patch).any(dim=1).all() for part in made), patch
    return len(made)


@pytest.mark.parametrize("says", SAYS)
def test_every_small_patch(says: str) -> None:
    for patch in all_patches(4):
        check(patch, SAYS[says])


@pytest.mark.parametrize("says", SAYS)
@pytest.mark.parametrize("name", PATCHES)
def test_patches_of_the_suite(says: str, name: str) -> None:
    check(PATCHES[name], SAYS[says])


@pytest.mark.parametrize("says", SAYS)
def test_unequal_steps(says: str) -> None:
    for steps in ((1, 2), (2, 1), (3, 2), (2, 3), (4, 2), (1, 8)):
        for low, high in ((None, 0), (None, 7), (None, -5), (-3, None), (-6, 6), (4, 5), (None, None)):
            check(Patch(0, 7, 0, 9, low, high, *steps), SAYS[says])


def test_how_many_calls() -> None:
    """One where the operator has the patch; few where it is cut; none where nothing is visible."""
    causal, tall, behind = Patch(0, 9, 0, 9, None, 0), Patch(0, 30, 0, 12, None, 0), Patch(0, 9, 0, 14, None, 5)
    assert [check(each, square) for each in (causal, tall, behind)] == [1, 2, 2]
    assert [check(each, top_left) for each in (causal, tall, behind)] == [1, 1, 2]
    assert [check(each, windows_of_2) for each in (causal, tall, behind)] == [1, 2, 1]
    assert [check(each, windows) for each in (causal, tall, behind)] == [1, 1, 1]
    assert check(Patch(0, 4, 0, 3, None, -9), square) == 0
    assert check(Patch(0, 96, 0, 96, -11, 0), windows) == 1
    assert check(Patch(0, 96, 0, 96, -11, 0), square) < 3 * 96 // 6
    assert len(parts(Patch(0, 4096, 0, 4096, -511, 0), square)) < 3 * 4096 // 256


def test_unequal_steps_are_one_call_for_an_operator_with_any_mask() -> None:
    assert len(parts(PATCHES["unequal steps, band"], lambda patch: True)) == 1


# ---------- windows


@pytest.mark.parametrize("version", [2, 3])
def test_windows_mean_the_patch(version: int) -> None:
    """What flash attention makes of a window is the patch, in every trimmed one."""
    count = 0
    for patch in all_patches(5):
        for part in parts(patch, windows_of_2 if version == 2 else windows):
            found = window(part.patch)
            assert found is not None
            left, right = (-1 if side is None else side for side in found)
            masks = golden.second_version if version == 2 else golden.third_version
            for causal, sides in ((False, (left, right)), (True, (-1, -1)))[: 1 + found.causal]:
                assert torch.equal(masks(part.patch.rows, part.patch.cols, causal, *sides), visible(part.patch)), part
            count += 1
    assert count > 1000


def test_version_2_would_lose_pairs_of_tall_tiles() -> None:
    """Why it has a function of its own: a mutant without it."""
    tall = Patch(0, 30, 0, 12, None, 0)
    assert second_version(tall) is None
    found = window(tall)
    assert found is not None and found.right is not None
    assert not torch.equal(golden.second_version(30, 12, False, -1, found.right), visible(tall))
    assert torch.equal(golden.third_version(30, 12, False, -1, found.right), visible(tall))


# ---------- mutants


def test_mutants_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(patch: Patch) -> bool:
        try:
            check(patch, square)
        except AssertionError:
            return True
        return False

    def turned_without_turning(patch: Patch, says: Callable[[Patch], bool]) -> Iterator[module.Cut]:
        yield from (each._replace(turned=False) for each in lower(patch, says))

    def without_the_rest(patch: Patch, row: int, says: Callable[[Patch], bool]) -> Iterator[module.Cut]:
        yield from list(rows(patch, row, says))[:1]

    lower, rows = module._lower_bound, module._rows_apart
    anti, tall = Patch(0, 9, 0, 9, 0, None), Patch(0, 30, 0, 12, None, 0)
    assert not fails(anti) and not fails(tall)
    with monkeypatch.context() as patched:
        patched.setattr(module, "_lower_bound", turned_without_turning)
        assert fails(anti)
    with monkeypatch.context() as patched:
        patched.setattr(module, "_rows_apart", without_the_rest)
        assert fails(tall)
    with monkeypatch.context() as patched:
        patched.setattr(module, "tidy", lambda patch: patch)
        assert fails(PATCHES["triangle below, rows see nothing"])
