"""Rates of a kernel on this machine's device, measured once (`tokenring rates`) and kept.

A table is of one device model, kernel, dtype and head dimension. The planner takes it where it finds one; else
it computes with published figures. It never measures by itself: a plan is the same whenever it is made.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenring.errors import ConfigurationError
from tokenring.ir.schedule_data import PASSES
from tokenring.tables.kept_files import cache_folder, keep_document
from tokenring.tables.launching import Launching
from tokenring.tables.rates import Rates

FORMAT, VERSION = "tokenring-rates/1", 1  # a table without a format is read as well


@dataclass(frozen=True)
class KernelKey:
    """The subject of a table of rates.

    device: the model's name, as torch or the operating system gives it; a CPU's with its number of threads.
    """

    device: str
    kernel: str
    dtype: str
    head_dim: int
    torch: str

    @property
    def file_name(self) -> str:
        """The file's name in the cache."""
        return f"rates-{hashlib.sha256(repr(self).encode()).hexdigest()[:16]}.json"

    def __str__(self) -> str:
        return f"{self.kernel} on {self.device}, {self.dtype}, head dim {self.head_dim}, torch {self.torch}"


# ---------- keeping


def keep(rates: Rates, key: KernelKey, environment: Mapping[str, str]) -> Path | None:
    """Write a table into the user's cache; return the file, or None if there is no home.

    Raises ConfigurationError if it cannot be written.
    """
    return keep_document(key.file_name, to_json(rates, key), environment)


def to_json(rates: Rates, key: KernelKey) -> str:
    """Return a table as the JSON text that read_table reads."""
    document = {"format": FORMAT, "version": VERSION, "key": asdict(key), "rates": asdict(rates)}
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
    """Read a table that was kept. Raises ConfigurationError if the file cannot be read or is no table of rates."""
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
            f"{str(path)!r} is no table of rates ({error}): make one with `tokenring rates`"
        ) from None
