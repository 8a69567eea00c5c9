"""Parts of the Trainer over ranks, on trainers that are made of what is read of them: no transformers is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import Here, RankPools

from tokenring.integrations.transformers.batches import BATCH
from tokenring.integrations.transformers.trainer import TokenRingTrainerMixin

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
