"""Column and row layers by several ways, on accelerators: their errors, and both passes' times in turns.

`tokenring bench --operator` races them on CPUs, where ranks begin at one moment of the clock. Here a clock waits for
the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

import torch

from tokenring.backends.devices import device_of
from tokenring.cli.bench.operators import OperatorCase
from tokenring.cli.bench.operators_worker import Given, given_of, layer_call
from tokenring.cli.bench.race import order
from tokenring.cli.bench.torch_layers import Layer

WARM_UP = 2
SEED = 5
Seconds = dict[str, float]  # by pass


def layer_case(operator: str, tokens: int, features: int, width: int, dtype: torch.dtype) -> OperatorCase:
    """Return the case of a layer with both passes, of tokens and features of all ranks together."""
    word = str(dtype).removeprefix("torch.")
    return OperatorCase(operator, tokens, features, width, 0, word, True, "auto", [], 1)


def errors_of(
    case: OperatorCase, layer: Layer, rank: int, ranks: int, place: torch.device, largest: Callable[[float], float]
) -> dict[str, float]:
    """Return the relative errors of out, dx and dw, the largest of any rank's part. largest: of all ranks.

    Products are made in float64 on the CPU first: give small sizes.
    """
    given = given_of(case, rank, ranks)
    assert given.weight is not None and given.dout is not None
    on_device = Given(given.x.to(place), given.weight.to(place), given.dout.to(place), given.wanted)
    found = layer_call(case, on_device, layer)
    return {
        name: largest(float((found[name].cpu().double() - want).norm() / want.norm()))
        for name, want in given.wanted.items()
    }


def in_turns(
    case: OperatorCase,
    layers: Mapping[str, Layer],
    ranks: int,
    place: torch.device,
    rounds: int,
    meet: Callable[[], object],
    largest: Callable[[float], float],
) -> dict[str, Seconds]:
    """Return the median seconds of both passes by each way, of the slowest rank.

    In each round every way has its turn, in another order. meet: all ranks get there. Tensors are made on the device.
    """
    x, weight, dout = _operands(case, ranks, place)
    clock, names = device_of(place).clock, list(layers)
    found: dict[str, dict[str, list[float]]] = {name: {"forward": [], "backward": []} for name in names}
    for turn in range(WARM_UP + rounds):
        for at in order(len(names), turn):
            mine, own = (each.detach().requires_grad_() for each in (x, weight))
            meet()
            began = clock()
            out = layers[names[at]](mine, own)
            forward = largest(clock() - began)
            meet()
            began = clock()
            torch.autograd.grad(out, (mine, own), dout)
            backward = largest(clock() - began)
            if turn >= WARM_UP:
                found[names[at]]["forward"].append(forward)
                found[names[at]]["backward"].append(backward)
    return {name: {each: median(times) for each, times in passes.items()} for name, passes in found.items()}


def _operands(case: OperatorCase, ranks: int, place: torch.device) -> list[torch.Tensor]:
    """Return a rank's input, weight and gradient of the output: normally distributed, the same on every rank."""
    tokens, features = case.tokens // ranks, case.features // ranks
    rows, wide = (1, tokens, case.width), (1, case.tokens, features)
    shapes = [rows, (features, case.width), wide] if case.operator == "column" else [wide, (case.width, features), rows]
    made = []
    for seed, shape in enumerate(shapes, SEED):
        small = torch.randn(shape[-2:], generator=torch.Generator().manual_seed(seed)) * case.width**-0.25
        made.append(small.to(getattr(torch, case.dtype)).to(place).view(shape))
    return made
