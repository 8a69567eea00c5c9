"""docs/presets.md, written from the figures: `python benchmarks/presets_page.py > docs/presets.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from model_heads import MODELS, ModelHeads  # noqa: E402

from tokenring.cli.spelling import heads_text  # noqa: E402
from tokenring.planner.machines.devices import DEVICES, DeviceFigures  # noqa: E402
from tokenring.planner.machines.presets import MAX_HOSTS, PRESETS, Preset  # noqa: E402
from tokenring.planner.machines.sourced import GRADES, Figure  # noqa: E402

HEAD = """\
# Presets: known machines, devices and models

A preset is the topology of a known machine: you can plan for it without having it. Use `--topology preset:hgx-h100`,
or `preset("hgx-h100")` of `tokenring.planner.machines.presets`. `preset:hgx-h100*4` is four such servers joined by
their NICs; {max_hosts} are the most. A preset is a graph: each edge is a resource with a bandwidth, and transfers whose
paths pass the same edge share it (`tokenring.planner.machines.server_spec`). The network between hosts never blocks.
`python benchmarks/presets_page.py` writes this page from the code; a test compares them.

Bandwidth is in GB/s (10^9 bytes) one way, as published. *Reached* is the share of it that a copy gets. No figure is
fitted to a comparison of predictions with measurements. Grades:
"""
MODELS_TEXT = """\
DeepSeek's MLA is listed as multi-head attention with head dimension 192 for Q and K and 128 for V. Ranks exchange K and
V, not the latent from which they are computed.
"""
DEVICE_HEAD = (
    "device", "", "fp32", "bf16", "fp16", "memory GB/s", "memory GiB", "forward", "backward",
    "kernel us", "operator us", "launch us",
)  # fmt: skip
MODEL_HEAD = ("model", "", "q heads", "kv heads", "head dim", "layers", "mask", "dtype", "source")


def page() -> str:
    """Return the whole page as Markdown."""
    parts = [HEAD.format(max_hosts=MAX_HOSTS), _table(["grade", ""], GRADES.items())]
    parts += [
        "## Machines\n",
        _table(["preset", "machine", "class", "devices", "NICs a host"], map(_summary, PRESETS.values())),
    ]
    for each in PRESETS.values():
        parts += [f"### {each.name}\n", f"{each.note}\n", _table(["", "value", "grade", "source"], _rows(each))]
    parts += [
        "## Devices\n",
        "Peaks are dense and in TFLOP/s; memory is in GB/s and GiB. *forward* and *backward* are the shares of the\n"
        "peak that attention reaches. *kernel us* and *operator us* are the fixed costs on the device of an attention\n"
        "kernel and of any other operator; *launch us* is the host's cost of each launch.\n",
        _table(DEVICE_HEAD, map(_device, DEVICES.values())),
        _table(["device", "figure", "grade", "source"], _device_sources()),
        "## Models\n",
        MODELS_TEXT,
        _table(MODEL_HEAD, map(_model, MODELS.values())),
    ]
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _summary(preset: Preset) -> list[str]:
    server = preset.server
    nics = f"{server.nics.count} x {_value(server.nics.gbs)}"
    return [f"`{preset.name}`", preset.title, preset.shape, f"{server.count} x `{preset.device}`", nics]


def _rows(preset: Preset) -> Iterator[list[str]]:
    for name, figure in preset.server.figures():
        yield [f"{name}, GB/s", *_cells(figure)]
    for kind, figure in preset.reached.items():
        yield [f"reached of {kind}", *_cells(figure)]
    yield ["a message, us", *_cells(preset.operation_us)]


def _cells(figure: Figure) -> list[str]:
    return [_value(figure), figure.grade, figure.source]


def _value(figure: Figure) -> str:
    return "–" if figure.value is None else f"{figure.value:g}"


def _device(device: DeviceFigures) -> list[str]:
    return [f"`{device.name}`", device.title, *map(_value, device.figures().values())]


def _device_sources() -> Iterator[list[str]]:
    """Yield rows of a device's figures, those that share a source in one row."""
    for device in DEVICES.values():
        found: dict[tuple[str, str], list[str]] = {}
        for name, figure in device.figures().items():
            found.setdefault((figure.grade, figure.source), []).append(name)
        for (grade, source), names in found.items():
            yield [f"`{device.name}`", ", ".join(names), grade, source]


def _model(model: ModelHeads) -> list[str]:
    dims = heads_text(model.head_dim, model.value_dim or model.head_dim)
    numbers = (model.q_heads, model.kv_heads, dims, model.layers)
    mask = "causal" if model.causal else "full"
    dtype = str(model.dtype).removeprefix("torch.")
    return [f"`{model.name}`", model.title, *map(str, numbers), mask, dtype, model.source]


if __name__ == "__main__":
    print(page(), end="")
