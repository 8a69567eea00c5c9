"""How far the best plan is from the lower bound, for the heads of ten models on every preset, forward and backward.

    python benchmarks/bound_gap.py [--tokens 1024,8192] [--presets NAMES]

Attainable: under the full mask, where the ranks divide the KV heads (docs/bounds.md, Known values). Everything else is
printed too; there the bound may be below what any schedule can do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from model_heads import MODELS, ModelHeads  # noqa: E402

from tokenring.errors import ConfigurationError  # noqa: E402
from tokenring.ir.schedule_data import PASSES  # noqa: E402
from tokenring.planner.bounds.bound import is_attainable  # noqa: E402
from tokenring.planner.choosing.auto import CallToPlan, call_bound, plan_call  # noqa: E402
from tokenring.planner.interconnects.wiring import interconnect_of  # noqa: E402
from tokenring.planner.machines.machine import machine_of_preset  # noqa: E402
from tokenring.planner.machines.presets import PRESETS, preset  # noqa: E402
from tokenring.planner.simulation.predict import Setting  # noqa: E402
from tokenring.sequence.layout import make_layout  # noqa: E402
from tokenring.sequence.mask import Causal, Full, Mask  # noqa: E402


def call_of(name: str, model: ModelHeads, mask: Mask, tokens: int) -> CallToPlan:
    net = interconnect_of(preset(name))
    machine = machine_of_preset(name, model.dtype, or_half=True)
    length = tokens * net.world_size
    layout = make_layout("contiguous" if mask == Full() else "zigzag", net.world_size, length)
    return CallToPlan(Setting(model.workload(length), net, machine, PASSES), layout, layout, mask)


def ratios(presets: list[str], tokens: list[int]) -> Iterator[tuple[bool, float]]:
    """Whether the bound can be attained, and the best plan's time over it; prints each."""
    for name in presets:
        for model in MODELS.values():
            for mask in (Full(), Causal()):
                for some in tokens:
                    call = call_of(name, model, mask, some)
                    try:
                        plan = plan_call(call)
                    except ConfigurationError as error:
                        print(f"{name}, {model.title}: {error}")
                        continue
                    seconds = plan.candidates[0].predicted_seconds or 0.0
                    ratio = seconds / call_bound(call).seconds
                    attainable = is_attainable(mask, model.kv_heads, call.setting.interconnect.world_size)
                    what = "attainable" if attainable else ""
                    circumstances = f"{name:16} {model.title:28} {mask!s:7} {some:6}"
                    print(f"{circumstances} {plan.name:26} {ratio:5.2f} {what}", flush=True)
                    yield attainable, ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1024,8192", help="of a rank")
    parser.add_argument("--presets", default=",".join(PRESETS))
    options = parser.parse_args()
    found = list(ratios(options.presets.split(","), [int(n) for n in options.tokens.split(",")]))
    for title, values in (
        ("where the bound can be attained", [ratio for attainable, ratio in found if attainable]),
        ("elsewhere", [ratio for attainable, ratio in found if not attainable]),
    ):
        if values:
            print(f"{title}: median {statistics.median(values):.3f} of {len(values)}, largest {max(values):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
