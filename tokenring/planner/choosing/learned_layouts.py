"""The layout in which the fastest schedule of packs of a shape is fastest, once it is known.

Plans are of all ranks together, and shapes are of integers, so that all ranks know the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import lru_cache

from tokenring.errors import ConfigurationError
from tokenring.planner.choosing.pack_shapes import pack_shape
from tokenring.planner.choosing.plan import Plan
from tokenring.runtime.agreement import Disagreement
from tokenring.sequence.layout import Layout, contiguous, zigzag
from tokenring.sequence.mask_data import Mask
from tokenring.sequence.workload import Request

LOG = logging.getLogger("tokenring")
MOST_SHAPES = 256  # of packs for which the choice is kept
USUAL = {"zigzag": zigzag, "contiguous": contiguous}


class LearnedLayouts:
    """Names of the best layouts, by shapes of packs; and the last call that "auto" learned from."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._chosen: dict[Hashable, str] = {}
        self._kind: Request | None = None

    def known(self, key: Hashable) -> str | None:
        """Return the name of the layout that was chosen for a shape; None: none was yet."""
        return self._chosen.get(key)

    def choose(self, key: Hashable, request: Request, found: Layout, plan: Callable[[Request], Plan]) -> Layout:
        """Return the best of the usual layouts and the one that was searched, and keep its name for the shape.

        plan: of a call, of all ranks together. Raises ConfigurationError where no schedule fits in any of them.
        """
        layouts = dict(zip(USUAL, usual_layouts(self.world_size, found.length), strict=True))
        if found not in layouts.values():
            layouts[found.name] = found
        best = _best(_plans(request, layouts, plan))
        if len(self._chosen) >= MOST_SHAPES:  # on all ranks alike
            self._chosen.pop(next(iter(self._chosen)))
        self._chosen[key] = best
        return layouts[best]

    def learn(self, request: Request, found: Layout, plan: Callable[[Request], Plan]) -> None:
        """Choose the layout of packs like that of a call, which is cut by `found`: of each shape once."""
        kind = replace(request, differentiable=False)  # in which ranks may differ
        key = shapes(kind, self.world_size)
        if key is None:
            return
        self._kind = kind
        if key not in self._chosen:
            self.choose(key, request, found, plan)

    def usual_for(self, length: int, mask: Mask) -> str:
        """Return the usual layout in which calls of packs like this one are fastest; "": another, or none yet."""
        if self._kind is None:
            return ""
        size = replace(self._kind.workload, q_length=length, kv_length=length)
        key = shapes(replace(self._kind, workload=size, mask=mask), self.world_size)
        name = "" if key is None else self._chosen.get(key, "")
        return name if name in USUAL else ""


def usual_layouts(world_size: int, length: int) -> list[Layout]:
    """Return the layouts that nothing is searched for. Raises ConfigurationError."""
    return [make(world_size, length) for make in USUAL.values()]


@lru_cache(maxsize=64)
def shapes(request: Request, world_size: int) -> Hashable:
    """Return the shapes of a pack in the usual layouts, which tell of the call, too; None where it has none."""
    found = [pack_shape(request, (each, each)) for each in usual_layouts(world_size, request.workload.q_length)]
    return None if None in found else tuple(found)


def _best(plans: Iterator[tuple[str, Plan | ConfigurationError]]) -> str:
    """Return the name of the layout whose fastest schedule is fastest; the same on all ranks, as their plans are."""
    seconds: dict[str, float] = {}
    texts, refused = [], None
    for name, plan in plans:
        if isinstance(plan, ConfigurationError):
            refused = plan
            continue
        seconds[name] = plan.candidates[0].predicted_seconds or 0.0 if plan.candidates else 0.0
        texts.append(f"{name} {seconds[name] * 1e3:.3g} ms ({plan.name})")
    if refused is not None and not seconds:
        raise refused
    best = min(seconds, key=lambda name: seconds[name])
    LOG.info("layout %s: %s", best, ", ".join(texts))
    return best


def _plans(
    request: Request, layouts: dict[str, Layout], plan: Callable[[Request], Plan]
) -> Iterator[tuple[str, Plan | ConfigurationError]]:
    for name, layout in layouts.items():
        try:
            yield name, plan(replace(request, layout=layout))
        except Disagreement:
            raise
        except ConfigurationError as error:  # as all ranks hear it: nothing fits in this layout
            yield name, error
