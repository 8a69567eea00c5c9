"""Linear layers with inputs and parts of sums in wire formats: errors, bytes to the byte, and what is refused."""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from copies import copied_as_one
from oracle import relative_error
from ranks import Here, RankPools

import tokenring as tr
from tokenring.backends.codecs.choice import codec_of
from tokenring.backends.interfaces import Transport
from tokenring.ir.operators import OPERATORS
from tokenring.ir.schedule_data import FULL, PASSES, Pass
from tokenring.ir.wire_formats import ENCODED, FORMATS, encoded
from tokenring.lowering.pair_box import pair_box
from tokenring.schedule.names import make_schedule
from tokenring.sequence.layout import make_layout

TOKENS, FEATURES, WIDTH = 96, 48, 128
# Encodings between each result and its factors, as docs/layer.md has them; a gradient of a weight travels as it is.
ONCE = {"c": 1, "dx": 1, "dw": 1, "y": 1, "dh": 1, "dw2": 1}
TOKENS_STAY = ONCE | {"dw": 0, "dw2": 0}
BOTH_MOVE = {"c": 2, "dx": 2, "dw": 1, "y": 2, "dh": 2, "dw2": 1}
ADDED = ONCE | {"dx": 0, "y": 0}  # parts that are added to on their way go in fp32
POINTS: list[tuple[int, str, dict[str, int]]] = [
    (2, "direct-q", ONCE), (2, "ring", TOKENS_STAY), (3, "tokenring", ONCE), (4, "direct-q/pieces4", ONCE),
    (4, "direct-kv", TOKENS_STAY), (4, "relay/2", TOKENS_STAY), (4, "tiles/2x2", BOTH_MOVE), (4, "relay-q/2", ADDED),
    (4, "reduced/2", ADDED),
]  # fmt: skip
DIMS = {"c": 2, "dx": 1, "dw": 0, "y": 1, "dh": 2, "dw2": 1}
Links = dict[tuple[int, int], int]
Sent = dict[tuple[str, Pass], dict[int, int]]


def given(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Inputs of a column layer [B, T, D] and of a row layer [B, T, N], weights, and gradients of the results."""
    random = torch.Generator().manual_seed(7)
    rows, pairs = (1, TOKENS, WIDTH), (1, TOKENS, FEATURES)
    shapes = {"x": rows, "w": (FEATURES, WIDTH), "dc": pairs, "h": pairs, "w2": (WIDTH, FEATURES), "dy": rows}
    return {name: torch.randn(*shape, generator=random).to(dtype) for name, shape in shapes.items()}


def unsplit(of: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Both layers on one process, each by itself, in this dtype."""
    x, w, dc, h, w2, dy = (each.to(dtype) for each in of.values())
    flat = {"x": x, "dc": dc, "h": h, "dy": dy}
    rows = {name: each.flatten(0, 1) for name, each in flat.items()}
    return {
        "c": x @ w.t(), "dx": dc @ w, "dw": rows["dc"].t() @ rows["x"],
        "y": h @ w2.t(), "dh": dy @ w2, "dw2": rows["dy"].t() @ rows["h"],
    }  # fmt: skip


def transport_of(here: Here) -> Transport:
    assert here.base.transport is not None
    return here.base.transport


def box_of(name: str, world: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows and the columns of a tensor of pairs [1, T, N] that a rank computes, as indices."""
    box = pair_box(schedule_of("column", world, name), rank)
    rows, columns = (torch.tensor([at for run in runs for at in range(*run)]) for runs in (box.rows, box.columns))
    return rows[:, None], columns


def layers(here: Here, name: str, dtype: torch.dtype, wire: str | None) -> tuple[dict[str, torch.Tensor], Sent]:
    """Both layers and both passes at one rank: its parts of the results, and its bytes."""
    of, transport = given(dtype), transport_of(here)
    counter, sent = transport.sent_bytes, dict[tuple[str, Pass], dict[int, int]]()
    with tr.TensorParallel(schedule=name, transport=transport, wire=wire) as tp:
        own = {each: of[each].chunk(tp.world_size, 1)[tp.rank].contiguous() for each in ("x", "dy")}
        x, w, w2 = own["x"].requires_grad_(), tp.shard(of["w"]).requires_grad_(), tp.shard(of["w2"], 1).requires_grad_()
        counter.clear()
        c = tr.column_linear(x, w, tp)
        sent["column", "forward"] = dict(counter)
        dc, h = (of[each][0][box_of(name, tp.world_size, tp.rank)][None] for each in ("dc", "h"))
        counter.clear()
        dx, dw = torch.autograd.grad(c, (x, w), dc)
        sent["column", "backward"] = dict(counter)
        counter.clear()
        y = tr.row_linear(h.requires_grad_(), w2, tp)
        sent["row", "forward"] = dict(counter)
        counter.clear()
        dh, dw2 = torch.autograd.grad(y, (h, w2), own["dy"])
        sent["row", "backward"] = dict(counter)
    return {"c": c.detach(), "dx": dx, "dw": dw, "y": y.detach(), "dh": dh, "dw2": dw2}, sent


def joined(name: str, parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The whole results."""
    made = {each: torch.cat([part[each] for part in parts], dim) for each, dim in DIMS.items()}
    for each in ("c", "dh"):
        whole = made[each] = torch.full((1, TOKENS, FEATURES), torch.nan, dtype=parts[0][each].dtype)
        for rank, part in enumerate(parts):
            whole[0][box_of(name, len(parts), rank)] = part[each][0]
    return made


def schedule_of(operator: str, world: int, name: str) -> tr.Schedule:
    q, kv = make_layout("contiguous", world, TOKENS), make_layout("contiguous", world, FEATURES)
    return make_schedule(name, q, kv, tr.Full()).replace(operator=OPERATORS[operator])


def links(operator: str, world: int, name: str, wire: str, dtype: torch.dtype, direction: Pass) -> Links:
    size = tr.Workload(1, TOKENS, FEATURES, 1, 1, WIDTH, dtype)
    codecs = tuple((kind, wire) for kind in ENCODED)
    return encoded(schedule_of(operator, world, name), codecs).link_bytes(size, direction)


def counted(sent: list[Sent], operator: str, direction: Pass) -> Links:
    return {(src, dst): n for src, each in enumerate(sent) for dst, n in each[operator, direction].items() if n}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize(("world", "name", "times"), POINTS, ids=lambda each: each if isinstance(each, str) else "")
def test_errors_and_bytes(ranks: RankPools, world: int, name: str, times: dict[str, int], dtype: torch.dtype) -> None:
    """MXFP8 adds the error of as many encodings as lie on the way, as much as the format says; bytes to the byte."""
    of = given(dtype)
    wanted, rms = unsplit(of, torch.float64), FORMATS["mxfp8"].relative_rms
    alone = {each: relative_error(value, wanted[each]) for each, value in unsplit(of, dtype).items()}
    parts = ranks(world)(layers, name, dtype, "mxfp8")
    made = joined(name, [part for part, _ in parts])
    for each, count in times.items():
        found, more = relative_error(made[each], wanted[each]), math.sqrt(count) * rms
        assert found <= math.hypot(1.1 * more, 2 * alone[each]), each
        assert found >= 0.6 * more, each
    for operator, direction in product(("column", "row"), PASSES):
        found_bytes = counted([sent for _, sent in parts], operator, direction)
        assert found_bytes == links(operator, world, name, "mxfp8", dtype, direction), (operator, direction)


@pytest.mark.parametrize("wire", ("mxint8", "mxfp8", "mxfp8-e5m2", "mxfp4"))
def test_bytes_against_bf16(ranks: RankPools, wire: str) -> None:
    """Counted where they are sent, of all that moves where weights stay."""
    sent = {each: [of for _, of in ranks(2)(layers, "direct-q", torch.bfloat16, each)] for each in (None, wire)}
    least = 3.7 if wire == "mxfp4" else 1.93
    for operator, direction in product(("column", "row"), PASSES):
        plain, fewer = (sum(counted(some, operator, direction).values()) for some in sent.values())
        assert plain >= least * fewer > 0, (operator, direction)


@pytest.mark.parametrize("form", FORMATS)
def test_other_ranks_get_what_the_codec_makes(ranks: RankPools, form: str) -> None:
    """By way of relays too; a rank's own rows are not encoded."""
    of = given(torch.float32)
    sent = torch.empty(1, TOKENS, FORMATS[form].row_bytes(WIDTH), dtype=torch.uint8)
    codec_of(form).encode(of["x"], sent)
    decoded = codec_of(form).decode(sent, torch.empty_like(of["x"]))
    for rank, (part, _) in enumerate(ranks(4)(layers, "tokenring", torch.float32, form)):
        own, w = slice(rank * TOKENS // 4, (rank + 1) * TOKENS // 4), of["w"].chunk(4)[rank]
        for owner in range(4):
            rows = slice(owner * TOKENS // 4, (owner + 1) * TOKENS // 4)
            x = of["x"][0, rows] if rows == own else decoded[0, rows]
            assert relative_error(part["c"][0, rows], x @ w.t()) < 1e-5


# ---------- what is refused


def refusal(here: Here, what: str) -> str:
    """The error of a call that does not fit, of one rank where it is alone; the group lives on."""
    odd, transport = here.rank == 1, transport_of(here)
    wire = "mxint8" if odd and what == "format" else None if odd and what == "none" else "mxfp8"
    wire = "fp16" if what == "dtype" else wire
    with tr.TensorParallel(schedule="direct-q", transport=transport, wire=wire) as tp:
        width = 100 if what == "width" or (odd and what == "width of one") else 64
        dtype = torch.bfloat16 if what == "dtype" else torch.float32
        with pytest.raises(tr.TokenRingError) as caught:
            tr.column_linear(torch.ones(1, 4, width, dtype=dtype), torch.ones(2, width, dtype=dtype), tp)
    with tr.TensorParallel(schedule="direct-q", transport=transport, wire="mxfp8") as tp:
        assert tr.column_linear(torch.ones(1, 4, 64), torch.ones(2, 64), tp).eq(64).all()
    return str(caught.value)


LARGE = "fp16 on the wire has 16 bits an element, and saves nothing over torch.bfloat16 of the tensors, which has 16"
DIVIDE = "mxfp8 on the wire has blocks of 32 elements, which do not divide rows of 100"


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("width", [DIVIDE, DIVIDE]),
        ("width of one", ["rank 1 refused: " + DIVIDE, DIVIDE]),
        ("format", ["wire: rank 0: mxfp8; rank 1: mxint8"] * 2),
        ("none", ["wire: rank 0: mxfp8; rank 1: none"] * 2),
        ("dtype", [LARGE, LARGE]),
    ],
)
def test_refused_on_all_ranks(ranks: RankPools, what: str, says: list[str]) -> None:
    for text, wanted in zip(ranks(2)(refusal, what), says, strict=True):
        assert wanted in text


def test_formats_are_checked() -> None:
    with pytest.raises(tr.ConfigurationError, match=r"wire='fp9': use one of bf16, fp16, mxint8, mxfp8"):
        tr.TensorParallel("self", wire="fp9")
    with pytest.raises(tr.ConfigurationError, match="did you mean mxfp4"):
        tr.TensorParallel("self", wire="mxpf4")


def test_a_plan_has_the_formats_and_is_checked() -> None:
    with tr.TensorParallel("self", wire="mxfp4") as tp:
        plan = tp.plan("row", 64, 32, 64, torch.bfloat16).verify()
        assert plan.formats == dict.fromkeys(ENCODED, "mxfp4")
        with pytest.raises(tr.ConfigurationError, match=r"blocks of 32 elements, which do not divide rows of 48"):
            tp.plan("row", 64, 32, 48, torch.bfloat16)
        assert tp.plan("reduce", 64, 1, 64, torch.bfloat16).verify().formats == dict.fromkeys(ENCODED, "mxfp4")


def test_parts_in_fp32_go_before_the_format() -> None:
    with tr.TensorParallel("self", wire="mxfp8", partials=torch.float32) as tp:
        codecs = dict(tp.plan("row", 64, 32, 64, torch.bfloat16).codecs)
    assert codecs == {"kv": "mxfp8", "q": "mxfp8", "q_partial": FULL, "kv_partial": FULL}


# ---------- copies made as one


def computed(here: Here, name: str, together: bool) -> dict[str, torch.Tensor]:
    """This rank's results in MXINT8. together: with copies made as one, as on a device."""
    with copied_as_one() if together else nullcontext():
        return layers(here, name, torch.bfloat16, "mxint8")[0]


@pytest.mark.parametrize(("world", "name"), ((2, "direct-q"), (4, "direct-q/pieces4"), (4, "tiles/2x2")))
def test_copies_made_as_one_give_the_same_bits(ranks: RankPools, world: int, name: str) -> None:
    """Parts of sums are decoded where they come home, and none is copied as bytes."""
    alone, together = (ranks(world)(computed, name, each) for each in (False, True))
    for one, other in zip(alone, together, strict=True):
        assert all(one[each].equal(other[each]) for each in one)
