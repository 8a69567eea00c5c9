"""Rates of a kernel on this machine's device, measured once (`tokenring rates`) and kept.

A table is of one device model, kernel, dtype and head dimension. The planner takes it where it finds one; else
it computes with published figures. It never measures by itself: a plan is the same whenever it is made.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tokenring.errors import ConfigurationError
from tokenring.ir.schedule_data import PASSES
from tokenring.tables.kept_files import cache_folder, keep_document
from tokenring.tables.launching import Launching
from tokenring.tables.rates import Rates

FORMAT, VERSION = "tokenring-rates", 1  # a table without a format is read as well


@dataclass(frozen=True)
class KernelKey:
    """The subject of a table of rates.

    device: the model's name, as torch or the operating system gives it; a CPU's with its number of threads.
    value_dim: the head dim of v where it is another than that of q and k; else None.
    """

    device: str
    kernel: str
    dtype: str
    head_dim: int
    torch: str
    value_dim: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.value_dim == self.head_dim:
            object.__setattr__(self, "value_dim", None)

    @property
    def file_name(self) -> str:
        """The file's name in the cache."""
        what = repr(self) + ("" if self.value_dim is None else f", {self.value_dim}")
        return f"rates-{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"

    def __str__(self) -> str:
        of_values = "" if self.value_dim is None else f" ({self.value_dim} of values)"
        return f"{self.kernel} on {self.device}, {self.dtype}, head dim {self.head_dim}{of_values}, torch {self.torch}"


# ---------- keeping


def keep(rates: Rates, key: KernelKey, environment: Mapping[str, str]) -> Path | None:
    """Write a table into the user's cache; return the file, or None if there is no home.

    Raises ConfigurationError if it cannot be written.
    """
    return keep_document(key.file_name, to_json(rates, key), environment)


def to_json(rates: Rates, key: KernelKey) -> str:
    """Return a table as the JSON text that read_table reads."""
    named = {name: value for name, value in asdict(key).items() if name != "value_dim" or value is not None}
    document = {"format": FORMAT, "version": VERSION, "key": named, "rates": asdict(rates)}
    return json.dumps(document, indent=2) + "\n"


def kept(key: KernelKey, environment: Mapping[str, str] | None = None) -> Rates | None:
    """Return the table that was kept for a key, or None if there is none that can be read."""
    folder = cache_folder(os.environ if environment is None else environment)
    if folder is None:
        return None
    try:
        found, rates = read_table(folder / key.file_name)
    except ConfigurationError:
        return None  # broken or of another version: as if there were none
    return rates if found == key else None


def read_table(path: Path) -> tuple[KernelKey, Rates]:
    """Read a table that was kept. Raises ConfigurationError if the file cannot be read or is not a table of rates."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["version"] != VERSION:
            raise ValueError(f"version {found['version']!r}, not {VERSION}")
        values = found["rates"]
        samples = {name: tuple((int(side), float(rate)) for side, rate in values[name]) for name in PASSES}
        launching = values.get("launching")  # older tables have none
        made = None if launching is None else Launching(**launching)
        return KernelKey(**found["key"]), Rates(**{**values, **samples, "launching": made})
    except OSError as error:
        raise ConfigurationError(f"cannot read rates from {str(path)!r}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{str(path)!r} is not a table of rates ({error}): make one with `tokenring rates`"
        ) from None
