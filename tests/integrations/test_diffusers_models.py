"""Tiny Flux, Wan and QwenImage of diffusers, split over ranks: output and gradients of one process.

A sample; `python benchmarks/diffusers_models.py` runs every model, length and number of ranks, and counts bytes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import RankPools
from sampling import FULL_GRID
from tiny_diffusers import MODELS, is_exact, make_inputs, make_model, need, split

import tokenring as tr
from tokenring.errors import UnsupportedError
from tokenring.integrations.diffusers import use_tokenring
from tokenring.integrations.diffusers.plans import PLANS

need()
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LENGTHS = [(7, 30), (9, 23), (8, 24)] if FULL_GRID else [(7, 30)]


@pytest.mark.parametrize(("text", "image"), LENGTHS)
@pytest.mark.parametrize("name", MODELS)
def test_both_passes(name: str, text: int, image: int, ranks: RankPools) -> None:
    for error, alone, what in ranks(3)(split, name, text, image, "auto", False, 2, 5):
        assert is_exact(error, alone), what


def test_compiled(ranks: RankPools) -> None:
    for error, alone, what in ranks(2)(split, "flux", 7, 23, "auto", True):
        assert is_exact(error, alone), what


@pytest.mark.parametrize("name", MODELS)
def test_what_diffusers_cuts_is_cut_here(name: str) -> None:
    """Every entry of diffusers' own plan but masks, which are taken out or refused."""
    kind = type(make_model(name))
    ours = {(each.module, each.where, each.dim) for each in PLANS[kind.__name__].places}
    theirs, gathered = set(), []
    for module, entry in kind._cp_plan.items():
        if isinstance(entry, dict):
            theirs |= {(module, where, each.split_dim) for where, each in entry.items() if "mask" not in str(where)}
        else:
            gathered.append((module, entry.gather_dim))
    assert theirs == ours and gathered == [(PLANS[kind.__name__].gathered, 1)]


def test_masks_of_text_are_taken_out_or_refused() -> None:
    call: dict[str, Any] = make_inputs("qwenimage", 7, 23, 2)
    model, plain = use_tokenring(make_model("qwenimage"), tr.ContextParallel("self")), make_model("qwenimage")
    mask = torch.ones(2, 7)
    for padding in (0, 2):
        mask[:, 7 - padding :] = 0
        given = {**call, "encoder_hidden_states_mask": mask}
        assert torch.allclose(model(**given).sample, plain(**given).sample, atol=1e-4)
    mask[0, 5] = 1
    with pytest.raises(UnsupportedError, match="equally much in each row"):
        model(**call, encoder_hidden_states_mask=mask)
