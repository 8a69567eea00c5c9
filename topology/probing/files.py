"""Facts of machines out of files: dumps of tools, and saved topologies."""

from __future__ import annotations

from typing import BinaryIO

from tokenring.errors import ConfigurationError, TopologyError
from tokenring.topology.model.facts import Facts
from tokenring.topology.model.schema import MAX_CHARACTERS, from_json, is_document
from tokenring.topology.sources import read

MAX_BYTES = MAX_CHARACTERS  # ours may be longer than dumps: it has every link twice


def read_file(path: str) -> list[Facts]:
    """Read the facts of one file: a dump, or a saved topology.

    Raises ConfigurationError if the file cannot be read, TopologyError if it is too long, broken or of no known
    format.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"cannot read {path!r}: {error.strerror}") from None
    except ValueError:
        raise ConfigurationError(f"cannot read {path!r}: no such name can be") from None
    return _facts(raw, path)


def read_stream(file: BinaryIO, path: str) -> list[Facts]:
    """Read the facts of an open file. path: what errors call it. Raises TopologyError, as read_file does."""
    return _facts(file.read(MAX_BYTES + 1), path)


def _facts(raw: bytes, path: str) -> list[Facts]:
    if len(raw) > MAX_BYTES:
        raise TopologyError(f"a file of more than {MAX_BYTES >> 20} MB is too long", file=path)
    text = _decoded(raw)
    return from_json(text, path) if is_document(text) else [read(text, path)]


def _decoded(raw: bytes) -> str:
    """Decode UTF-8, or what Windows saves; bytes that are neither are replaced, and parsers will say."""
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return raw.decode("utf-16", "replace")
    return raw.decode("utf-8-sig", "replace")
