"""The choice of a wire format for attention: the one by which a call is predicted fastest, within an allowed error.

A plan is made without any format first. Then the schedules that were near it are simulated in each format that keeps
to the error. What encoding and decoding take beyond the one pass over memory that simulations count is added, as if
nothing hid it: so a format is taken only where links are slow enough for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from tokenring.display.units import time_text
from tokenring.errors import ConfigurationError, ScheduleError, UnsupportedError
from tokenring.ir.schedule_data import Pass
from tokenring.ir.wire_formats import FORMATS, REQUESTS_ENCODED, WireFormat, codecs_of, encoded
from tokenring.planner.choosing.auto import CallToPlan, is_folded, make
from tokenring.planner.choosing.candidates import Candidate
from tokenring.planner.choosing.judged import RISK
from tokenring.planner.choosing.plan import Plan
from tokenring.planner.choosing.select import check_connections, connected
from tokenring.planner.simulation.predict import Prediction, Setting, predict
from tokenring.proof.encodings import check_codecs
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.workload import Workload

MOST_NAMES = 6  # schedules that are tried in each format
LEAST_GAIN = 0.02  # of the time without a format: for less none is taken
FEW_EXPONENTS = frozenset({"fp16"})
OF_MANY_RANKS = "no wire format was tried, as one host stands for all"
OF_LATENTS, OF_NO_TIME = "latents travel in no wire format", "no wire format was tried, as no time is predicted"
OPERATOR_SECONDS = 5e-6  # of one of torch's, at most: an operation of ours, beside kernels, may be several
# Encodings on the way to the result that has most: to out those of q and k in scores, and of v; to dk those of k, of v,
# and twice of q (also in scores) and dout (also in delta). Scores are taken to have a spread of 1: so much do errors
# of theirs change weights.
ENCODINGS: Mapping[tuple[Pass, ...], int] = {("forward",): 3, ("forward", "backward"): 6}


class CodecCost(NamedTuple):
    """The operators that encode or decode rows, and the bytes of their inputs and outputs; a test counts both."""

    operators: int
    touched_bytes: float


ENCODING = {
    "bf16": CodecCost(1, 8), "fp16": CodecCost(1, 8), "mxint8": CodecCost(20, 59), "mxfp8": CodecCost(17, 35),
    "mxfp8-e5m2": CodecCost(17, 35), "mxfp4": CodecCost(36, 105),
}  # fmt: skip
DECODING = {
    "bf16": CodecCost(1, 10), "fp16": CodecCost(1, 10), "mxint8": CodecCost(11, 35), "mxfp8": CodecCost(10, 27),
    "mxfp8-e5m2": CodecCost(10, 27), "mxfp4": CodecCost(21, 45),
}  # fmt: skip


class InFormat(NamedTuple):
    """A schedule in a format, and its time with all that encoding and decoding take."""

    seconds: float
    schedule: Schedule
    form: WireFormat
    prediction: Prediction

    @property
    def weighed_seconds(self) -> float:
        """Seconds by which it is compared with others in a format, as plans are: wires are where predictions fail."""
        cost = self.prediction
        return self.seconds + RISK * max(0.0, cost.wires.seconds - cost.compute_seconds)


def attention_error(form: WireFormat, passes: tuple[Pass, ...]) -> float:
    """Return the relative error that a format adds to a result of attention at most, of normally distributed data."""
    return form.relative_rms * math.sqrt(ENCODINGS.get(passes, max(ENCODINGS.values())))


def allowed(size: Workload, passes: tuple[Pass, ...], max_error: float) -> list[WireFormat]:
    """Return the formats that keep to the error, fit the sizes and save bytes; of those as small, the most exact.

    Not those of fewer exponents than tensors have: gradients of a mean loss may be so small that they would be lost.
    """
    fitting = [
        form
        for form in FORMATS.values()
        if attention_error(form, passes) <= max_error
        and form.element_bits < 8 * size.itemsize
        and form.name not in FEW_EXPONENTS
        and not any(width % form.block for width in (size.head_dim, size.value_dim))
    ]
    return [form for form in fitting if not any(_is_better(other, form, size.head_dim) for other in fitting)]


def _is_better(other: WireFormat, form: WireFormat, width: int) -> bool:
    return other.relative_rms < form.relative_rms and other.row_bytes(width) <= form.row_bytes(width)


def within_error(plan: Plan, call: CallToPlan, max_error: float) -> Plan:
    """Return the plan, or that of the same call in a format which adds no more than this error and makes it faster.

    Its reason says why none is taken.
    """
    size, passes = call.setting.workload, call.setting.passes
    plain_seconds = plan.candidates[0].predicted_seconds if plan.candidates else None
    if is_folded(call):
        return replace(plan, reason=f"{plan.reason}; {OF_MANY_RANKS}")
    if plain_seconds is None or size.latent_dim is not None:
        return replace(plan, reason=f"{plan.reason}; {OF_LATENTS if size.latent_dim else OF_NO_TIME}")
    over = call.in_mode(plan.transport)
    forms = allowed(size, passes, max_error)
    found = [each for form in forms for each in _in_format(over, _names(plan), form)]
    if (advised := call.setting.target.advised_connections) is not None:
        most = max(advised, plan.candidates[0].connections or 0)
        found = [each for each in found if each.prediction.connections <= most]
    best = min(found, key=lambda each: each.weighed_seconds, default=None)
    if best is None or best.seconds > plain_seconds * (1 - LEAST_GAIN):
        return replace(plan, reason=f"{plan.reason}; no wire format within an error of {max_error:g} makes it faster")
    bound = plan.candidates[0].bound_seconds
    reason = (
        f"{best.schedule.name} with q and kv in {best.form.name} on the wire: {time_text(best.seconds)} predicted for "
        f"{' + '.join(passes)} on {over.setting.interconnect.name}, encoding counted; it adds an error of about "
        f"{attention_error(best.form, passes):.2g} at most, of {max_error:g} allowed; without a format {plan.reason}"
    )
    first = _candidate(best, bound, f"the fastest, in {best.form.name}")
    others = (replace(each, reason=f"without a format: {each.reason}") for each in plan.candidates)
    return replace(plan, schedule=best.schedule, reason=reason, candidates=(first, *others), direction=None)


def _names(plan: Plan) -> list[str]:
    return [each.name for each in plan.candidates if each.predicted_seconds is not None][:MOST_NAMES]


def _in_format(call: CallToPlan, names: Sequence[str], form: WireFormat) -> list[InFormat]:
    """Return these schedules in a format, those that fit, with their times."""
    setting, found = call.setting, []
    codecs = codecs_of(form.name, setting.workload.dtype, REQUESTS_ENCODED)
    for name in names:
        try:
            plain = make(call, name)
            made = encoded(plain, codecs)
            check_codecs(made)
            check_connections(plain, setting)
        except (ConfigurationError, ScheduleError, UnsupportedError):
            continue
        cost = predict(made, setting)
        if call.memory_limit_bytes is None or cost.peak_bytes <= call.memory_limit_bytes:
            seconds = cost.seconds + codec_seconds(plain, made, form, setting)
            found.append(InFormat(seconds, made, form, cost))
    return found


def codec_seconds(plain: Schedule, made: Schedule, form: WireFormat, setting: Setting) -> float:
    """Return what encoding and decoding take at the rank that gets most, if nothing hides any of it."""
    size, rates, ranks = setting.workload, setting.machine.rates, setting.interconnect.world_size
    saved_bits = 8 * size.itemsize - 8 * form.row_bytes(form.block) / form.block
    encoding, decoding, others = ENCODING[form.name], DECODING[form.name], max(1, ranks - 1)
    seconds = 0.0
    for direction in setting.passes:
        saved: Counter[int] = Counter()
        for sign, each in ((1, plain), (-1, made)):
            for (_, dst), nbytes in each.link_bytes(size, direction).items():
                saved[dst] += sign * nbytes
        elements = 8 * max(saved.values(), default=0) / saved_bits
        moves = Counter(move.dst for move in made.moves_in(direction) if move.block.kind in made.formats)
        messages = max(moves.values(), default=0)
        touched = elements * (decoding.touched_bytes + encoding.touched_bytes / others)
        operators = messages * decoding.operators + math.ceil(messages / others) * encoding.operators
        seconds += touched / (rates.copy_gbs * 1e9) + operators * _operator_seconds(setting)
    return seconds


def _operator_seconds(setting: Setting) -> float:
    rates = setting.machine.rates
    launch_seconds = rates.launching.seconds if rates.launching is not None else 0.0
    return max(min(rates.op_seconds, OPERATOR_SECONDS), launch_seconds)


def _candidate(best: InFormat, bound_seconds: float | None, reason: str) -> Candidate:
    cost = best.prediction
    return Candidate(
        best.schedule.name, best.seconds, cost.compute_seconds, cost.exposed_seconds, cost.wires.worst_bytes,
        cost.peak_bytes, bound_seconds, reason, *connected(cost.connections, cost.connection_bytes),
    )  # fmt: skip
