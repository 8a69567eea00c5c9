"""Wire formats of planned attention: within an error that is allowed, where links are slow enough, else none."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from nets import BOTH, call, of_hosts, setting, with_network, workload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenring.backends.codecs.choice import codec_of
from tokenring.ir.wire_formats import FORMATS, codecs_of, encoded
from tokenring.lowering.target import Target
from tokenring.planner.choosing.auto import CallToPlan, is_folded, make, plan_call
from tokenring.planner.choosing.judged import RISK
from tokenring.planner.formats.error_budget import (
    DECODING,
    ENCODING,
    allowed,
    attention_error,
    codec_seconds,
    within_error,
)
from tokenring.planner.interconnects.interconnect import full_mesh, mesh_fabric
from tokenring.planner.simulation.predict import predict
from tokenring.sequence.mask import Causal
from tokenring.sequence.workload import Workload
from tokenring.tables.rates import Machine, Messages, constant

FAMILIES = ("ring", "tokenring", "direct-kv", "direct-q")
SLOW, FAST = 0.01, 1000.0  # GB/s of a link


def asked(gbs: float, dtype: torch.dtype = torch.bfloat16, copy_gbs: float = 100.0) -> CallToPlan:
    of = setting(full_mesh(4, gbs), workload(4, dtype=dtype), BOTH)
    machine = Machine(replace(constant(100.0, "test", copy_gbs), op_seconds=2e-6), Messages(20e-6, 10e-6))
    return call(replace(of, machine=machine), Causal(), families=FAMILIES)


@pytest.mark.parametrize(
    ("dtype", "max_error", "form"),
    [
        (torch.bfloat16, 0.02, None), (torch.bfloat16, 0.021, "mxint8"), (torch.bfloat16, 0.1, "mxint8"),
        (torch.bfloat16, 0.29, "mxfp4"), (torch.float32, 0.005, "bf16"), (torch.float32, 0.001, None),
        (torch.float16, 0.03, "mxint8"),
    ],
)  # fmt: skip
def test_the_smallest_format_that_the_error_allows_on_slow_links(
    dtype: torch.dtype, max_error: float, form: str | None
) -> None:
    of = asked(SLOW, dtype)
    plain = plan_call(of)
    found = within_error(plain, of, max_error)
    if form is None:
        assert found.schedule == plain.schedule and found.candidates == plain.candidates
        assert found.reason.endswith(f"no wire format within an error of {max_error:g} makes it faster")
        return
    assert found.schedule.verify().formats == {"kv": form, "q": form}
    assert attention_error(FORMATS[form], BOTH) <= max_error
    first, rest = found.candidates[0], found.candidates[1:]
    assert first.predicted_seconds is not None and rest[0].predicted_seconds is not None
    assert first.predicted_seconds < 0.98 * rest[0].predicted_seconds
    assert f"{found.name} with q and kv in {form} on the wire" in found.reason and plain.reason in found.reason
    assert "without a format" in str(found)


def test_it_is_the_fastest_of_all_that_are_allowed() -> None:
    """Compare each schedule in each format, encoding counted."""
    of = asked(SLOW)
    found = within_error(plan_call(of), of, 0.3)
    seconds = {}
    for name in FAMILIES:
        for form in allowed(of.setting.workload, BOTH, 0.3):
            plain = make(of, name)
            made = encoded(plain, codecs_of(form.name, torch.bfloat16, ("kv", "q")))
            codec = codec_seconds(plain, made, form, of.setting)
            seconds[name, form.name] = predict(made, of.setting).seconds + codec
    assert found.candidates[0].predicted_seconds is not None
    assert found.candidates[0].predicted_seconds <= min(seconds.values()) * (1 + RISK)


@pytest.mark.parametrize(("gbs", "copy_gbs"), [(FAST, 100.0), (1.0, 1.0)], ids=("fast links", "slow memory"))
def test_none_where_encoding_takes_longer_than_it_saves(gbs: float, copy_gbs: float) -> None:
    of = asked(gbs, copy_gbs=copy_gbs)
    found = within_error(plan_call(of), of, 1.0)
    assert not found.schedule.formats and "makes it faster" in found.reason


def test_formats_that_fit() -> None:
    """Blocks of 32 divide both widths; of formats as small the most exact; forward alone adds less."""
    size = Workload(1, 64, 64, 2, 2, 64, torch.bfloat16, value_dim=48)
    assert allowed(size, BOTH, 1.0) == []
    whole = replace(size, value_dim=64)
    assert [form.name for form in allowed(whole, BOTH, 1.0)] == ["mxint8", "mxfp4"]
    wide = replace(whole, dtype=torch.float32)
    assert [form.name for form in allowed(wide, BOTH, 1.0)] == ["bf16", "mxint8", "mxfp4"]  # fp16 loses small gradients
    form = FORMATS["mxint8"]
    assert attention_error(form, ("forward",)) == pytest.approx(math.sqrt(3) * form.relative_rms)
    assert attention_error(form, BOTH) == pytest.approx(math.sqrt(6) * form.relative_rms)


def test_a_memory_limit_holds() -> None:
    """Keep a plan that just fits to its limit, in a format or without: what is decoded needs memory of its own."""
    of = asked(SLOW)
    best = plan_call(of).candidates[0].peak_bytes
    assert best is not None
    limited = replace(of, memory_limit_bytes=best)
    found = within_error(plan_call(limited), limited, 0.3)
    assert predict(found.schedule, of.setting).peak_bytes <= best


@pytest.mark.parametrize("limit", ["advised_connections", "most_connections"])
def test_no_more_connections_than_may_be(limit: str) -> None:
    """A ring has two at a rank, or four where directions have their own; direct schedules have more."""
    of = replace(asked(SLOW), families=("ring", "direct-kv"))
    ring, direct = (plan_call(replace(of, families=(name,))).candidates[0] for name in of.families)
    plan = replace(plan_call(replace(of, families=("ring",))), candidates=(ring, direct))
    assert within_error(plan, of, 0.3).name == direct.name
    target = Target(connection_bytes=1, **{limit: 4})  # type: ignore[arg-type]
    few = replace(of, setting=replace(of.setting, target=target))
    found = within_error(plan, few, 0.3)
    assert found.name == ring.name and found.schedule.formats
    assert predict(found.schedule, few.setting).connections <= 4


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that touch memory, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators, self.touched = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        views = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if not views and "empty" not in func.__name__:
            self.operators += 1
            tensors = [each for each in tree_leaves((args, kwargs, made)) if isinstance(each, torch.Tensor)]
            self.touched += sum(each.numel() * each.element_size() for each in tensors)
        return made


@pytest.mark.parametrize("form", FORMATS)
def test_costs_are_those_of_the_codecs(form: str) -> None:
    """On a device other than a CPU, which reads FP8 in its own way; the larger of bf16's and fp32's."""
    encoding: list[tuple[int, float]] = []
    decoding: list[tuple[int, float]] = []
    for dtype in (torch.bfloat16, torch.float32):
        if FORMATS[form].element_bits == 8 * dtype.itemsize:
            continue
        rows = torch.empty(64, 256, dtype=dtype, device="meta")
        wire = torch.empty(64, FORMATS[form].row_bytes(256), dtype=torch.uint8, device="meta")
        for of, count in ((encoding, _Counted()), (decoding, _Counted())):
            with count:
                codec = codec_of(form)
                codec.encode(rows, wire) if of is encoding else codec.decode(wire, rows)
            of.append((count.operators, count.touched / rows.numel()))
    for cost, counted in ((ENCODING[form], encoding), (DECODING[form], decoding)):
        assert cost.operators == max(operators for operators, _ in counted)
        assert cost.touched_bytes == pytest.approx(max(touched for _, touched in counted), abs=0.7)


def test_the_reason_says_where_none_is_tried() -> None:
    """Try none for latents, for many ranks, for which one host stands, and where no time is predicted."""
    of = asked(SLOW)
    plain = plan_call(of)
    latents = replace(
        of, setting=replace(of.setting, workload=replace(of.setting.workload, kv_heads=1, latent_dim=64))
    )
    hosts = of_hosts("hosts", with_network(mesh_fabric(8, 1.0), 0.01), 8)
    many = call(setting(hosts, workload(64), BOTH), Causal())
    assert is_folded(many)
    for plan, asked_for, says in (
        (plain, latents, "latents travel in no wire format"),
        (replace(plain, candidates=()), of, "no wire format was tried, as no time is predicted"),
        (plan_call(many), many, "no wire format was tried, as one host stands for all"),
    ):
        assert within_error(plan, asked_for, 0.3) == replace(plan, reason=f"{plan.reason}; {says}")
