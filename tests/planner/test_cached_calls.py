"""The times of ways to attend to a cache: against the formulas of their bytes and rounds, and as a command."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

from tokenring.cli.main import main
from tokenring.planner.choosing.cached_calls import (
    CachedCall,
    cached_ways,
    crossovers,
    fewest,
    goes_to_all,
    least_cached_seconds,
    of_own_rows,
)
from tokenring.planner.interconnects.interconnect import mesh_fabric, of_one_host, switch_fabric
from tokenring.sequence.workload import Workload
from tokenring.tables.rates import Machine, Messages, constant

FREE = Machine(constant(1e9))  # kernels that take no time
H100 = ["plan", "--topology", "preset:hgx-h100", "--cached", "128k", "--heads", "64", "--kv-heads", "8"]


def call(ranks: int = 8, tokens: int = 1, cached: int = 131072, kv_heads: int = 8, switch: bool = True) -> CachedCall:
    fabric = switch_fabric(ranks, 100.0) if switch else mesh_fabric(ranks, 10.0)
    size = Workload(1, tokens, cached, 64, kv_heads, 128, torch.bfloat16)
    return CachedCall(size, of_one_host("test", fabric), FREE)


def of(given: CachedCall) -> dict[str, float]:
    return {way.name: way.sent_bytes for way in cached_ways(given)}


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bytes_that_a_rank_sends(ranks: int) -> None:
    q, o, lse, kv = (16 * 64 * 256, 16 * 64 * 256, 16 * 64 * 4, 2 * 4096 * 8 * 256)
    share = (ranks - 1) / ranks
    wanted = {
        "one rank": 0, "one-shot": (ranks - 1) * (o + lse), "two-step": 2 * share * (o + lse),
        "direct-q": share * (q + o + lse), "direct-kv": share * kv, "ring": share * kv,
    }  # fmt: skip
    if 64 % ranks:
        del wanted["two-step"]  # heads that do not divide
    assert of(call(ranks, 16, 4096)) == pytest.approx(wanted)


def test_bytes_of_the_design() -> None:
    """64 heads × 128, bf16, 8 ranks: what one token and a cache of 128k move (GQA 8)."""
    found = of(call())
    assert round(found["direct-q"]) == 28_896 and round(found["one-shot"]) == 116_480
    assert round(found["direct-kv"] / 1e6) == 470


@pytest.mark.parametrize("switch", [True, False])
def test_a_round_takes_what_its_busiest_wire_takes(switch: bool) -> None:
    given = call(4, switch=switch)
    alone = 1e6 / (100.0 if switch else 10.0) / 1e9
    assert given.wire_seconds(1e6) == pytest.approx(3 * alone if switch else alone)
    assert given.wire_seconds(1e6, neighbours=True) == pytest.approx(alone)


def test_q_moves_until_the_bytes_are_those_of_the_cache() -> None:
    """T* / S of the design: 0.124 for GQA 8, where only bytes count."""
    given = replace(call(cached=1 << 20), machine=FREE)
    tokens = crossovers(given).cache_moves
    assert tokens is not None and tokens / (1 << 20) == pytest.approx(0.124, rel=0.01)


@pytest.mark.parametrize("kv_heads", [1, 8, 64])
@pytest.mark.parametrize("switch", [True, False])
def test_what_moves_is_what_the_crossover_says(kv_heads: int, switch: bool) -> None:
    """Move it for new tokens that are each rank's own: it goes round, or on a mesh over all links at once."""
    machine = Machine(constant(400.0, copy_gbs=2500.0), Messages(6e-6, 2e-6))
    given = replace(call(cached=1 << 17, kv_heads=kv_heads, switch=switch), machine=machine)
    tokens = crossovers(given).cache_moves
    assert tokens is not None
    assert of_own_rows(given.with_lengths(tokens - 1, 1 << 17)) == "direct-q"
    often = 2 if switch else 8  # on a switch kernels hide either way from some number on, and both take as long
    assert of_own_rows(given.with_lengths(often * tokens, 1 << 17)) == ("ring" if switch else "direct-kv")


def test_own_rows_and_own_keys_hide_what_comes() -> None:
    """A rank attends from its own rows, or to its own keys, while those of others come: that part is not exposed."""
    machine = Machine(constant(1600.0), Messages(6e-6, 2e-6))
    given = replace(call(4, tokens=4096, cached=1 << 15), machine=machine)
    part = given.kernel_seconds(1024, 1 << 13)
    asking, back = (given.round_seconds(each / 4) for each in (given.q_bytes, given.result_bytes))
    moving = given.round_seconds(given.kv_bytes / 4)
    ways = {way.name: way.seconds for way in cached_ways(given)}
    assert part < min(asking, moving)
    assert ways["direct-q"] == pytest.approx(asking + 3 * part + back)
    assert ways["direct-kv"] == pytest.approx(moving + 3 * part)
    few = given.with_lengths(1, 1 << 15)  # parts of the heads: one kernel, for which all of them have to come first
    sums = few.round_seconds(few.q_bytes / 4) + few.round_seconds(few.result_bytes / 4)
    found = next(way.seconds for way in cached_ways(few) if way.name == "direct-q")
    assert found == pytest.approx(sums + few.kernel_seconds(1, 1 << 13))


@pytest.mark.parametrize("tokens", [1, 3, 8, 4096, 1 << 17])
@pytest.mark.parametrize("cached", [1 << 10, 1 << 17])
def test_no_way_is_faster_than_its_bound(tokens: int, cached: int) -> None:
    machine = Machine(constant(400.0, copy_gbs=2500.0), Messages(6e-6, 2e-6))
    for way in cached_ways(replace(call(tokens=tokens, cached=cached), machine=machine)):
        assert way.seconds >= way.bound_seconds * (1 - 1e-12)


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_cache_does_not_move_for_a_small_gain(ranks: int) -> None:
    machine = Machine(constant(1600.0, copy_gbs=2500.0), Messages(6e-6, 2e-6))
    given = replace(call(ranks, cached=1 << 17), machine=machine)

    def saves(count: int, share: float) -> bool:
        ways = {way.name: way.seconds for way in cached_ways(given.with_lengths(count, 1 << 17))}
        return ways["ring"] < share * ways["direct-q"]

    a_little, enough = fewest(lambda count: saves(count, 1.0)), fewest(lambda count: saves(count, 0.95))
    assert a_little is not None and enough is not None and a_little < enough
    for count, name in ((a_little, "direct-q"), (enough - 1, "direct-q"), (enough, "ring")):
        assert of_own_rows(given.with_lengths(count, 1 << 17)) == name


@pytest.mark.parametrize(("held", "name"), [(0.99, "direct-q"), (1.01, "direct-kv")])
def test_a_cache_goes_to_all_where_that_holds_no_more(held: float, name: str) -> None:
    """In one round, where q and results need two; not where a rank would hold more than these are."""
    given = replace(call(4, cached=1 << 14, switch=False), machine=Machine(constant(1e6), Messages(1.0)))
    enough = fewest(lambda count: goes_to_all(given.with_lengths(count, 1 << 14)))
    assert enough is not None
    asked = given.with_lengths(int(held * enough), 1 << 14)
    fastest = min((way for way in cached_ways(asked) if way.rounds), key=lambda way: way.seconds)
    assert fastest.name == "direct-kv" and of_own_rows(asked) == name


def test_latents_are_fewer_bytes() -> None:
    """Kept once: 576 of a token, and not 576 + 512."""
    given = call(kv_heads=1)
    plain = replace(given, workload=replace(given.workload, head_dim=576, value_dim=512))
    assert replace(plain, workload=replace(plain.workload, latent_dim=576)).kv_bytes * 1088 == plain.kv_bytes * 576


def test_several_ranks_pay_from_some_length_on() -> None:
    given = replace(call(), machine=Machine(constant(100.0, copy_gbs=1000.0), Messages(latency_seconds=1e-5)))
    cached = crossovers(given).several
    assert cached is not None
    for count, best in ((cached - 1, "one rank"), (cached, "one-shot")):
        assert cached_ways(given.with_lengths(1, count))[0].name == best


def test_new_tokens_among_themselves_count_where_no_exchange_hides_them() -> None:
    """One rank computes them beside the rest; on several ranks, which all have them, they run behind the exchange."""
    given = replace(call(4, tokens=512), machine=Machine(constant(100.0), Messages(latency_seconds=1e-4)))
    cached = crossovers(given).several
    assert cached is not None
    at = given.with_lengths(512, cached)
    ways = {way.name: way for way in cached_ways(at)}
    new = at.kernel_seconds(512, 255.5)
    assert 0 < new < ways["two-step"].exchange_seconds
    apart = ways["two-step"].seconds - ways["one rank"].seconds
    assert apart == pytest.approx(new, rel=0.01) and crossovers(at.with_lengths(1, cached)).several != cached


def test_one_rank_is_never_beaten_by_one() -> None:
    assert crossovers(call(1)).several is None


@pytest.mark.parametrize("tokens", [1, 16, 2048])
@pytest.mark.parametrize("cached", [1024, 131072])
def test_nothing_in_place_beats_the_bound(tokens: int, cached: int) -> None:
    machine = Machine(constant(400.0, copy_gbs=2500.0), Messages(6e-6, 2e-6))
    given = replace(call(tokens=tokens, cached=cached), machine=machine)
    in_place = [way.seconds for way in cached_ways(given) if way.name in ("one-shot", "two-step", "direct-q")]
    assert min(in_place) >= least_cached_seconds(given)


@pytest.mark.parametrize(("ranks", "tokens"), [(3, 1), (7, 16), (8, 131072)])
def test_the_parts_of_a_way_add_up_and_none_is_below_0(ranks: int, tokens: int) -> None:
    machine = Machine(constant(123.4, copy_gbs=777.7), Messages(6e-6, 2e-6))
    for way in cached_ways(replace(call(ranks, tokens), machine=machine)):
        assert way.exchange_seconds >= 0.0 and way.seconds == way.kernel_seconds + way.exchange_seconds


def test_fewest() -> None:
    assert [fewest(lambda n, at=at: n >= at) for at in (1, 2, 777)] == [1, 2, 777]  # type: ignore[misc]
    assert fewest(lambda n: False) is None


@pytest.mark.parametrize("tokens", [1, 16, 2048])
@pytest.mark.parametrize("latents", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_no_way_beats_its_bound_nor_one_in_place_that_of_all(ranks: int, latents: bool, tokens: int) -> None:
    """Put kernels above messages and below them: either may hide the other."""
    given = call(ranks, tokens, 4096, 1 if latents else 8)
    size = replace(given.workload, head_dim=576, value_dim=512, latent_dim=576) if latents else given.workload
    for tflops, latency in ((400.0, 6e-6), (1e9, 6e-6), (0.01, 6e-6), (1e9, 0.0)):
        machine = Machine(constant(tflops, copy_gbs=2500.0), Messages(latency, 2e-6))
        asked = replace(given, workload=size, machine=machine)
        for way in cached_ways(asked):
            assert 0.0 < way.bound_seconds <= way.seconds * (1 + 1e-12), way
            if way.name in ("one-shot", "two-step", "direct-q"):
                assert least_cached_seconds(asked) <= way.bound_seconds * (1 + 1e-12), way


def test_bounds_of_ways_by_hand() -> None:
    """Hide bytes behind kernels, but neither the last partial results nor, in a ring, more than its rounds."""
    given = replace(call(4), machine=Machine(constant(400.0, copy_gbs=2500.0), Messages(latency_seconds=1e-5)))
    ways = {way.name: way for way in cached_ways(given)}
    kernel, moved = ways["one-shot"].kernel_seconds, given.kv_bytes / 4 * 3 / 100e9
    assert ways["one-shot"].bound_seconds == pytest.approx(kernel + 1e-5)
    assert ways["two-step"].bound_seconds == pytest.approx(kernel + 2e-5)
    assert ways["direct-q"].bound_seconds == pytest.approx(kernel + 1e-5)
    assert ways["direct-kv"].bound_seconds == pytest.approx(moved + 1e-5)
    assert ways["ring"].bound_seconds == pytest.approx(moved + 3e-5)
    assert ways["one rank"].bound_seconds == ways["one rank"].seconds


def test_decode_is_one_new_token(capsys: pytest.CaptureFixture[str]) -> None:
    """Take the command line of the design, whose report has bounds and crossovers."""
    assert main(H100) == 0
    wanted = capsys.readouterr().out
    for more in (["--decode"], ["--decode", "--tokens", "1"]):
        assert main([*H100, *more]) == 0
        assert capsys.readouterr().out == wanted
    assert "bound" in wanted.splitlines()[4].split() and "bound 39.2 µs over 8 ranks" in wanted


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--decode"], "--decode is one new token over a KV cache: say how many tokens are cached, as in"),
        (["--decode", "--seq", "8k", "--sweep", "seq=8k..16k"], "--decode is one new token over a KV cache"),
        (["--decode", "--cached", "8k", "--tokens", "4"], "--decode is one new token, and --tokens 4 asks for others"),
        (["--decode", "--operator", "row"], "--decode does not go with --operator row, whose sizes are"),
        (["--decode", "--layer", "llama3-8b"], "--decode does not go with --layer, whose sizes are"),
    ],
)
def test_decode_of_something_else(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--topology", "preset:hgx-h100", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(H100) == 0
    said = capsys.readouterr().out
    assert "1 new token over 131,072 cached, 64:8 heads × 128, bfloat16" in said
    assert re.search(r"one-shot: 1\.\d\d × as fast as direct-q", said)
    assert "8 ranks that all have the new tokens are faster than one from" in said and "q moves below" in said


@pytest.mark.parametrize(
    ("more", "said"),
    [(["--save", "a.json"], "--save is for a plan of a whole sequence"), (["--tokens", "0"], "--tokens"),
     (["--layout", "zigzag"], "--layout is for a plan of a whole sequence"),
     (["--seq", "128k"], "--seq 128k does not go with --cached: its lengths"),
     (["--mask", "causal"], "--mask causal does not go with --cached: new tokens see all"),
     (["--pass", "training"], "--pass training does not go with --cached: it is forward"),
     (["--transport", "hccl"], "--transport hccl does not go with --cached"),
     (["--all"], "--all does not go with --cached: it always")],
)  # fmt: skip
def test_options_that_do_not_go_with_it(more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*H100, *more]) == 2
    assert said in capsys.readouterr().err


LATENTS = ["plan", "--topology", "preset:hgx-h100", "--cached", "128k", "--heads", "128", "--latents"]


def test_latents_of_a_cache(capsys: pytest.CaptureFixture[str]) -> None:
    """Count 576 elements of a token in a cache of DeepSeek's that moves, and not 576 + 512."""
    assert main([*LATENTS, "--dim", "576", "--value-dim", "512", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["latents"] and found["kv_heads"] == 1
    sent = {way["name"]: way["sent_bytes"] for way in found["ways"]}
    assert sent["direct-kv"] == pytest.approx(7 / 8 * 131072 * 576 * 2)
    assert main([*LATENTS, "--dim", "576", "--value-dim", "512"]) == 0
    assert "1 new token over 131,072 cached latents, 128:1 heads × 576/512" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--kv-heads", "8", "--dim", "576", "--value-dim", "512"], "--kv-heads 8 with --latents"),
        (["--dim", "576"], "give --value-dim N of at most 576"),
        (["--dim", "64", "--value-dim", "128"], "give --value-dim N of at most 64"),
    ],
)
def test_sizes_of_no_latents(more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LATENTS, *more]) == 2
    assert said in capsys.readouterr().err


def test_latents_are_of_a_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--topology", "preset:hgx-h100", "--latents"]) == 2
    assert "--latents says what a cache holds: it goes with --cached N" in capsys.readouterr().err


def test_tokens_are_of_a_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--topology", "preset:hgx-h100", "--seq", "8k", "--tokens", "4"]) == 2
    assert "say how many are cached" in capsys.readouterr().err
