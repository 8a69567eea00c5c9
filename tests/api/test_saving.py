"""Copies of what holds a context share it; saving it is refused in words, and state_dict has nothing of it."""

from __future__ import annotations

import copy
import io
import multiprocessing.reduction
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Here, RankPools
from torch.optim.swa_utils import AveragedModel

import tokenring as tr
from tokenring import ContextParallel, UnsupportedError
from tokenring.api.standing import context_of

X = torch.ones(1, 8, 2, 16)


class Layer(torch.nn.Module):
    """Holds a context, as the layers of a model do."""

    def __init__(self, cp: ContextParallel) -> None:
        super().__init__()
        self.cp = cp
        self.weight = torch.nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.weight(x)
        return tr.attention(q, q, q, self.cp, tr.Causal())


def copies(here: Here) -> list[bool]:
    """Of a context that has met, and of a model with it: each computes as the first, and can be trained."""
    cp = here.cp(schedule="ring")
    model = Layer(cp)
    before = model(X)
    found = [copy.copy(cp) is cp, copy.deepcopy(cp) is cp, copy.deepcopy([cp])[0] is cp, context_of(cp.handle) is cp]
    for made in (copy.copy(model), copy.deepcopy(model), AveragedModel(model)):
        found.append(torch.equal(made(X), before))
    averaged = AveragedModel(model)
    torch.autograd.backward(copy.deepcopy(model)(X).sum())
    averaged.update_parameters(model)
    held: Any = averaged.module
    found.append(held.cp is cp)
    other = Layer(cp)
    other.load_state_dict(pickle.loads(pickle.dumps(model.state_dict())))
    found += [torch.equal(other(X), before), list(model.state_dict()) == ["weight.weight"]]
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_copies_share_the_context(world_size: int, ranks: RankPools) -> None:
    for found in ranks(world_size)(copies):
        assert all(found), found


SAVE: dict[str, Callable[[Any], object]] = {
    "pickle": pickle.dumps,
    "an old protocol": lambda x: pickle.dumps(x, 0),
    "python's pickle": lambda x: pickle._Pickler(io.BytesIO()).dump(x),
    "torch.save": lambda x: torch.save(x, io.BytesIO()),
    "for another process": lambda x: multiprocessing.reduction.ForkingPickler.dumps(x),
}


def saved(here: Here, way: str) -> list[str]:
    cp = here.cp(schedule="ring")
    said = []
    for what in (cp, Layer(cp), {"context": cp}):
        with pytest.raises(UnsupportedError) as caught:
            SAVE[way](what)
        assert isinstance(caught.value, pickle.PicklingError)
        said.append(str(caught.value))
    assert tr.attention(X, X, X, cp).shape == X.shape
    return said


@pytest.mark.parametrize("way", SAVE)
@pytest.mark.parametrize("world_size", [1, 2])
def test_saving_is_refused(world_size: int, way: str, ranks: RankPools) -> None:
    for said in ranks(world_size)(saved, way):
        assert len(set(said)) == 1
        assert said[0].startswith("a ContextParallel cannot be pickled or saved: it stands for the group")
        assert "Save model.state_dict() instead of the model" in said[0] and "after loading" in said[0]
