"""Digests of what the compiler and the planner make, to show that a change of the code changed none of it.

    python benchmarks/digests.py > before.txt       # on the old commit
    python benchmarks/digests.py > after.txt        # on the new one; --part plans --rounded: a change of the simulator
    diff before.txt after.txt               # nothing: the same schedules, programs, bytes, texts and plans

A line is one case: every member of every family that fits P = 1 to 8 ranks, on every layout, under every mask, and
every preset's plan for some workloads. It digests the schedule's printed text and JSON, both passes' programs of all
ranks (for transports that match each direction apart, those that do not, and those with collectives and bundles), the
bytes on each link, the peak of the buffers and the FLOPs. `normal` is all that stands between an object and its
digest: it drops `Release`, which no executor acts on, and writes a renamed class by its old name, RENAMED.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch

from tokenring.cli.main import main as cli
from tokenring.errors import TokenRingError
from tokenring.ir.schedule_data import PASSES, ScheduleData
from tokenring.lowering.lower import lower
from tokenring.lowering.target import IDEAL, Target
from tokenring.schedule.families import variants
from tokenring.schedule.names import make_schedule
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import parse_mask
from tokenring.sequence.workload import Workload

# What a class, or a format of JSON, is called now → its name when the first digests were taken.
RENAMED = {"ScheduleData": "Schedule", "tokenring-plan": "tokenring plan"}
DROPPED = ("Release",)
RANKS = range(1, 9)
HEADS = ((8, 8), (6, 6), (8, 2), (8, 1), (6, 3))
LAYOUTS = ("contiguous", "zigzag", "striped", "zigzag/2")
OPTIONS = ("", "/late", "/keep", "/regather", "/pieces2")
MASKS = ("full", "causal", "window({w},0)", "documents(0,{a},{b},{n})", "causal & documents(0,{a},{b},{n})")
TARGETS = (
    IDEAL,
    Target(early_receives=False),
    Target(early_receives=False, collectives=True),
    Target(bundle_bytes=1 << 20, ahead_bytes=1 << 20),
)
TOPOLOGIES = (
    "dgx-1-v100", "dgx-a100", "hgx-h100", "hgx-h100*2", "l40s-pcie-8", "a10-pix-4", "atlas-800-910a", "atlas-800t-a2",
    "atlas-a3", "atlas-850", "mi300x-8",
)  # fmt: skip
CALLS = (
    ["--seq", "32k"],
    ["--seq", "128k", "--heads", "28", "--kv-heads", "4"],
    ["--seq", "64k", "--heads", "6", "--mask", "full", "--pass", "forward"],
)


def normal(value: Any) -> Any:
    """A value as lists, texts and numbers: the same for the same content, whatever Python calls its classes."""
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return _record(value, [field.name for field in fields(value)])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _record(value, list(value._fields))
    if isinstance(value, dict):
        return sorted(([normal(key), normal(each)] for key, each in value.items()), key=json.dumps)
    if isinstance(value, (set, frozenset)):
        return sorted((normal(each) for each in value), key=json.dumps)
    if isinstance(value, (list, tuple)):
        return [normal(each) for each in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


def _record(value: Any, names: list[str]) -> list[Any]:
    """A record as its class's old name and its fields; a program without what is dropped."""
    content = {name: getattr(value, name) for name in names}
    if {"instructions", "steps"} <= content.keys():
        kept = [at for at, each in enumerate(content["instructions"]) if type(each).__name__ not in DROPPED]
        content["instructions"] = [content["instructions"][at] for at in kept]
        content["steps"] = [content["steps"][at] for at in kept]
    name = type(value).__name__
    return [RENAMED.get(name, name), *([key, normal(each)] for key, each in content.items())]


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(normal(value)).encode()).hexdigest()[:16]


def schedules() -> Iterator[tuple[str, ScheduleData, Workload]]:
    """Every member once for each number of heads that it is made for, layout, mask and option."""
    for ranks in RANKS:
        seen: set[tuple[str, int]] = set()
        length = ranks * 16
        cuts = {"n": length, "a": length // 3 or 1, "b": length // 2 + 1, "w": length // 3}
        for q_heads, kv_heads in HEADS:
            size = Workload(1, length, length, q_heads, kv_heads, 16, torch.bfloat16)
            for name in members(ranks, size):
                if (name, q_heads) in seen:
                    continue
                seen.add((name, q_heads))
                for layout in LAYOUTS:
                    for mask in MASKS:
                        for option in OPTIONS if (layout, mask) == ("zigzag", "causal") else ("",):
                            if option and q_heads != 8:
                                continue
                            text = mask.format(**cuts)
                            made = make(name + option, ranks, layout, text, length)
                            if made is not None:
                                key = f"P{ranks} heads {q_heads}/{kv_heads} {name}{option} {layout} {mask}"
                                yield key, made, size


def members(ranks: int, size: Workload) -> list[str]:
    """All that fit some number of ranks a node."""
    locals_ = [local for local in range(1, ranks + 1) if ranks % local == 0]
    return list(dict.fromkeys(name for local in locals_ for name in variants(ranks, size, local)))


def make(name: str, ranks: int, layout: str, mask: str, length: int) -> ScheduleData | None:
    """None: it does not fit."""
    try:
        whole = make_layout(layout, ranks, length)
        return make_schedule(name, whole, whole, parse_mask(mask))
    except TokenRingError:
        return None


def said(made: ScheduleData, size: Workload, with_targets: bool) -> dict[str, Any]:
    """What is digested of a schedule."""
    content: dict[str, Any] = {"text": str(made), "json": json.loads(made.to_json())}
    for direction in PASSES:
        content[direction] = [
            made.link_bytes(size, direction), made.peak_bytes(size, direction), made.flops(size, direction),
            [
                lower(made, rank, direction, size, target)
                for target in (TARGETS if with_targets else TARGETS[:1])
                for rank in range(made.world_size)
            ],
        ]  # fmt: skip
    return content


def _as_named_first(plan: dict[str, Any]) -> dict[str, Any]:
    return {**plan, "format": RENAMED.get(plan["format"], plan["format"])}


def plans() -> Iterator[tuple[str, Any]]:
    """Each preset's plan, as the command prints it in JSON, made now."""
    os.environ["TOKENRING_PLAN_CACHE"] = "off"
    for topology in TOPOLOGIES:
        for call in CALLS:
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                code = cli(["plan", "--topology", f"preset:{topology}", "--dtype", "fp16", "--json", *call])
            plan = "" if code else _as_named_first(json.loads(out.getvalue()))
            yield f"plan {topology} {' '.join(call)}", [code, plan]


def rounded(content: Any) -> Any:
    """Numbers to nine digits: a simulator that adds in another order is the same to those."""
    if isinstance(content, float):
        return float(f"{content:.9g}")
    if isinstance(content, dict):
        return {name: rounded(each) for name, each in content.items()}
    return [rounded(each) for each in content] if isinstance(content, list) else content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("all", "schedules", "plans"), default="all", help="(all)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every N-th schedule only (1)")
    parser.add_argument("--rounded", action="store_true", help="numbers of plans to nine digits")
    options = parser.parse_args()
    whole = hashlib.sha256()

    def line(key: str, content: Any) -> None:
        text = f"{digest(content)}  {key}"
        whole.update(text.encode())
        print(text, flush=True)

    if options.part != "plans":
        for number, (key, made, size) in enumerate(schedules()):
            if number % options.every == 0:
                line(key, said(made, size, "zigzag causal" in key))
    if options.part != "schedules":
        for key, content in plans():
            line(key, rounded(content) if options.rounded else content)
    print(f"{whole.hexdigest()[:16]}  all", file=sys.stdout)


if __name__ == "__main__":
    main()
