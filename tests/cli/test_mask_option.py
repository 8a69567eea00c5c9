"""--mask takes every mask, by its text or by a file that has it, in every command that takes one."""

from __future__ import annotations

import argparse
from io import StringIO
from pathlib import Path

import pytest

import tokenring as tr
from tokenring.cli import spelling
from tokenring.cli.bench.command import _options as bench
from tokenring.cli.main import main
from tokenring.cli.plan.command import options_parser as plan_parser
from tokenring.cli.trace.command import _options as trace

TEXT = "documents(0,20,50)&(bidirectional(0,4;20,26)|causal)"
BUILD = ("schedule", "tokenring", "--ranks", "2", "--seq", "64", "--mask")
PLAN = ("plan", "--topology", "preset:hgx-h100", "--seq", "4k", "--heads", "8", "--mask")


def run(*words: str) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    return main(list(words), out, err, StringIO()), out.getvalue(), err.getvalue()


def test_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "pack.txt"
    file.write_text("documents(0,\n  20, 50)\n & (bidirectional(0,4; 20,26) | causal)\n", encoding="utf-8")
    code, out, _ = run(*BUILD, f"@{file}")
    assert code == 0 and f"mask      {TEXT}\n" in out
    assert out == run(*BUILD, TEXT)[1]
    for options in (bench, lambda words: trace(["ring", *words]), plan_of):
        text = options(["--mask", f"@{file}"]).mask
        assert tr.schedule("ring", 2, length=64, mask=text).mask == tr.schedule("ring", 2, length=64, mask=TEXT).mask


def plan_of(words: list[str]) -> argparse.Namespace:
    return plan_parser().parse_args(["--topology", "x", *words])


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, said = run(*BUILD, f"@{tmp_path / 'nothing'}")
    assert code == 2 and "argument --mask: cannot read a mask from" in said and "No such file" in said
    monkeypatch.setattr(spelling, "MOST_OF_A_MASK", 5)
    (tmp_path / "long").write_text(TEXT, encoding="utf-8")
    code, _, said = run(*BUILD, f"@{tmp_path / 'long'}")
    assert code == 2 and "is not a mask: it has more than 5 characters" in said


@pytest.mark.parametrize(
    ("mask", "shown"),
    [
        ("prefix(1000)", "documents(0,1000)|causal, layout zigzag"),
        (
            "tree(2048,1024,1024;,0,0)",
            "2048,3072,0,3072,,0;3072,4096,0,2048,,;3072,4096,3072,4096,,0), layout contiguous",
        ),
        (f"documents({','.join(str(at) for at in range(0, 4097, 64))})", "1920,1984,2048,211…, layout contiguous"),
    ],
)
def test_plans(mask: str, shown: str) -> None:
    code, out, said = run(*PLAN, mask, "--schedules", "ring")
    assert code == 0, said
    assert shown in out.splitlines()[0]
