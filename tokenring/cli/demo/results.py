"""Results that ranks report to the process that shows them: one line of JSON each, and what must hold of it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tokenring.cli.trace.record import Bar, Stretch, TracedMessage
from tokenring.launch.follow import Failed

PREFIX = "@tokenring-demo "  # anything else that a rank prints is not ours
LOSS_LIMIT = 1e-6  # relative
GRADIENT_LIMIT = 2e-5  # relative Frobenius error, of every parameter; fp32
LEAST_FALL = 1.0  # of the loss, in nats a byte
ENDS = 3  # so many steps at either end are averaged for that


@dataclass(frozen=True)
class Started:
    """The start of the ranks, which have found each other: the model, the text and the torch that they use."""

    parameters: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    text_bytes: int
    torch: str


@dataclass(frozen=True)
class Checked:
    """Loss and gradients of one batch, split over the ranks and in one process."""

    split_loss: float
    whole_loss: float
    gradient_errors: dict[str, float]  # by parameter
    seconds: float

    @property
    def loss_error(self) -> float:
        """The relative error of the split loss."""
        return abs(self.split_loss - self.whole_loss) / abs(self.whole_loss)

    @property
    def worst(self) -> tuple[str, float]:
        """The parameter whose gradient differs most, and its error; NaN is worse than any number."""
        return max(self.gradient_errors.items(), key=lambda item: (math.isnan(item[1]), item[1]))

    def complaint(self) -> str | None:
        """Return what is wrong; None: nothing is."""
        name, error = self.worst
        if not self.loss_error <= LOSS_LIMIT:  # so that NaN is refused
            return (
                f"the split loss {self.split_loss!r} differs from that of one process, {self.whole_loss!r}, "
                f"by {self.loss_error:.1e} relative; the limit is {LOSS_LIMIT:.0e}"
            )
        if not error <= GRADIENT_LIMIT:
            return f"the gradient of {name} differs by {error:.1e} relative; the limit is {GRADIENT_LIMIT:.0e}"
        return None


@dataclass(frozen=True)
class Stepped:
    """One step of training; the loss is the mean over the whole sequence, before the update."""

    step: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class Pass:
    """One pass of one attention call. Bytes are [source][destination], seconds means over the ranks."""

    name: str
    predicted_bytes: list[list[int]]
    counted_bytes: list[list[int]]
    split_seconds: dict[str, float]

    def complaint(self) -> str | None:
        """Return the first link that carried other bytes than predicted; None: there is none."""
        for src, (predicted, counted) in enumerate(zip(self.predicted_bytes, self.counted_bytes, strict=True)):
            for dst, (wanted, found) in enumerate(zip(predicted, counted, strict=True)):
                if wanted != found:
                    return f"{self.name}: link {src} → {dst} carried {found:,} bytes; predicted were {wanted:,}"
        return None


@dataclass(frozen=True)
class DemoMeasured:
    """One attention call of the model's shape, forward and backward."""

    schedule: str
    reason: str
    passes: list[Pass]
    stretches: list[Stretch]
    bars: list[Bar]
    messages: list[TracedMessage]

    def complaint(self) -> str | None:
        """Return what was counted otherwise than predicted; None: nothing was."""
        return next((text for each in self.passes if (text := each.complaint())), None)


Result = Started | Checked | Stepped | DemoMeasured | Failed
KINDS: dict[str, type[Result]] = {kind.__name__: kind for kind in (Started, Checked, Stepped, DemoMeasured, Failed)}


def to_line(result: Result) -> str:
    """Return the result as a line of text."""
    return PREFIX + json.dumps([type(result).__name__, asdict(result)])


def from_line(line: str) -> Result | None:
    """Read the result in a line that to_line wrote; return None for any other line."""
    if not line.startswith(PREFIX):
        return None
    kind, values = json.loads(line.removeprefix(PREFIX))
    if kind == DemoMeasured.__name__:
        values["passes"] = [Pass(**each) for each in values["passes"]]
        values["stretches"] = [Stretch(**each) for each in values["stretches"]]
        values["bars"] = [Bar(**each) for each in values["bars"]]
        values["messages"] = [TracedMessage(**each) for each in values["messages"]]
    return KINDS[kind](**values)


def first_and_last(losses: Sequence[float]) -> tuple[float, float]:
    """Return the mean loss of the first steps, and of the last."""
    first, last = losses[:ENDS], losses[-ENDS:]
    return sum(first) / len(first), sum(last) / len(last)


def training_complaint(losses: Sequence[float]) -> str | None:
    """Return the sentence that the loss did not fall; None: it did."""
    first, last = first_and_last(losses)
    if first - last >= LEAST_FALL:
        return None
    return f"the loss went from {first:.3f} to {last:.3f}: it should fall by {LEAST_FALL:g} or more"
