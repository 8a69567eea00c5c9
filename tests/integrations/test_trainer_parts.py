"""Parts of the Trainer over ranks, on trainers that are made of what is read of them: no transformers is needed."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import patient
from ranks import Here, RankPools
from torch.utils.data import IterableDataset

import tokenring as tr
from tokenring.errors import UnsupportedError
from tokenring.integrations.gradient_joins import add_up_gradients
from tokenring.integrations.transformers.batches import BATCH
from tokenring.integrations.transformers.trainer import TokenRingTrainerMixin, _check_arguments
from tokenring.integrations.transformers.training import _with_gradient

PROCESSES = 4


class Multiplying:
    """The loss of transformers' Trainer, which multiplies it where the model takes the number of items."""

    def __init__(self, here: Here, accepts: bool) -> None:
        self.tokenring, self.model_accepts_loss_kwargs = here.cp(), accepts
        self.accelerator = SimpleNamespace(num_processes=PROCESSES)
        self.args = SimpleNamespace(average_tokens_across_devices=True)

    def multiplies(self, items: Any) -> bool:
        """Tell whether the Trainer's loss is multiplied by the number of processes."""
        return bool(self.args.average_tokens_across_devices and items is not None and self.model_accepts_loss_kwargs)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool, items: Any = None) -> Any:
        loss = torch.tensor(3.0) * (PROCESSES if self.multiplies(items) else 1)
        return (loss, "outputs") if return_outputs else loss


class MultiplyingAlways(Multiplying):
    """The loss of trl's SFTTrainer, which multiplies it whatever the model takes."""

    def multiplies(self, items: Any) -> bool:
        """Tell whether the SFTTrainer's loss is multiplied by the number of processes."""
        return bool(self.args.average_tokens_across_devices and items is not None)


def share(here: Here, kind: type[Multiplying], accepts: bool) -> tuple[float, Any, bool]:
    """Return the loss of a cut batch whose items the trainer did not count, and what comes with it."""
    ours: Any = type("Ours", (TokenRingTrainerMixin, kind), {"__init__": kind.__init__})(here, accepts)
    inputs = {BATCH: "cut", "num_items_in_batch": 8}
    loss, outputs = ours.compute_loss("a model", inputs, return_outputs=True)
    assert ours.compute_loss("a model", inputs) == loss
    return loss.item(), outputs, ours.args.average_tokens_across_devices


@pytest.mark.parametrize("kind", [Multiplying, MultiplyingAlways])
@pytest.mark.parametrize("accepts", [True, False])
def test_a_share_is_multiplied_by_the_ranks_that_share_the_batch(
    kind: type[Multiplying], accepts: bool, ranks: RankPools
) -> None:
    """So that the mean over all processes is that of the groups; trainers would multiply it by all."""
    assert ranks(2)(share, kind, accepts) == [(6.0, "outputs", True)] * 2


class Counting:
    """The count of transformers' Trainer: of the batches of all processes."""

    def _track_num_input_tokens(self, inputs: list[int]) -> None:
        self.state.num_input_tokens_seen += PROCESSES * len(inputs)  # type: ignore[attr-defined]


def counted(here: Here) -> list[int]:
    """Return how many tokens were seen after each of two batches of a training that is resumed."""
    ours: Any = type("Ours", (TokenRingTrainerMixin, Counting), {"__init__": object.__init__})()
    ours.tokenring, ours.state, seen = here.cp(), SimpleNamespace(num_input_tokens_seen=7), []
    for length in (20, 5):
        ours._track_num_input_tokens([0] * length)
        seen.append(ours.state.num_input_tokens_seen)
    return seen


def test_tokens_are_counted_once_for_ranks_that_share_them(ranks: RankPools) -> None:
    assert ranks(2)(counted) == [[7 + 40, 7 + 40 + 10]] * 2


# ---------- datasets that rank 0 reads


class Stream(IterableDataset[int]):
    """A dataset that accelerate lets rank 0 read for all."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Loading:
    """The data loaders of transformers' Trainer."""

    def _get_dataloader(self, dataset: Any, description: str) -> str:
        return description

    def evaluate(self, dataset: Any) -> str:
        """Load a dataset as transformers does, which gets here by several ways."""
        return self._get_dataloader(dataset, description="Evaluation")


def read(here: Here, dispatch: bool | None, dataset: Any, made_with: Any) -> str:
    """Return what a trainer says of datasets that it is made with, or evaluates."""
    ours: Any = type("Ours", (TokenRingTrainerMixin, Loading), {"__init__": object.__init__})()
    ours.args = SimpleNamespace(accelerator_config=SimpleNamespace(dispatch_batches=dispatch))
    ours.tokenring, ours.model, ours.eval_dataset = here.cp(), torch.nn.Linear(1, 1), made_with
    try:
        _check_arguments(ours)
        return str(ours.evaluate(dataset))
    except UnsupportedError as error:
        return str(error)


@pytest.mark.parametrize(("dispatch", "dataset", "made_with", "said"), [
    (None, [1], {"one": [1], "other": [2]}, "Evaluation"),
    (None, [1], {"one": [1], "other": Stream()}, "batches that rank 0 dispatches"),
    (None, Stream(), None, "batches that rank 0 dispatches"),
    (True, [1], None, "batches that rank 0 dispatches"),
    (False, Stream(), {"one": Stream()}, "Evaluation"),
])  # fmt: skip
def test_datasets_that_rank_0_reads_are_refused(
    dispatch: bool | None, dataset: Any, made_with: Any, said: str, ranks: RankPools
) -> None:
    """Those of an evaluation, too, of which there may be several by name."""
    assert all(text.startswith(said) for text in ranks(2)(read, dispatch, dataset, made_with))
    assert read(Here(0, 1, tr.ContextParallel("self")), dispatch, dataset, made_with) == "Evaluation"


# ---------- a rank that does not come


class Evaluating(Multiplying):
    """The evaluation of a batch that transformers' Trainer makes."""

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool) -> Any:
        return torch.tensor(3.0), None, None


def added_gradients(cp: tr.ContextParallel) -> None:
    model = torch.nn.Linear(2, 2)
    torch.autograd.backward(model(torch.ones(1, 2)).sum())
    add_up_gradients(model, cp)


def added_loss(cp: tr.ContextParallel) -> None:
    _with_gradient(torch.tensor(3.0, requires_grad=True), cp, 1)


def added_evaluation(cp: tr.ContextParallel) -> None:
    ours: Any = type("Ours", (TokenRingTrainerMixin, Evaluating), {"__init__": object.__init__})()
    ours.tokenring = cp
    ours.prediction_step("a model", {"labels": "labels"}, prediction_loss_only=True)


def waited(here: Here, call: Any) -> str:
    """Return what rank 0 hears of rank 1, which leaves a sum over ranks out."""
    group = dist.new_group([0, 1])
    cp = tr.ContextParallel(group, timeout_seconds=patient(1.0))
    assert cp.transport is not None
    call(cp)
    try:
        if here.rank == 0:
            call(cp)
    except tr.PeerLost as error:
        return str(error)
    finally:
        cp.close()
    return "nothing"


@pytest.mark.waits
@pytest.mark.parametrize(("call", "what"), [
    (added_gradients, "adding up gradients"), (added_loss, "adding up the loss"),
    (added_evaluation, "adding up the loss of an evaluation"),
])  # fmt: skip
def test_a_rank_that_does_not_come_to_a_sum_is_named(call: Any, what: str, ranks: RankPools) -> None:
    """Within the time limit of cp: that of a group is half an hour."""
    said, other = ranks(2)(waited, call)
    assert said.startswith("rank 1 of 2 is lost") and f"took part in {what}" in said and other == "nothing"
