"""Ask what is unknown of linear layers over NPUs: the vendor's fused operators, and ours beside them."""

from __future__ import annotations

from collections.abc import Callable

from npu_smoke.verdicts import MEASURED, OPEN, OTHERWISE, Found, Unknown, Verdict, yes


def _exact(found: Found) -> Verdict:
    """Judge MC2, in bf16."""
    if "mc2" in found["failed"]:
        return Verdict(OTHERWISE, f"MC2 fails: {found['failed']['mc2']}")
    if "mc2" in found["left"]:
        return Verdict(OPEN, f"MC2 was refused: {found['left']['mc2']}")
    errors = found["errors"]["mc2"]
    text = f"errors of MC2 against float64 {', '.join(f'{name} {each:.1e}' for name, each in errors.items())}"
    return yes(all(each <= found["limit"] for each in errors.values()), text)


def _ours(found: Found) -> Verdict:
    """Judge our schedules, in bf16."""
    errors = {name: max(each.values()) for name, each in found["errors"].items() if name != "mc2"}
    left = {name: why for name, why in found["left"].items() if name != "mc2"}
    text = ", ".join([*(f"{name} {each:.1e}" for name, each in errors.items()),
                      *(f"{name} refused: {why}" for name, why in left.items())])  # fmt: skip
    return yes(not left and all(each <= found["limit"] for each in errors.values()), f"errors in bf16: {text}")


def _times(which: str) -> Callable[[Found], Verdict]:
    def judge(found: Found) -> Verdict:
        seconds = {name: each[which] for name, each in found["seconds"].items()}
        shown = ", ".join(f"{name} {1e3 * seconds[name]:.3g} ms" for name in sorted(seconds, key=seconds.__getitem__))
        sizes = ", ".join(f"{name} {size}" for name, size in found["sizes"].items())
        return Verdict(MEASURED, f"{shown} ({sizes})")

    return judge


OF_LAYERS = tuple(
    each
    for layer, does in (("column", "all-gather, matmul"), ("row", "matmul, reduce-scatter"))
    for each in (
        Unknown(f"{layer}-mc2", f"is MC2 exact for a {layer} layer ({does}), forward and backward?",
                "as emulated, against float64", layer, _exact),
        Unknown(f"{layer}-exact", "and our schedules?", "as on the CPU, against float64", layer, _ours),
        Unknown(f"{layer}-forward", "how long does its forward pass take: our schedules, MC2, HCCL and then a product?",
                "nothing: MC2 is taken by name alone", layer, _times("forward"), True),
        Unknown(f"{layer}-backward", "and its backward pass?", "nothing", layer, _times("backward"), True),
    )
)  # fmt: skip
