"""Parts of serving that need no transformers: sizes, masks of padding, windows of a config."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from beam_replay import replayed, rows_of

import tokenring as tr
from tokenring.integrations.transformers.serving import serve_with_tokenring, starts_of, windows_of
from tokenring.sequence.layout import make_layout


@pytest.mark.parametrize("options", [{"page": 0}, {"chunk": 0}, {"shard_from": -1}])
def test_sizes_that_cannot_be(options: dict[str, int]) -> None:
    with pytest.raises(tr.ConfigurationError, match="give a positive integer"):
        serve_with_tokenring(None, tr.ContextParallel("self"), **options)


@pytest.mark.parametrize(
    ("chunk", "shard_from", "layout", "said"),
    [(32, 64, "zigzag", "from 64 on"), (70, 64, "zigzag/40", "from 80 on"),
     (70, 64, make_layout("zigzag", 1, 96), "from 96 on")],
)  # fmt: skip
def test_a_chunk_that_is_never_cut(chunk: int, shard_from: int, layout: Any, said: str) -> None:
    cp = tr.ContextParallel("self", layout=layout)
    with pytest.raises(tr.ConfigurationError, match=f"cuts nothing over the ranks: give a chunk {said}"):
        serve_with_tokenring(None, cp, chunk=chunk, shard_from=shard_from)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(tr.BackendUnavailable, match="transformers is not installed here"):
        serve_with_tokenring(torch.nn.Linear(1, 1), tr.ContextParallel("self"))


def test_first_tokens_of_padded_rows() -> None:
    found = starts_of(torch.tensor([[0, 0, 1], [1, 1, 1]]), 2, 3)
    assert found is not None and found.tolist() == [2, 0]
    assert starts_of(torch.ones(2, 3), 2, 3) is None and starts_of(None, 2, 3) is None


@pytest.mark.parametrize(
    ("mask", "said"),
    [(torch.tensor([[1, 0, 1]]), "pad on the left"), (torch.tensor([[1, 1, 0]]), "pad on the left"),
     (torch.ones(1, 4), "takes padding"), (torch.ones(1, 1, 3, 3), "takes padding"), ({}, "is dict")],
)  # fmt: skip
def test_masks_that_are_none_of_padding(mask: object, said: str) -> None:
    with pytest.raises(tr.UnsupportedError, match=said):
        starts_of(mask, 1, 3)


def test_windows_of_layers() -> None:
    config = SimpleNamespace(num_hidden_layers=2, sliding_window=8)
    assert windows_of(config) == [8, 8]
    config.layer_types = ["full_attention", "sliding_attention"]
    assert windows_of(config) == [None, 8]
    assert windows_of(SimpleNamespace(num_hidden_layers=2)) == [None, None]
    config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(tr.UnsupportedError, match="layers of kind linear_attention"):
        windows_of(config)


# ---------- searches, compared by their scores


def search(steps: int = 6, beams: int = 3, seed: int = 0) -> torch.Tensor:
    """Scores that differ from way to way by far more than rounding; of beams, each step's are its own."""
    return torch.rand(steps, beams, 8, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


@pytest.mark.parametrize("beams", [1, 3])
class TestReplays:
    def test_the_same_but_for_rounding(self, beams: int) -> None:
        scores = search(beams=beams)
        found = replayed(scores + 1e-6, scores)
        assert found.tied is found.parted is None and 5e-7 < found.error < 2e-6

    def test_scores_that_are_wrong(self, beams: int) -> None:
        scores = search(beams=beams)
        wrong = scores.clone()
        wrong[4, 0, 7] -= 1e-2
        assert replayed(wrong, scores).parted == 4
        wrong[4, 0, 7] = -torch.inf
        assert replayed(wrong, scores).parted == 4
        assert replayed(scores[:5], scores).parted == replayed(scores, scores[:5]).parted == 0

    def test_another_way_without_a_reason(self, beams: int) -> None:
        scores = search(beams=beams)
        best = scores[2, 0].topk(2)
        assert float(best.values[0] - best.values[1]) > 1e-3
        other = scores.clone()
        other[2, 0, best.indices] = best.values.flip(0)
        assert replayed(other, scores).parted == 2

    def test_two_ways_that_are_as_good(self, beams: int) -> None:
        """Let what comes after them differ, as what follows another token does."""
        scores = search(beams=1).expand(-1, beams, -1).contiguous()
        scores[2, :, 1:3] = -0.5
        found = scores.clone()
        found[2, :, 1] += 2e-6
        scores[2, :, 2] += 2e-6
        found[3:] = search(seed=1)[3:, :1]
        ways = replayed(found, scores)
        assert (ways.tied, ways.parted) == (2, None) and ways.error == pytest.approx(2e-6, abs=2e-7)
        scores[2, :, 1] += 1e-3
        assert replayed(found, scores).parted == 2


def test_rows_of_a_batch() -> None:
    scores = torch.arange(2 * 6 * 4).view(2, 6, 4)
    assert torch.equal(torch.cat(list(rows_of(scores, 3)), 1), scores)
