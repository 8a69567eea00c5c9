"""Transfers as fluids: each gets its max-min fair share of the wires it passes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

TIE = 1 + 1e-9  # shares so close are one


def fair_rates(
    ways: Mapping[Hashable, Sequence[str]], width: Callable[[str], float], cap: float = float("inf")
) -> dict[Hashable, float]:
    """Return the bytes a second of each transfer, by progressive filling.

    Bertsekas and Gallager, Data Networks, §6.5.2.
    ways: the wires that each transfer passes. width: of a wire, bytes a second. cap: of any one transfer.
    A transfer that passes no wire gets `cap`.
    """
    users: dict[str, list[Hashable]] = {}
    for key, way in ways.items():
        for wire in way:
            users.setdefault(wire, []).append(key)
    left = {wire: width(wire) for wire in users}
    count = {wire: len(keys) for wire, keys in users.items()}
    rates = {key: cap for key, way in ways.items() if not way}
    while count:
        share = min(left[wire] / number for wire, number in count.items())
        if share >= cap:
            rates.update({key: cap for key in ways if key not in rates})
            break
        for wire in [wire for wire, number in count.items() if left[wire] <= share * number * TIE]:
            for key in users[wire]:
                if key not in rates:
                    rates[key] = share
                    _fix(ways[key], share, left, count)
    return rates


def _fix(way: Sequence[str], rate: float, left: dict[str, float], count: dict[str, int]) -> None:
    for wire in way:
        left[wire] -= rate
        count[wire] -= 1
        if not count[wire]:
            del count[wire]
