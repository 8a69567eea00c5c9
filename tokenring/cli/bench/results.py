"""Cases and reports of a benchmark; as JSON in docs/bench.md. Seconds throughout."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from tokenring.emulate.shapes import Shape

FORMAT, VERSION = "tokenring-bench", 1
CACHED_FORMAT = "tokenring-bench-cached"
OURS, ONE, PEER = "tokenring", "one process", "peer"  # kinds of entries
MEASURED, WRONG, SKIPPED, MISSING, FAILED = "measured", "wrong", "skipped", "not installed", "failed"
ERROR_LIMITS = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}  # above, a result is wrong


def with_shape(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a case that asdict gave, with the shape of emulated links, if there is one."""
    shape = values.get("emulate")
    return {**values, "emulate": None if shape is None else Shape(**shape)}


@dataclass(frozen=True)
class RaceCase:
    """A case of the benchmark: the call that is computed, by which schedules and peers, and how often."""

    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    mask: str
    batch: int
    backward: bool
    layout: str
    transport: str
    pieces: int | None
    schedules: list[str]
    peers: list[str]
    rounds: int
    emulate: Shape | None = None  # the links between ranks, where they are emulated
    compute_tflops: float | None = None  # of each rank, where kernels sleep instead of computing
    value_dim: int | None = None  # elements of a head of v; None: head_dim

    @property
    def of_values(self) -> int:
        """The elements of a head of v and out."""
        return self.head_dim if self.value_dim is None else self.value_dim

    def to_dict(self) -> dict[str, Any]:
        """Return the values by name, as reports have them: value_dim only where it was said."""
        return {name: value for name, value in asdict(self).items() if name != "value_dim" or value is not None}

    @classmethod
    def of(cls, values: dict[str, Any]) -> RaceCase:
        """Return the case whose values asdict gave."""
        return cls(**with_shape(values))


@dataclass(frozen=True)
class CachedCase:
    """A case of a cached step: new tokens over cached ones in one layer, forward, by which ways, and how often."""

    tokens: int
    cached: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    latents: bool
    dtype: str
    batch: int
    transport: str
    schedules: list[str]
    rounds: int
    emulate: Shape | None = None
    compute_tflops: float | None = None

    @property
    def backward(self) -> bool:
        """False: a cache is for inference."""
        return False

    @property
    def of_values(self) -> int:
        """The elements of a head of v and out."""
        return self.value_dim

    @property
    def layout(self) -> str:
        """The layout of what is cached, and of new tokens that are each rank's own."""
        return "contiguous"

    def to_dict(self) -> dict[str, Any]:
        """Return the values by name, as reports have them."""
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> CachedCase:
        """Return the case whose values asdict gave."""
        return cls(**with_shape(values))


@dataclass(frozen=True)
class RaceMachine:
    """The machines on which it ran. `cores` are those that rank 0 may use."""

    processor: str
    cores: int
    hosts: int
    ranks: int
    torch: str


@dataclass(frozen=True)
class Entry:
    """One candidate: its times in each round (the slowest rank's), or why it has none.

    forward_s: until the forward pass was done; call_s: until all was done. errors: relative Frobenius
    errors by result; NaN where a result is not a number. wire_s: on emulated links, what the most loaded
    wire (`wire`) of each pass needs for its bytes alone.
    """

    name: str
    kind: str
    what: str
    version: str | None
    status: str
    reason: str | None = None
    forward_s: list[float] = field(default_factory=list)
    call_s: list[float] = field(default_factory=list)
    link_bytes: int | None = None
    errors: dict[str, float] = field(default_factory=dict)
    wire: str | None = None
    wire_s: float | None = None

    @property
    def was_timed(self) -> bool:
        """True if the candidate has times."""
        return bool(self.call_s)

    @property
    def median_s(self) -> float:
        """The median of the whole call's times."""
        return statistics.median(self.call_s)

    @property
    def forward_median_s(self) -> float:
        """The median of the forward pass's times."""
        return statistics.median(self.forward_s)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """The first and the third quartile of the whole call's times."""
        if len(self.call_s) < 2:
            return self.call_s[0], self.call_s[0]
        first, _, third = statistics.quantiles(self.call_s, n=4, method="inclusive")
        return first, third

    @property
    def worst_error(self) -> float:
        """The largest error; NaN, which is worse than any number, also for what was not compared."""
        return max(self.errors.values(), key=lambda error: (math.isnan(error), error), default=math.nan)


@dataclass(frozen=True)
class RaceReport:
    """A whole report of a benchmark.

    `reference`: the dtype of what results were compared with (None: they were not); `notes`: what else to know.
    """

    case: RaceCase
    machine: RaceMachine
    entries: list[Entry]
    reference: str | None
    notes: list[str]
    form: ClassVar[str] = FORMAT
    case_of: ClassVar[Any] = RaceCase.of

    @property
    def ranked(self) -> list[Entry]:
        """The entries, the fastest first; then those without times."""
        return sorted(self.entries, key=lambda entry: entry.median_s if entry.was_timed else math.inf)

    @property
    def base(self) -> Entry | None:
        """The entry to which ratios refer: the fastest right peer; else the fastest right one of ours; None: none."""
        for kind in (PEER, OURS):
            right = [entry for entry in self.ranked if entry.kind == kind and entry.status == MEASURED]
            if right:
                return right[0]
        return None

    def ratio(self, entry: Entry) -> float | None:
        """Return the median as a multiple of the base's; None where there is no right result to compare."""
        return entry.median_s / self.base.median_s if self.base and entry.status == MEASURED else None

    def complaint(self) -> str | None:
        """Return the sentence about those of our entries that are wrong; None: none is."""
        ours = [entry for entry in self.entries if entry.kind == OURS]
        for entry in ours:
            if entry.status in (WRONG, FAILED):
                return f"{entry.name}: {entry.status}: {entry.reason}"
        if ours and not any(entry.was_timed for entry in ours):
            return f"no schedule could run; {ours[0].name}: {ours[0].reason}"
        return None

    def reasons(self) -> list[str]:
        """Return why entries have no times, or wrong ones; one text for all that share a reason."""
        names: dict[tuple[str, str | None], list[str]] = {}
        for entry in self.entries:
            if entry.status != MEASURED:
                names.setdefault((entry.status, entry.reason), []).append(entry.name)
        return [f"{status}: {', '.join(found)}: {reason}" for (status, reason), found in names.items()]

    def to_json(self) -> str:
        """Return the report as JSON, with a format version; NaN is null."""
        values = {"format": self.form, "version": VERSION, **asdict(self), "case": self.case.to_dict()}
        for entry in values["entries"]:
            entry["errors"] = {name: _finite(error) for name, error in entry["errors"].items()}
        return json.dumps(values, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RaceReport:
        """Read the report that to_json wrote."""
        values: dict[str, Any] = json.loads(text)
        for entry in values["entries"]:
            entry["errors"] = {name: math.nan if error is None else error for name, error in entry["errors"].items()}
        return cls(
            cls.case_of(values["case"]),
            RaceMachine(**values["machine"]),
            [Entry(**entry) for entry in values["entries"]],
            values["reference"],
            values["notes"],
        )


@dataclass(frozen=True)
class CachedReport(RaceReport):
    """A whole report of ways to take a cached step."""

    case: CachedCase  # type: ignore[assignment]
    form: ClassVar[str] = CACHED_FORMAT
    case_of: ClassVar[Any] = CachedCase.of


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None
