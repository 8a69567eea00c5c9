"""Codecs against float64: each number is the nearest of its format, blocks are apart, and errors are as tabled."""

from __future__ import annotations

import math
from itertools import count, product

import pytest
import torch

from tokenring.backends.codecs import choice, trial
from tokenring.backends.codecs.choice import codec_of
from tokenring.errors import ConfigurationError
from tokenring.ir.wire_formats import FORMATS, wire_format

BLOCKS = [name for name, form in FORMATS.items() if form.block > 1]
INF, NAN = float("inf"), float("nan")


def powers(low: int, high: int) -> list[float]:
    return [2.0**exponent for exponent in range(low, high + 1)]


def fractions(bits: int) -> list[float]:
    return [1 + part / 2**bits for part in range(2**bits)]


def minifloat(low: int, high: int, bits: int, largest: float) -> list[float]:
    """Magnitudes of a format of floats: normal ones from 2^low on, subnormal ones below."""
    normal = [power * part for power, part in product(powers(low, high), fractions(bits))]
    return [part / 2**bits * 2.0**low for part in range(2**bits)] + [each for each in normal if each <= largest]


MAGNITUDES = {
    "mxint8": [part / 64 for part in range(128)],
    "mxfp8": minifloat(-6, 8, 3, 448.0),
    "mxfp8-e5m2": minifloat(-14, 15, 2, 57344.0),
    "mxfp4": [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
}


def there_and_back(name: str, rows: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    codec = codec_of(name)
    wire = torch.empty(*rows.shape[:-1], codec.format.row_bytes(rows.shape[-1]), dtype=torch.uint8)
    codec.encode(rows, wire)
    made = torch.full(rows.shape, NAN, dtype=dtype or rows.dtype)
    codec.decode(wire, made)
    return made


def nearest(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Round fp64 rows [..., 32], each one block, to what a block format can hold. A tie goes to the even."""
    held = torch.tensor(MAGNITUDES[name], dtype=torch.float64)
    largest = rows.abs().amax(-1, keepdim=True)
    least = torch.tensor([[2.0**-127]], dtype=torch.float64)
    scale = torch.maximum(2.0 ** torch.ceil(torch.log2(largest / held[-1])), least)
    apart = ((rows.abs() / scale).unsqueeze(-1) - held).abs()
    best = apart.amin(-1, keepdim=True)
    codes = torch.arange(len(held))
    chosen = (torch.where(apart == best, 2 - (codes % 2 == 0).long(), 3)).argmin(-1)
    return held[chosen] * scale * rows.sign()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_number_is_the_nearest_that_the_format_has(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    spread = torch.logspace(-30, 30, 61, dtype=torch.float64)[:, None]
    rows = (torch.randn(61, 32, dtype=torch.float64) * spread).to(dtype)
    rows[0, 3], rows[1] = 0, 0
    rows[5] *= torch.logspace(0, -9, 32)  # far apart in one block
    assert torch.equal(there_and_back(name, rows).double(), nearest(name, rows.double()))


@pytest.mark.parametrize("name", BLOCKS)
def test_fp16_over_its_range(name: str) -> None:
    """From its subnormal numbers to its largest, which may be rounded up past it: never infinite."""
    torch.manual_seed(7)
    spread = torch.logspace(-7.5, 5, 61, dtype=torch.float64)[:, None]
    rows = (torch.randn(61, 32, dtype=torch.float64) * spread).clamp(-65504, 65504).half()
    rows[0], rows[1, 4] = torch.linspace(65000, 65504, 32).half(), 0
    wanted = nearest(name, rows.double()).clamp(-65504, 65504).half()
    made = there_and_back(name, rows)
    assert torch.equal(made, wanted)
    assert made.isfinite().all()
    largest = rows.abs().amax(-1, keepdim=True).double()
    assert ((made.double() - rows.double()).abs() <= largest / 4 + 2.0**-25).all()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=("fp32", "bf16", "fp16"))
def test_largest_of_a_dtype_stays_finite(name: str, dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    rows = torch.full((1, 32), most, dtype=dtype)
    rows[0, ::2] = -most
    made = there_and_back(name, rows)
    assert made.isfinite().all()
    assert (made.double() / rows.double() > 0.8).all()


@pytest.mark.parametrize("name", BLOCKS)
def test_callers_default_dtype_changes_nothing(name: str) -> None:
    rows = torch.randn(8, 32)
    made = there_and_back(name, rows)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        codec_of.cache_clear()
        again = there_and_back(name, rows)
    finally:
        torch.set_default_dtype(before)
        codec_of.cache_clear()
    assert torch.equal(made, again)


@pytest.mark.parametrize("name", BLOCKS)
def test_ties_go_to_the_even_code(name: str) -> None:
    held = torch.tensor(MAGNITUDES[name], dtype=torch.float64)
    halfway = (held[:-1] + held[1:]) / 2
    rows = torch.zeros(-(-len(halfway) // 31), 32, dtype=torch.float64)
    rows[:, 0] = held[-1]  # so that the scale is 1
    rows[:, 1:].reshape(-1)[: len(halfway)] = halfway
    flat = torch.zeros(rows[:, 1:].numel(), dtype=torch.float64)
    flat[: len(halfway)] = halfway
    rows[:, 1:] = flat.reshape(-1, 31)
    made = there_and_back(name, rows.float()).double()
    even = torch.stack([held[:-1], held[1:]], -1)[torch.arange(len(halfway)), torch.arange(len(halfway)) % 2]
    assert torch.equal(made[:, 1:].reshape(-1)[: len(halfway)], even)
    assert torch.equal(there_and_back(name, -rows.float()).double(), -made)


@pytest.mark.parametrize("name", BLOCKS)
def test_largest_is_not_clipped_and_an_encoding_of_it_changes_nothing(name: str) -> None:
    largest = MAGNITUDES[name][-1]
    rows = torch.zeros(2, 32)
    rows[:, 5] = torch.tensor([largest, math.nextafter(largest, INF)]) * 2.0**7
    made = there_and_back(name, rows)
    assert made[0, 5] == rows[0, 5]
    assert abs(made[1, 5] / rows[1, 5] - 1) < 2.0**-3
    assert torch.equal(there_and_back(name, made), made)


@pytest.mark.parametrize("name", BLOCKS)
def test_far_ends_of_fp32(name: str) -> None:
    rows = torch.zeros(3, 32)
    rows[0, 0], rows[1, 0], rows[2, 0] = 2.0**127, 2.0**-126, 2.0**-149
    made = there_and_back(name, rows)
    assert torch.equal(made[:2], rows[:2])
    assert (made[2] <= 2.0**-127).all()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("bad", [INF, -INF, NAN, -NAN])
def test_what_is_not_finite_makes_its_block_nan_and_no_other(name: str, bad: float) -> None:
    torch.manual_seed(2)
    rows = torch.randn(3, 96)
    spoiled = rows.clone()
    spoiled[1, 40] = bad
    made, clean = there_and_back(name, spoiled), there_and_back(name, rows)
    assert made[1, 32:64].isnan().all()
    made[1, 32:64] = clean[1, 32:64]
    assert torch.equal(made, clean)


@pytest.mark.parametrize("name", BLOCKS)
def test_strided_rows_and_records_with_other_bytes_around(name: str) -> None:
    torch.manual_seed(3)
    whole = torch.randn(2, 7, 3, 64)
    rows = whole.transpose(0, 1)[1:5]  # as a rank's own [B, T, H, D] are
    width = codec_of(name).format.row_bytes(64)
    record = torch.full((6, 2, 3, width + 12), 7, dtype=torch.uint8)
    wire = record[1:5, ..., 4 : 4 + width]
    codec_of(name).encode(rows, wire)
    made = torch.full((4, 2, 3, 64), NAN)
    codec_of(name).decode(wire, made)
    assert torch.equal(made, there_and_back(name, rows.contiguous()))
    record[1:5, ..., 4 : 4 + width] = 7
    assert (record == 7).all()


@pytest.mark.parametrize("name", BLOCKS)
def test_rows_are_left_as_they_are(name: str) -> None:
    rows = torch.randn(4, 64)
    before = rows.clone()
    there_and_back(name, rows)
    assert torch.equal(rows, before)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_dtypes_are_codecs_as_well(name: str) -> None:
    rows, dtype = torch.randn(4, 10), {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    assert torch.equal(there_and_back(name, rows), rows.to(dtype).float())


@pytest.mark.parametrize("name", FORMATS)
def test_rms_error_is_what_the_format_says(name: str) -> None:
    torch.manual_seed(4)
    rows = torch.randn(512, 1024, dtype=torch.float64)
    error = there_and_back(name, rows.float()).double() - rows
    found = float(error.norm() / rows.norm())
    assert found == pytest.approx(FORMATS[name].relative_rms, rel=0.05)


# With four of 1024 channels sixty times larger.
OUTLIERS = {"mxint8": 0.018, "mxfp8": 0.026, "mxfp4": 0.129}


@pytest.mark.parametrize("name", OUTLIERS)
def test_rms_error_beside_outliers(name: str) -> None:
    torch.manual_seed(5)
    rows = torch.randn(512, 1024, dtype=torch.float64)
    rows[:, [3, 300, 700, 1000]] *= 60
    error = there_and_back(name, rows.float()).double() - rows
    assert float(error.norm() / rows.norm()) <= 1.1 * OUTLIERS[name]


def test_bytes_against_bf16() -> None:
    fewer = {name: 2048 / form.row_bytes(1024) for name, form in FORMATS.items()}
    assert fewer["bf16"] == 1
    assert all(fewer[name] >= 1.93 for name in ("mxint8", "mxfp8", "mxfp8-e5m2"))
    assert fewer["mxfp4"] >= 3.7


@pytest.mark.parametrize("written", ["mxfp", "MXFP8", 8, None, ["mxfp8"]])
def test_a_format_that_there_is_not(written: object) -> None:
    with pytest.raises(ConfigurationError, match=r"use one of bf16, fp16, mxint8, mxfp8, mxfp8-e5m2, mxfp4"):
        wire_format(written)


def test_torchao_reads_the_same_numbers() -> None:
    """Its scales are rounded up as here (RCEIL); where torchao, or what it needs beside, is missing: skipped."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", exc_type=ImportError)
    config = pytest.importorskip("torchao.prototype.mx_formats.config", exc_type=ImportError)
    torch.manual_seed(6)
    rows = torch.randn(8, 128)
    fp4 = getattr(torch, "float4_e2m1fn_x2", None)
    for name, dtype in (("mxfp8", torch.float8_e4m3fn), ("mxfp8-e5m2", torch.float8_e5m2), ("mxfp4", fp4)):
        if dtype is None:
            continue
        scales, elements = mx.to_mx(rows, dtype, 32, config.ScaleCalculationMode.RCEIL)
        theirs = mx.to_dtype(elements, scales, dtype, 32, torch.float32)
        assert torch.equal(there_and_back(name, rows), theirs), name


@pytest.mark.parametrize("name", FORMATS)
def test_a_device_is_tried_and_must_give_the_same_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TRUSTED", frozenset())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert trial._fault.__wrapped__(name, dtype, torch.device("cpu")) is None
    assert "it fails there" in (trial._fault.__wrapped__(name, torch.float32, torch.device("meta")) or "")
    right, calls = choice.there_and_back, count()  # each call gives another result
    monkeypatch.setattr(trial, "there_and_back", lambda *given: [each + next(calls) for each in right(*given)])
    assert "it gives other numbers" in (trial._fault.__wrapped__(name, torch.float32, torch.device("cpu")) or "")


@pytest.mark.parametrize("flushed", [False, True], ids=("", "subnormal numbers flushed"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=("fp32", "bf16", "fp16"))
def test_every_byte_of_e4m3_is_read_as_torch_reads_it(dtype: torch.dtype, flushed: bool) -> None:
    """A CPU reads them by way of fp16; the two bytes of NaN are never written."""
    every = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F] + [0, 0], dtype=torch.uint8)
    rows = torch.cat([every, torch.full((8,), 127, dtype=torch.uint8)])[None]
    wanted = every.view(torch.float8_e4m3fn).to(dtype)[None]
    torch.set_flush_denormal(flushed)
    try:
        made = codec_of("mxfp8").decode(rows, torch.empty(1, 256, dtype=dtype))
    finally:
        torch.set_flush_denormal(False)
    assert made.equal(wanted)
