"""Times of messages over each transport between ranks such as these, measured once and kept.

`tokenring rates --transports` writes a table of one device model, domain, number of ranks and torch. Where "auto"
chooses a transport, rank 0 looks for one (`transport_choice`). A file that cannot be used is a note, never an error.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tokenring.errors import MOST_SAID, ConfigurationError, one_line
from tokenring.tables.kept_files import TRANSPORTS_MEASURED, cache_folder, keep_document
from tokenring.tables.rates import interpolate
from tokenring.tables.transport_choice import DOMAINS, PAIRS, Domain, Spread, choose, size_text, time_text

FORMAT, VERSION = "tokenring-transports", 1  # a table without a format is read as well


class Sample(NamedTuple):
    """A message's bytes, and the quartiles of the seconds of a step in which each rank sends one and receives one."""

    nbytes: int
    low: float
    median: float
    high: float


@dataclass(frozen=True)
class TransportKey:
    """The subject of a table of transports.

    device: the model's name; a CPU's with its cores, which ranks share.
    """

    kind: str
    device: str
    domain: Domain
    ranks: int
    torch: str

    @property
    def file_name(self) -> str:
        """The file's name in the cache."""
        return TRANSPORTS_MEASURED.replace("*", hashlib.sha256(repr(self).encode()).hexdigest()[:16])

    def __str__(self) -> str:
        return f"{self.ranks} ranks on {self.device}, {DOMAINS[self.domain]}, torch {self.torch}"


@dataclass(frozen=True)
class Transfers:
    """Samples of each transport, of rising sizes.

    Raises ConfigurationError for samples that nobody can have measured.
    """

    samples: Mapping[str, tuple[Sample, ...]]

    def __post_init__(self) -> None:
        for name, found in self.samples.items():
            sizes = [each.nbytes for each in found]
            times = all(0 < each.low <= each.median <= each.high < math.inf for each in found)
            if not found or sizes != sorted(set(sizes)) or sizes[0] < 1 or not times:
                raise ConfigurationError(
                    f"{name}: {found!r} is not (bytes, seconds of the lower quartile, the median, the upper one), "
                    f"with rising bytes"
                )

    @cached_property
    def sizes(self) -> Sequence[int]:
        """The sizes of the messages that were measured, in bytes, rising."""
        return sorted({each.nbytes for found in self.samples.values() for each in found})

    def seconds(self, transport: str, nbytes: int) -> Spread | None:
        """Return the seconds of a message of `nbytes` bytes; None if the transport was not measured.

        They are interpolated straight between neighbours in the logarithms; below the least size they are those
        of the least size, above the largest they grow at its rate.
        """
        found = self.samples.get(transport)
        if found is None:
            return None
        above = max(1.0, nbytes / found[-1].nbytes)
        return Spread(*(above * interpolate([(each.nbytes, each[at]) for each in found], nbytes) for at in (1, 2, 3)))


def table(key: TransportKey, transfers: Transfers) -> list[str]:
    """Return the table as lines of text: one for each size, and which transport is taken from which size on."""
    names = list(transfers.samples)
    lines = [f"{'message':>7}" + "".join(f"  {f'{name}, µs':>24}" for name in names)]
    for size in transfers.sizes:
        found = [transfers.seconds(name, size) for name in names]
        micros = [[time_text(each).removesuffix(" µs") for each in times] for times in found if times]
        cells = [f"{median} ({low} to {high})" for low, median, high in micros]
        lines.append(f"{size_text(size):>7}" + "".join(f"  {cell:>24}" for cell in cells))
    return [*lines, "", taken(key, transfers)]


def taken(key: TransportKey, transfers: Transfers) -> str:
    """Return, as text, which transport is taken from which size on."""
    able = dict.fromkeys(PAIRS[key.kind])
    picks = [(size, choose(key.kind, key.domain, able, size, transfers).transport) for size in transfers.sizes]
    (_, first), *_ = picks
    runs = [(name, next(run)[0]) for name, run in groupby(picks, key=lambda pick: pick[1])]
    return f"taken: {first}" + "".join(f", {name} from {size_text(size)}" for name, size in runs[1:])


# ---------- keeping


def to_json(key: TransportKey, transfers: Transfers) -> str:
    """Return a table as the JSON text that from_json reads."""
    document = {"format": FORMAT, "version": VERSION, "key": asdict(key), "seconds": dict(transfers.samples)}
    return json.dumps(document, indent=2) + "\n"


def from_json(text: str) -> tuple[TransportKey, Transfers]:
    """Read a table from JSON. Raises ConfigurationError for a text that is no such table."""
    try:
        found = json.loads(text)
        if found["version"] != VERSION:
            raise ValueError(f"version {found['version']!r}, not {VERSION}")
        key = TransportKey(**found["key"])
        if key.kind not in PAIRS or key.domain not in DOMAINS:
            raise ValueError(f"it is of {key.kind!r} and {key.domain!r}")
        samples = {
            str(name): tuple(Sample(int(nbytes), *map(float, times)) for nbytes, *times in rows)
            for name, rows in found["seconds"].items()
        }
        return key, Transfers(samples)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ConfigurationError(f"this is not a table of transports ({one_line(error, MOST_SAID)})") from None


def keep(key: TransportKey, transfers: Transfers, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Write a table into the user's cache; return the file, or None if there is no home.

    Raises ConfigurationError if it cannot be written.
    """
    return keep_document(key.file_name, to_json(key, transfers), environment)


def kept(key: TransportKey, environment: Mapping[str, str] = os.environ) -> tuple[Transfers | None, str]:
    """Return the table that was kept for a key, or None; and why one that is there is not used, else ""."""
    folder = cache_folder(environment)
    if folder is None:
        return None, ""
    try:
        found, transfers = read(folder / key.file_name)
        if found != key:
            raise ConfigurationError(f"it is of {found}")
    except FileNotFoundError:
        return None, ""
    except ConfigurationError as error:
        return None, not_used(folder / key.file_name, error)
    return transfers, ""


def read(path: Path) -> tuple[TransportKey, Transfers]:
    """Read a table that was kept. Raises FileNotFoundError; ConfigurationError for a file that cannot be used."""
    try:
        return from_json(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigurationError(f"it cannot be read: {error.strerror}") from None


def not_used(path: Path, error: Exception) -> str:
    """Return the note on a file that is not used, and how to make another."""
    return f"{path} is not used: {error}; `tokenring rates --transports` makes another"


def all_kept(
    kind: str, key_of: Callable[[str, Domain, int], TransportKey], environment: Mapping[str, str] = os.environ
) -> Iterator[tuple[str, str]]:
    """Yield (ranks, contents) of each table for this machine's devices of a kind; (name, reason) of unusable ones.

    key_of: the key of this machine's table for a kind, a domain and a number of ranks.
    """
    folder = cache_folder(environment)
    for path in sorted(folder.glob(TRANSPORTS_MEASURED)) if folder is not None else ():
        try:
            key, transfers = read(path)
        except ConfigurationError as error:
            yield path.name, not_used(path, error)
            continue
        if key == key_of(kind, key.domain, key.ranks):
            yield f"{key.ranks} ranks, {DOMAINS[key.domain]}", f"{taken(key, transfers)}; {_medians(transfers)}"


def _medians(transfers: Transfers) -> str:
    """Return all medians in few words."""
    rows = [[transfers.seconds(name, size) for name in transfers.samples] for size in transfers.sizes]
    cells = ["/".join(f"{1e6 * each.median:.0f}" for each in row if each is not None) for row in rows]
    shown = ", ".join(f"{size_text(size)} {cell}" for size, cell in zip(transfers.sizes, cells, strict=True))
    return f"{'/'.join(transfers.samples)} in µs: {shown}"
