"""A family of schemes: its name, what its parameters mean, and which of them are worth trying."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokenring.errors import ConfigurationError

if TYPE_CHECKING:
    from tokenring.schedule.scheme import Scheme
    from tokenring.sequence.workload import Workload

Numbers = tuple[int, ...]
Choices = Callable[[int, "Workload | None", int], Iterable[Numbers]]  # world size, workload, ranks a node


class Misfit(Exception):
    """Parameters do not fit a world size; becomes a ConfigurationError that says what was asked."""


def refuse(when: bool, why: str) -> None:
    """Raise Misfit when so."""
    if when:
        raise Misfit(why)


@dataclass(frozen=True)
class LaterFunction:
    """A function of a module of this package, which is imported when it is first called."""

    module: str
    name: str

    def __call__(self, *given: Any, **options: Any) -> Any:
        """Call it."""
        return getattr(import_module(f"{__package__}.{self.module}"), self.name)(*given, **options)


class Later:
    """A module of this package, of whose functions each call imports it: a call of attention takes one schedule."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> LaterFunction:
        if name.startswith("__"):
            raise AttributeError(name)
        found = self.__dict__[name] = LaterFunction(self._module, name)  # the same one whenever it is asked for
        return found


def once(world_size: int, workload: Workload | None, local: int) -> Iterable[Numbers]:
    """Return no parameters: for a family without any, or with their defaults alone."""
    return [()]


def split_heads(workload: Workload | None, groups: int) -> bool:
    """Return whether heads divide into so many groups; unknown heads do, latents, which are of all heads, do not."""
    if workload is None:
        return True
    if workload.latent_dim is not None:
        return groups == 1
    q, kv = workload.q_heads, workload.kv_heads
    return q % groups == 0 and (groups % kv if groups > kv else kv % groups) == 0


@dataclass(frozen=True)
class Family:
    """One way to schedule attention, for any world size and parameters.

    scheme(world_size, *parameters) makes it, or raises Misfit. parameters: what they are called; `optional` of
    them, the last ones, may be left out; `repeats`: more of the last kind may follow.
    choices: the parameters worth trying. turns: its mirror image may move fewer bytes under a mask.
    cut: the scheme in finer pieces; their number is a multiple of least_pieces.
    small: the scheme for tiles so small that kernels are better off with fewer; None: the same.
    """

    name: str
    moves: str
    shape: str
    source: str
    scheme: Callable[..., Scheme]
    parameters: tuple[str, ...] = ()
    optional: int = 0
    repeats: bool = False
    choices: Choices = once
    turns: bool = False
    least_pieces: int = 1
    cut: Callable[[Scheme, int], Scheme] | None = None
    small: Callable[[Scheme], Scheme] | None = None

    @property
    def form(self) -> str:
        """Form in which its name is written: usp/U, ulysses[/K]."""
        more = "x..." if self.repeats else ""
        if not self.parameters:
            return self.name
        text = f"/{'x'.join(self.parameters)}{more}"
        return f"{self.name}[{text}]" if self.optional == len(self.parameters) else self.name + text

    def written(self, parameters: Numbers) -> str:
        """Return the name of one member."""
        return self.name + ("/" + "x".join(map(str, parameters)) if parameters else "")

    def takes(self, count: int) -> bool:
        """Return whether the family can have so many parameters."""
        most = len(self.parameters)
        return most - self.optional <= count and (count <= most or self.repeats)

    def make(self, parameters: Numbers, world_size: int) -> Scheme:
        """Make the scheme for so many ranks. Raises ConfigurationError if the parameters do not fit."""
        name = self.written(parameters)
        try:
            return replace(self.scheme(world_size, *parameters), name=name)
        except Misfit as misfit:
            raise ConfigurationError(
                f"schedule {name!r} on {world_size} ranks: {misfit}{self._instead(world_size)}"
            ) from None

    def variants(self, world_size: int, workload: Workload | None = None, local: int | None = None) -> list[str]:
        """Return the names of its members worth trying, with `local` ranks a node (None: one node)."""
        local = local if local and world_size % local == 0 else world_size
        return [self.written(each) for each in self.choices(world_size, workload, local)]

    def _instead(self, world_size: int) -> str:
        """Return names that would fit, as the end of an error, where there are parameters to choose."""
        if not self.parameters:
            return ""
        locals_ = [local for local in range(2, world_size) if world_size % local == 0]
        names = {name: None for local in (*locals_, world_size) for name in self.variants(world_size, None, local)}
        return f"; choose one of {', '.join(list(names)[:6])}" if names else "; none of this family fits"
