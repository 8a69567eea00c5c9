"""One rank of the demo, as torchrun starts it: python -m tokenring.cli.demo.worker --seq 8192 ...

Its standard output carries results for the process that shows them, its standard error a log.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch

import tokenring as tr
from tokenring.backends.devices import device_of
from tokenring.cli.demo.check import check
from tokenring.cli.demo.data import VOCABULARY, Text, text_tokens
from tokenring.cli.demo.measure import measure
from tokenring.cli.demo.model import ModelConfig, Transformer
from tokenring.cli.demo.results import Result, Started, Stepped, to_line
from tokenring.cli.demo.train import Trainer, split_attention, sum_over_ranks
from tokenring.launch.command import process_group
from tokenring.launch.follow import end_with_parent, fail, report_line

WAIT_SECONDS = 120.0  # for other ranks: one process computes the reference meanwhile


def main(argv: list[str] | None = None) -> int:
    """Run this rank; return the exit code."""
    end_with_parent()
    torch.set_num_threads(1)
    options = _options(argv)
    rank = int(os.environ["RANK"])
    try:
        with process_group(WAIT_SECONDS):
            run(options, rank)
    except Exception as error:
        return fail(error, report)
    return 0


def run(options: argparse.Namespace, rank: int) -> None:
    """Run the check, the training and the measurement; rank 0 reports."""
    cp = tr.ContextParallel(layout=options.layout, schedule=options.schedule, timeout_seconds=WAIT_SECONDS)
    cp.layout_for(options.seq)  # a length that does not divide is refused before anything is said
    config = ModelConfig(vocabulary=VOCABULARY)
    model = Transformer(config, options.seed)
    tokens = text_tokens()
    text = Text(tokens, options.seq, options.seed)
    attend = split_attention(cp)
    tell = report if rank == 0 else lambda result: None
    tell(_started(config, model, tokens.numel()))

    whole = text.batch()
    checked = check(model, whole, whole.shard(cp), attend)
    if checked is not None:
        tell(checked)

    trainer = Trainer(model, attend, options.steps)
    clock = device_of(next(model.parameters())).clock
    training_began = clock()
    for step in range(options.steps):
        began = clock()
        loss = trainer.step(step, text.batch().shard(cp), options.seq)
        tell(Stepped(step + 1, loss, clock() - began))
        if _any_rank(clock() - training_began > options.training_seconds):
            break
    tell(measure(config, options.seq, cp))


def report(result: Result) -> None:
    """Print a line for the process that shows it."""
    report_line(to_line(result))


def _started(config: ModelConfig, model: Transformer, text_bytes: int) -> Started:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Started(
        parameters, config.layers, config.q_heads, config.kv_heads, config.head_dim, text_bytes, torch.__version__
    )


def _any_rank(here: bool) -> bool:
    """Tell whether this holds on any rank: ranks must agree when to stop, and their clocks do not."""
    votes = torch.tensor([float(here)])
    sum_over_ranks([votes])
    return bool(votes.item())


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--layout", required=True)
    parser.add_argument("--schedule", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--training-seconds", type=float, required=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
