"""Did you mean ...? For commands, options, schedules, layouts, masks, transports, kernels, presets and devices."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO

import pytest
import torch
from oracle import attention64, error_of_terms

import tokenring as tr
from tokenring import ConfigurationError
from tokenring.cli.main import main
from tokenring.nearest import hint, nearest


def said(*words: str) -> str:
    out, err = StringIO(), StringIO()
    assert main(list(words), out, err, StringIO()) == 2
    assert err.getvalue().count("\n") == 1
    return err.getvalue().rstrip("\n")


PLAN = ("plan", "--topology", "preset:a10-pix-4", "--seq", "4k")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("plna",), "plan"),
        (("schedules", "ring"), "schedule"),
        (("topolgy",), "topology"),
        (("schedule", "rng"), "ring"),
        (("schedule", "rng", "--ranks", "4"), "ring"),
        (("schedule", "ring/lat", "--ranks", "4"), "ring/late"),
        (("schedule", "ring", "--ranks", "4", "--layout", "zig-zag"), "zigzag"),
        (("schedule", "ring", "--ranks", "4", "--mask", "casual"), "causal"),
        (("schedule", "ring", "--ranks", "4", "--dtype", "bf61"), "bf16"),
        (("schedule", "ring", "--rank", "4", "--lyaout", "zigzag"), "--layout"),
        (("plan", "--topology", "hgx-h100"), "preset:hgx-h100"),
        (("plan", "--topology", "hgx-h100*4"), "preset:hgx-h100*4"),
        (("plan", "--topology", "preset:hgx-h10"), "preset:hgx-h100"),
        (("plan", "--topology", "8xH100"), "preset:hgx-h100"),
        ((*PLAN, "--device", "h100"), "h100-sxm"),
        ((*PLAN, "--heds", "8"), "--heads"),
        ((*PLAN, "--schedules", "ring,ulyses"), "ulysses"),
        ((*PLAN, "--transport", "hcl"), "hccl"),
        (("bench", "--ranks", "2", "--schedules", "ulyses"), "ulysses"),
        (("bench", "--ranks", "2", "--peers", "ring-flash"), "ring-flash-attn"),
        (("trace", "tokenrng", "--ranks", "2"), "tokenring"),
        (("doctor", "--jsno"), "--json"),
        ((*PLAN, "--device", "H10"), "h100-sxm"),
        ((*PLAN, "--mask_svg", "a.svg"), "--mask-svg"),
        (("plan", "--topology", "hgx-h100", "--cached", "8k"), "preset:hgx-h100"),
        (("plan", "--topology", "preset:hgx-h100", "--cache", "8k", "--token", "1k", "--jsno"), "--json"),
        (("advise", "--engine", "megatrn", "--model", "llama-3.1-8b", "--topology", "x"), "megatron"),
        (("advise", "--engine", "megatron", "--model", "llama-3.1-8", "--topology", "x"), "llama-3.1-8b"),
        (("advise", "--engine", "megatron", "--model", "llama-3.1-8b", "--topology", "hgx-h100"), "preset:hgx-h100"),
        (("rates", "--kernel", "cpu_flsh"), "cpu-flash"),
        (("rates", "--device", "cpy"), "cpu"),
        (("topology", "--measure", "--ranks", "2", "--transport", "smh"), "shm"),
        (("demo", "--schedule", "rng"), "ring"),
        (("plan", "--topology", "preset:hgx-h100", "--model", "llama-3.1-70"), "llama-3.1-70b"),
        ((*PLAN, "--modle", "x"), "--model"),
        (("doctor", "--hlep"), "--help"),
        (("bench", "ring"), "--schedules ring"),
        ((*PLAN, "ring,usp"), "--schedules ring,usp"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else each,
)
def test_of_commands(words: tuple[str, ...], meant: str) -> None:
    assert f"; did you mean {meant}?" in said(*words)


def test_a_file_without_its_option() -> None:
    assert said("topology", "dump.txt").endswith("read files with --from: tokenring topology --from dump.txt")


def test_errors_name_the_command_whose_help_says_more() -> None:
    assert said("schedule", "ring", "--ranks", "2", "--nothing").endswith("see tokenring schedule --help")
    assert said("plna").endswith("see tokenring --help")


@pytest.mark.parametrize("command", ["plan", "advise"])
def test_presets_are_listed_in_the_help(command: str) -> None:
    out = StringIO()
    assert main([command, "--help"], out, StringIO()) == 0
    assert "hgx-h100" in out.getvalue() and "atlas-800t-a2" in out.getvalue()


CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: tr.ContextParallel(schedule="rng"), "ring"),
    (lambda: tr.ContextParallel(schedule="auto:ring,tokenrings"), "tokenring"),
    (lambda: tr.ContextParallel(schedule="Ulysses"), "ulysses"),
    (lambda: tr.ContextParallel(layout="zig_zag/2"), "zigzag"),
    (lambda: tr.ContextParallel(transport="ncl"), "nccl"),
    (lambda: tr.ContextParallel(kernel="cpu_flash"), "cpu-flash"),
    (lambda: tr.schedule("relai/2", 4), "relay"),
    (lambda: tr.TensorParallel(schedule="direct_q"), "direct-q"),
    (lambda: tr.TensorParallel(transport="smh"), "shm"),
    (lambda: tr.TensorParallel(stays="weight"), "weights"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "meant"), CALLS)
def test_of_calls(call: Callable[[], object], meant: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        call()
    assert str(caught.value).endswith(f"; did you mean {meant}?")


def test_what_is_like_nothing_gets_no_hint() -> None:
    assert nearest("qqqq", ["ring", "usp"]) is None and hint("qqqq", ["ring"]) == ""
    assert nearest("", ["ring"]) is None and nearest("r" * 1000, ["ring"]) is None and nearest(3, ["ring"]) is None
    assert nearest("ring", ["ring", "rings"]) is None  # it is not the name that is wrong
    assert hint("RINGS", ["ring", "usp"], "auto:") == "; did you mean auto:ring?"
    assert "did you mean" not in said("schedule", "zzz", "--ranks", "2")
    assert "did you mean" not in said("doctor", "--model", "x")  # as near to --help as its dashes
    assert "did you mean" not in said("doctor", "ring")


def test_a_length_that_does_not_divide_needs_no_padding() -> None:
    """It gives what padding gives, with a document that ends where the padding begins."""
    x = torch.randn(1, 16, 2, 16, generator=torch.Generator().manual_seed(0))
    assert tr.schedule("ring", 2, length=13).q_layout.length == 13
    cp = tr.ContextParallel(layout="contiguous")
    padded = tr.attention(x, x, x, cp, "full&documents(0,13)")
    short = x[:, :13].contiguous()
    visible = torch.ones(13, 13, dtype=torch.bool)
    want, terms = (attention64(short, short, v, short, visible).out for v in (short, short.abs()))
    for made in (padded[:, :13], tr.attention(short, short, short, cp)):
        assert error_of_terms(made, want, terms) <= 1e-6
    assert not padded[:, 13:].any()
