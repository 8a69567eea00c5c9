"""One thing has one spelling in all commands; what it was called before goes on working, and help does not show it."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from test_planner_command import SMALL, printed

import tokenring as tr
from tokenring.cli.advise.command import _parser as advise_parser
from tokenring.cli.bench.command import _case as bench_case
from tokenring.cli.bench.command import _options as bench
from tokenring.cli.bench.command import _show as show_bench
from tokenring.cli.bench.results import RaceReport
from tokenring.cli.demo.command import _options as demo
from tokenring.cli.main import main
from tokenring.cli.plan.command import options_parser as plan_parser
from tokenring.cli.rates.command import _parser as rates_parser
from tokenring.cli.trace.command import _case as trace_case
from tokenring.cli.trace.command import _options as trace
from tokenring.display.console import Console
from tokenring.errors import ConfigurationError
from tokenring.planner.choosing.plan import Plan
from tokenring.tables.kernel_rates import KernelKey, read_table, to_json
from tokenring.tables.rates import constant
from tokenring.topology.model.schema import to_json as topology_json

DATA = Path(__file__).resolve().parents[1] / "data"


def run(*words: str) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    return main(list(words), out, err, StringIO()), out.getvalue(), err.getvalue()


# Each command with the spelling of now, and as it was.
SAME: list[tuple[Callable[[list[str]], argparse.Namespace], list[str], list[str]]] = [
    (bench, ["--ranks", "2", "--seq", "2k"], ["--ranks", "2", "--seq-len", "2048"]),
    (bench, ["--dim", "32", "--dtype", "bf16"], ["--head-dim", "32", "--dtype", "bfloat16"]),
    (bench, ["--pass", "forward", "--svg", "a.svg"], ["--forward-only", "--picture", "a.svg"]),
    (bench, ["--pass", "training"], []),
    (trace, ["ring", "--seq", "1k", "--dim", "32"], ["ring", "--seq-len", "1024", "--head-dim", "32"]),
    (trace, ["ring", "--pass", "forward", "--dtype", "fp32"], ["ring", "--forward-only", "--dtype", "float32"]),
    (trace, ["ring", "--svg", "a.svg"], ["ring", "--picture", "a.svg"]),
    (demo, ["--seq", "4k", "--svg", "a.svg"], ["--seq", "4096", "--output", "a.svg"]),
    (lambda words: plan_parser().parse_args(["--topology", "x", *words]),
     ["--pass", "forward", "--dim", "64", "--dtype", "fp16"],
     ["--forward-only", "--head-dim", "64", "--dtype", "float16"]),
    (lambda words: advise_parser().parse_args(["--engine", "megatron", "--model", "x", "--topology", "x", *words]),
     ["--pass", "forward", "--dtype", "fp16"], ["--passes", "forward", "--dtype", "float16"]),
    (lambda words: rates_parser().parse_args(words),
     ["--dim", "64", "--dtype", "fp32"], ["--head-dim", "64", "--dtype", "float32"]),
]  # fmt: skip


def shown(part: object) -> str:
    return " ".join(part) if isinstance(part, (list, tuple)) else ""


@pytest.mark.parametrize(("read", "now", "before"), SAME, ids=shown)
def test_old_spellings_say_the_same(
    read: Callable[[list[str]], argparse.Namespace], now: list[str], before: list[str]
) -> None:
    assert vars(read(now)) == vars(read(before))


@pytest.mark.parametrize(
    ("now", "before"),
    [
        (("--seq", "256"), ("--length", "256")),
        (("--dtype", "fp32", "--dim", "64"), ("--dtype", "float32", "--head-dim", "64")),
        (("--svg",), ("--svg", "--pass", "forward")),
        (("--seq", "1k", "--json"), ("--json", "--length", "1024")),
    ],
)
def test_of_a_schedule(now: tuple[str, ...], before: tuple[str, ...]) -> None:
    code, text, _ = run("schedule", "ring", "--ranks", "2", *now)
    assert code == 0 and text
    assert run("schedule", "ring", "--ranks", "2", *before) == (0, text, "")


def test_a_picture_of_a_schedule_in_a_file(tmp_path: Path) -> None:
    picture = run("schedule", "ring", "--ranks", "2", "--svg")[1]
    assert run("schedule", "--svg", "ring", "--ranks", "2")[1] == picture  # what follows is the schedule
    path = tmp_path / "a.svg"
    assert run("schedule", "ring", "--ranks", "2", "--svg", str(path)) == (0, "", "")
    assert path.read_text(encoding="utf-8") == picture
    assert "two files: leave one out" in run("schedule", "ring", "--ranks", "2", "--svg", str(path), "-o", "b.svg")[2]


def test_cases_keep_their_names() -> None:
    words = ["--ranks", "2", "--seq", "1k", "--dim", "32", "--dtype", "bf16"]
    words += ["--schedules", "ring", "--pass", "forward"]
    for case in (bench_case(False, bench([*words, "--peers", "none"]), 2), trace_case(trace(["ring", *words[:8]]), 2)):
        found = asdict(case)
        assert (found["seq_len"], found["head_dim"], found["dtype"]) == (1024, 32, "bfloat16")
    assert not bench_case(False, bench(words), 2).backward


COMMANDS = ("bench", "trace", "plan", "advise", "demo", "schedule", "rates", "doctor", "topology")
OLD = ("--seq-len", "--length", "--head-dim", "--forward-only", "--passes", "--picture", "bfloat16", "float32")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_one_spelling(command: str) -> None:
    code, text, _ = run(command, "--help")
    assert code == 0
    assert not [word for word in OLD if word in text]
    if command not in ("rates", "doctor", "topology"):
        assert "--seq N" in text
    if command not in ("rates", "doctor", "plan", "advise"):
        assert "--svg" in text
    if command != "demo":
        assert "--json" in text


WRONG = [
    (("plan", *SMALL, "--batch", "0"), "--batch 0: use 1 or more"),
    (("plan", *SMALL, "--dim", "-1"), "--dim -1: use 1 or more"),
    (("bench", "--ranks", "2", "--heads", "0"), "--heads 0: use 1 or more"),
    (("bench", "--ranks", "2", "--seq-len", "0"),
     "argument --seq-len: '0' is not a number of tokens, as 4096, 4k or 1M"),
    (("trace", "ring", "--ranks", "2", "--kv-heads", "0"), "--kv-heads 0: use 1 or more"),
    (("trace", "ring", "--ranks", "2", "--seq", "4x"), "argument --seq: '4x' is not a number of tokens"),
    (("schedule", "ring", "--ranks", "2", "--batch", "0"), "--batch 0: use 1 or more"),
    (("plan", "--topology", "preset:hgx-h100", "--cached", "4x"), "--cached 4x: write a number from 1 to "),
    (("plan", "--topology", "preset:hgx-h100", "--cached", "4k", "--tokens", "0"), "--tokens 0: write a number"),
    (("plan", "--topology", "preset:hgx-h100", "--cached", "4k", "--seq", "4k"),
     "--seq 4k does not go with --cached: its lengths are those of --cached N and --tokens N"),
    (("plan", *SMALL, "--tokens", "1k"), "--tokens 1k are new tokens over a cache: say how many are cached with "),
    (("advise", "--engine", "megatron", "--model", "qwen3-8b", "--topology", "preset:hgx-h100", "--seq", "4x"),
     "--seq 4x: write a number from 1 to "),
    (("demo", "--seq", "some"), "argument --seq: 'some' is not a number of tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "says"), WRONG, ids=shown)
def test_errors_name_options(words: tuple[str, ...], says: str) -> None:
    code, _, err = run(*words)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"tokenring: {says}") and "Workload" not in err


def test_errors_of_calls_name_the_size() -> None:
    with pytest.raises(ConfigurationError, match=r"^q_heads=0: every size must be a positive integer$"):
        tr.Workload(1, 64, 64, 0, 2, 16, torch.float32)


# ---------- JSON


class Terminal(StringIO):
    def isatty(self) -> bool:
        return False


def test_bench_prints_or_writes_json(tmp_path: Path) -> None:
    report = RaceReport.from_json((DATA / "bench.json").read_text(encoding="utf-8"))
    printing, writing = bench(["--json", "--ranks", "2"]), bench(["--json", "b.json"])
    assert (printing.printed, printing.json) == (True, None) and (writing.printed, writing.json) == (False, "b.json")
    out = Terminal()
    show_bench(report, printing, Console(out, Terminal(), {}))
    assert json.loads(out.getvalue())["format"] == "tokenring-bench"
    assert bench(["--save", "b.json"]).save == "b.json"


def test_formats_have_one_form() -> None:
    made: dict[str, Any] = json.loads(printed(*SMALL, "--schedules", "ring", "--json"))
    assert (made["format"], made["version"]) == ("tokenring-plan", 1)
    for older in ("tokenring-plan/1", "tokenring plan"):
        assert Plan.from_json(json.dumps(made | {"format": older})) == Plan.from_json(json.dumps(made))
    for text in (run("schedule", "ring", "--ranks", "2", "--json")[1], topology_json([])):
        found = json.loads(text)
        assert re.fullmatch("tokenring-[a-z]+", found["format"]) and found["version"] == 1


CACHED = ("--topology", "preset:a10-pix-4", "--cached", "4k", "--heads", "8", "--kv-heads", "2")


def test_a_plan_over_a_cache_has_json() -> None:
    made = json.loads(printed(*CACHED, "--tokens", "1k", "--json"))
    assert made["format"] == "tokenring-cached-plan"
    assert (made["tokens"], made["cached"], made["ranks"], made["kv_heads"]) == (1024, 4096, 4, 2)
    table = printed(*CACHED, "--tokens", "1k")
    seconds = [way["seconds"] for way in made["ways"]]
    assert len(seconds) == 6 and seconds == sorted(seconds) and table.count(" tokens over 4,096 cached") == 1
    assert table.index(made["ways"][0]["name"]) < table.index(made["ways"][1]["name"])
    assert "batch 1, 1 new token over 4,096 cached" in printed(*CACHED)


def test_a_model_gives_sizes_that_options_overrule() -> None:
    words = ("--topology", "preset:a10-pix-4", "--seq", "8k", "--schedules", "ring", "--pass", "forward")
    model = printed(*words, "--model", "deepseek-v3").splitlines()[0]
    assert ", 128:128 heads × 192/128, bfloat16, causal, " in model
    assert printed(*words, "--model", "llama-3.1-70b").splitlines()[0].count(", 64:8 heads × 128, bfloat16, causal, ")
    assert ", 16:8 heads × 128, " in printed(*words, "--model", "llama-3.1-70b", "--heads", "16").splitlines()[0]
    assert ", 24:24 heads × 128, bfloat16, full, " in printed(*words, "--model", "flux.1-dev").splitlines()[0]
    cached = printed(*words[:2], "--model", "llama-3.1-70b", "--cached", "4k")
    assert ", 64:8 heads × 128, " in cached.splitlines()[0]


def test_advice_has_json() -> None:
    words = ("advise", "--engine", "megatron", "--model", "llama-3.1-8b", "--topology", "preset:hgx-h100")
    code, text, _ = run(*words, "--ranks", "2", "--seq", "8k", "--pass", "forward", "--json")
    made = json.loads(text)
    assert code == 0 and made["format"] == "tokenring-advice"
    assert (made["engine"], made["ranks"], made["tokens"], made["passes"]) == ("megatron", 2, 8192, ["forward"])
    assert len(made["choices"]) == 3 and all(each["seconds"] > 0 for each in made["choices"])
    assert set(made["tokenring"]) == {"schedule", "seconds"}


def test_rates_have_a_format_and_older_ones_are_read(tmp_path: Path) -> None:
    key, rates = KernelKey("a device", "a kernel", "bfloat16", 128, "2.13"), constant(100.0, "as asked")
    made = json.loads(to_json(rates, key))
    assert made.pop("format") == "tokenring-rates"
    for name, document in (("new", json.loads(to_json(rates, key))), ("old", made)):
        path = tmp_path / name
        path.write_text(json.dumps(document), encoding="utf-8")
        assert read_table(path)[0] == key


def test_rates_print_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ("rates", "--device", "cpu", "--dtype", "fp32", "--dim", "16", "--seconds", "0.001", "--json")
    code, text, _ = run(*words)
    assert code == 0 and json.loads(text)["format"] == "tokenring-rates"
