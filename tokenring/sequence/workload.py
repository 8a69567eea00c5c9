"""The sizes of one attention call, as the planner and the byte counts need them; and its request.

By requests plans, programs and descriptions are kept.

Of the length of a whole sequence a rank sees only its own part. Where a length does not divide, parts differ from rank
to rank, and a part alone does not say the length. A rank takes that which it knows: of the sequence that it sharded
last with a part so long, else as if all parts were equal. If that is wrong anywhere, the digests of the call differ,
and what the ranks then send each other says what each holds. So all of them learn the length, and make the call again.
Calls of which the guess is right exchange nothing for this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

import torch

from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.sequence.layout import Layout, as_integer, make_layout
from tokenring.sequence.mask import Mask

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_KNOWN = 1024  # parts, of which the oldest is forgotten
TAKEN = "_tokenring_taken"  # of an error: what the rank holds of the call that it refuses, and the lengths it took
OF_LENGTHS = ("q_length", "kv_length")  # the fields of a description that follow from them
CUT = "layout of the call"  # the field of a layout that is not the context's own: with "auto" it follows from them too
ADVICE = "take each rank's part from tr.shard, or by tr.positions"
Fields = Mapping[str, str]


@dataclass(frozen=True)
class Workload:
    """q [batch, q_length, q_heads, head_dim] over all ranks; k likewise with kv_length and kv_heads.

    value_dim: the last axis of v and of the output, where it is not head_dim (multi-latent attention). None: head_dim.
    latent_dim: elements of a token that travel in place of k and v, which each rank makes of them; None: k and v do.
    """

    batch: int
    q_length: int
    kv_length: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    value_dim: int = None  # type: ignore[assignment]  # None where it is made: whoever reads it finds a number
    latent_dim: int | None = None

    def __post_init__(self) -> None:
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.head_dim)
        for name in ("batch", "q_length", "kv_length", "q_heads", "kv_heads", "head_dim", "value_dim"):
            if (as_integer(getattr(self, name)) or 0) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: every size must be a positive integer")
        if self.latent_dim is not None and ((as_integer(self.latent_dim) or 0) < 1 or self.kv_heads != 1):
            raise ConfigurationError(
                f"latent_dim={self.latent_dim!r} with kv_heads={self.kv_heads!r}: latents have a size from 1 on, and "
                f"are of all heads: kv_heads is 1 with them"
            )
        if self.q_heads % self.kv_heads:
            raise ConfigurationError(
                f"{self.q_heads} query heads are not a multiple of {self.kv_heads} kv heads: "
                f"repeat or drop kv heads so that each serves equally many query heads"
            )
        if self.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise UnsupportedError(f"attention in {self.dtype} is not supported; use one of {known}")

    def __repr__(self) -> str:
        said = [each.name for each in fields(self) if each.name not in self._unsaid]
        return f"Workload({', '.join(f'{name}={getattr(self, name)!r}' for name in said)})"

    def to_dict(self) -> dict[str, Any]:
        """Return the sizes by name, the dtype as "bfloat16"; value_dim only where it is not head_dim."""
        found = asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}
        return {name: value for name, value in found.items() if name not in self._unsaid}

    @property
    def _unsaid(self) -> set[str]:
        """The fields that say nothing."""
        unsaid = {"value_dim": self.value_dim == self.head_dim, "latent_dim": self.latent_dim is None}
        return {name for name, says_nothing in unsaid.items() if says_nothing}

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def kv_dim(self) -> int:
        """Elements of k and v together, of a token and kv head, as they travel: of its latent, if there is one."""
        return self.qo_dim if self.latent_dim is None else self.latent_dim

    @property
    def qo_dim(self) -> int:
        """Elements of q and out together, of a token and query head; as many are k and v that nothing stands for."""
        return self.head_dim + self.value_dim

    def ring_bytes(self, ranks: int) -> int:
        """Return the bytes of k and v of one of so many ranks: a ring sends so much in a step, others about that."""
        return self.batch * self.kv_length * self.kv_heads * self.kv_dim * self.itemsize // ranks

    def q_head_range(self, group: int, groups: int) -> tuple[int, int]:
        """Return the query heads [low, high) of the group-th of `groups` head groups."""
        self._check_groups(groups)
        return group * self.q_heads // groups, (group + 1) * self.q_heads // groups

    def kv_head_range(self, group: int, groups: int) -> tuple[int, int]:
        """Return the kv heads [low, high) of those query heads; several groups share one where groups > kv_heads."""
        self._check_groups(groups)
        return group * self.kv_heads // groups, -(-(group + 1) * self.kv_heads // groups)

    def _check_groups(self, groups: int) -> None:
        if self.latent_dim is not None and groups > 1:
            raise ConfigurationError(
                f"latents are of all heads, which do not split into {groups} head groups: take a schedule that moves "
                f"whole keys and values, such as 'ring', or 'auto'"
            )
        uneven = groups % self.kv_heads if groups > self.kv_heads else self.kv_heads % groups
        if self.q_heads % groups or uneven:
            raise ConfigurationError(
                f"{self.q_heads} query heads over {self.kv_heads} kv heads do not split into {groups} equal head groups"
            )


@dataclass(frozen=True)
class Request:
    """One kind of attention call, as this rank sees it.

    training: gradients are enabled. differentiable: an input wants some, also where they are not enabled now, as in a
    reentrant checkpoint; ranks may differ in that. softcap: of scores; 0: none. layout: by which the tensors are
    cut; None: the context's. wants_lse: the caller does, or sinks, or a backward pass. backward: a plan is for both
    passes.
    """

    workload: Workload
    mask: Mask
    scale: float
    training: bool
    device: torch.device
    differentiable: bool = field(default=False, compare=False)
    softcap: float = 0.0
    layout: Layout | None = None
    wants_lse: bool = True
    backward: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "backward", self.training or self.differentiable)


# ---------- lengths


class LinearRequest(NamedTuple):
    """One linear layer, or collective, over a group: its schedule, and tokens and features of all ranks together."""

    operator: str
    schedule: str
    tokens: int
    features: int
    width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def workload(self) -> Workload:
        """The sizes as schedules know them: rows are q, columns are kv, with one head of the width."""
        return Workload(1, self.tokens, self.features, 1, 1, self.width, self.dtype)


class Held(NamedTuple):
    """The tokens of q and of kv that a rank holds."""

    q: int
    kv: int


class Lengths:
    """Lengths that one rank of a context knows, by the parts of them that it held."""

    def __init__(self, layout: str | Layout, rank: int, world_size: int) -> None:
        self._layout, self._rank, self._world_size = layout, rank, world_size
        self._known: dict[int | Held, tuple[int, int]] = {}
        self._parts: dict[int, tuple[int, ...]] = {}
        if isinstance(layout, Layout) and layout.world_size == world_size:
            self.note(layout.length)

    def note(self, length: int) -> None:
        """Note that the rank was given its part of a sequence of this length."""
        part = self.parts(length)[self._rank]
        for held in [each for each in self._known if isinstance(each, Held) and part in each]:
            del self._known[held]  # what is sharded now counts more than what ranks found before
        self.learn(part, (length, length))

    def learn(self, part: int | Held, lengths: tuple[int, int]) -> None:
        """Note the lengths of q and kv of a call, as all ranks found them, by what this rank holds."""
        self._known.pop(part, None)
        self._known[part] = lengths
        if len(self._known) > MOST_KNOWN:
            self._known.pop(next(iter(self._known)))

    def of(self, held: Held) -> tuple[int, int]:
        """Return the lengths that q and kv are taken to have."""
        if (found := self._known.get(held)) is not None:
            return found
        q, kv = (self._known.get(part, (part * self._world_size,))[0] for part in held)
        return q, kv

    def parts(self, length: int) -> tuple[int, ...]:
        """Return the tokens that each rank holds of a sequence of this length. Raises ConfigurationError."""
        if length not in self._parts:
            if len(self._parts) >= MOST_KNOWN:
                self._parts.clear()
            self._parts[length] = make_layout(self._layout, self._world_size, length).local_lengths
        return self._parts[length]

    def check(self, held: Held, lengths: tuple[int, int]) -> None:
        """Raise ConfigurationError unless these are this rank's parts of sequences of these lengths."""
        called = self._layout if isinstance(self._layout, str) else self._layout.name
        for name, part, length in zip(("q", "k and v"), held, lengths, strict=True):
            own = self.parts(length)[self._rank] if length else None
            if own is None:
                raise ConfigurationError(
                    f"rank {self._rank} holds no token of {name}, and layout {called!r} makes no parts such as the "
                    f"ranks hold: {ADVICE}"
                )
            if part != own:
                raise ConfigurationError(
                    f"of {length} positions layout {called!r} gives rank {self._rank} {own} tokens of {name}, but it "
                    f"holds {part}: {ADVICE}"
                )


def agreed_lengths(
    descriptions: Sequence[Fields], held: Sequence[Held | None], of: Lengths, refused: str
) -> Held | None:
    """Return the lengths of q and kv of a call of which ranks differ in nothing else; None: there are no others.

    descriptions, held: of all ranks. refused: the field of those that refuse; for another reason, unless they say what
    they hold.
    """
    parts = [each for each in held if each is not None]
    others = [_without_lengths(each) for each in descriptions if refused not in each]
    same = {each["layout"] for each in descriptions if "layout" in each}
    if len(parts) < len(held) or len(same) > 1 or any(each != others[0] for each in others):
        return None
    lengths = Held(sum(part.q for part in parts), sum(part.kv for part in parts))
    if all(tuple(each[name] for name in OF_LENGTHS) == tuple(map(str, lengths)) for each in descriptions):
        return None  # which is what all took them for
    try:
        by_side = zip(lengths, zip(*parts, strict=True), strict=True)
        fits = all(of.parts(length) == tuple(own) for length, own in by_side)
    except ConfigurationError:
        return None
    return lengths if fits else None


def _without_lengths(fields: Fields) -> Fields:
    return {name: value for name, value in fields.items() if name not in (*OF_LENGTHS, CUT)}
