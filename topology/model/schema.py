"""A topology as a JSON document (docs/topology.md), with the facts from which all else in it follows again."""

from __future__ import annotations

import json
import re
import types
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import LINK_KINDS, MAX_DEVICES, Facts
from tokenring.topology.model.graph import Edge, merge
from tokenring.topology.model.sanity import LARGEST, MOST, is_amount
from tokenring.topology.model.verdict import Verdict, classify

FORMAT = "tokenring-topology"
VERSION = 1
MAX_CHARACTERS = 256 << 20  # a thousand accelerators have half a million links, of some 200 characters each
INDENTED_LINKS = 20_000  # up to so many; above, indentation is half of the file
HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")  # which no file can hold, but JSON can


def to_json(facts: list[Facts]) -> str:
    """Return the document of some facts: verdict, devices, links, and the facts themselves."""
    graph = merge(facts)
    document = {
        "format": FORMAT,
        "version": VERSION,
        "verdict": _verdict(classify(graph)),
        "devices": [_known(device) for device in graph.devices],
        "links": [_link(edge) for edge in graph.edges],
        "facts": [_known(each) for each in facts],
    }
    indent, separators = (1, None) if len(graph.edges) <= INDENTED_LINKS else (None, (",", ":"))
    return json.dumps(document, indent=indent, separators=separators, ensure_ascii=False) + "\n"


def is_document(text: str) -> bool:
    """Return whether a text looks like a document of a topology."""
    return text.lstrip()[:1] == "{" and f'"{FORMAT}"' in text  # anywhere: other tools sort keys


def from_json(text: str, file: str | None = None) -> list[Facts]:
    """Read the facts of a document; its verdict and links follow from them anew.

    Raises TopologyError for a text that is no such document, or of another version, or that has what cannot be.
    """
    document = load_json(text, file)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise TopologyError(f"this is not a {FORMAT} document", 1, 1, file)
    version = document.get("version")
    if version != VERSION or isinstance(version, bool):
        raise TopologyError(
            f"{FORMAT} version {str(version)[:40]!r}: this tokenring reads version {VERSION}", 1, 1, file
        )
    facts: list[Facts] = _decoded(list[Facts], document.get("facts"), "facts", file)
    for number, each in enumerate(facts):
        _check_ids(each, f"facts[{number}]", file)
        _check_values(each, f"facts[{number}]", file)
    return facts


def load_json(text: str, file: str | None = None) -> object:
    """Read JSON. Raises TopologyError with line and column."""
    if len(text) > MAX_CHARACTERS:
        raise TopologyError(f"a document of {len(text)} characters is too long", file=file)

    def no_constant(word: str) -> NoReturn:
        raise ValueError(f"{word} is no JSON")

    try:
        found = json.loads(text, parse_constant=no_constant)
        if HALF_CHARACTER.search(text):
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError as error:
        raise TopologyError(f"broken JSON: {error.object[error.start]!a} is half a character", 1, 1, file) from None
    except json.JSONDecodeError as error:
        raise TopologyError(f"broken JSON: {error.msg}", error.lineno, error.colno, file) from None
    except RecursionError:
        raise TopologyError("JSON nested too deep", 1, 1, file) from None
    except ValueError as error:
        raise TopologyError(f"broken JSON: {str(error)[:100]}", 1, 1, file) from None


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "class": verdict.name,
        "confidence": verdict.confidence,
        "evidence": list(verdict.evidence),
        "warnings": list(verdict.warnings),
        "islands": [{"members": list(island.members), "shape": island.shape} for island in verdict.islands],
        "inside": {host: _verdict(inner) for host, inner in verdict.inside},
    }


def _link(edge: Edge) -> dict[str, Any]:
    named = {"a": edge.a, "b": edge.b, "kind": edge.kind, "count": edge.count, "bandwidth_gbs": edge.bandwidth_gbs}
    return named | {"source": edge.source, "switched": edge.switched}


def _known(value: Any) -> Any:
    """Return a dataclass as an object, without fields that are None or empty."""
    if is_dataclass(value):
        given = ((name, inner) for name, inner in vars(value).items() if inner is not None and inner != ())
        return {name: inner if type(inner) in (str, int, bool, float) else _known(inner) for name, inner in given}
    return [_known(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _decoded(wanted: Any, value: Any, where: str, file: str | None) -> Any:
    """Return a value as the type that is wanted. Raises TopologyError, which says where it is not."""
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin in (list, tuple):
        if isinstance(value, list):
            made = [_decoded(inner[0], each, f"{where}[{i}]", file) for i, each in enumerate(value)]
            return made if origin is list else tuple(made)
    elif origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        return _decoded(inner[0], value, where, file)
    elif origin is Literal:
        if isinstance(value, str) and value in inner:
            return value
    elif isinstance(wanted, type) and is_dataclass(wanted):
        if isinstance(value, dict):
            return _decoded_dataclass(wanted, value, where, file)
    elif wanted is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MOST:
            return float(value)
    elif isinstance(value, wanted) and not (wanted is int and (isinstance(value, bool) or abs(value) >= LARGEST)):
        return value
    raise TopologyError(f"{where} is {_short(value)}, expected {_name(wanted)}", 1, 1, file)


@cache  # resolving them takes longer than all the rest
def _hints(wanted: type) -> dict[str, tuple[Any, tuple[type, ...]]]:
    """Return each field's type, and the types of which any value will do."""
    hints = get_type_hints(wanted)
    found = {}
    for each in fields(wanted):
        hint = hints[each.name]
        inner = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        found[each.name] = hint, tuple(kind for kind in (str, bool, types.NoneType) if kind in inner)
    return found


def _decoded_dataclass(wanted: type, value: dict[str, Any], where: str, file: str | None) -> Any:
    hints = _hints(wanted)
    if unknown := sorted(value.keys() - hints.keys()):
        raise TopologyError(f"{where} has {unknown[0][:40]!r}, which means nothing to us", 1, 1, file)
    given = {
        name: value[name] if type(value[name]) in sure else _decoded(hint, value[name], f"{where}.{name}", file)
        for name, (hint, sure) in hints.items()
        if name in value
    }
    try:
        return wanted(**given)
    except TypeError:
        raise TopologyError(f"{where} lacks a part of a {wanted.__name__}", 1, 1, file) from None


def _check_ids(facts: Facts, where: str, file: str | None) -> None:
    if len(facts.devices) > MAX_DEVICES:
        raise TopologyError(f"{where} has {len(facts.devices)} devices; at most {MAX_DEVICES}", 1, 1, file)
    known = {device.id for device in facts.devices}
    if len(known) < len(facts.devices):
        raise TopologyError(f"{where}.devices: two have one id", 1, 1, file)
    ends = [end for link in facts.links for end in (link.a, link.b)]
    ends += [end for each in facts.measurements for end in (each.a, each.b)]
    for end in ends:
        if end not in known:
            raise TopologyError(f"{where} names {end[:40]!r}, which is not one of its devices", 1, 1, file)


def _check_values(facts: Facts, where: str, file: str | None) -> None:
    for link in facts.links:
        if link.kind not in LINK_KINDS:
            raise TopologyError(f"{where} has a link of kind {link.kind[:40]!r}, which we do not know", 1, 1, file)
        if link.a == link.b:
            raise TopologyError(f"{where} has a link from {link.a[:40]!r} to itself", 1, 1, file)
    numbers = [number for link in facts.links for number in (link.count, link.bandwidth_gbs)]
    numbers += [number for each in facts.measurements for number in (each.gbs, each.both_gbs)]
    numbers += [device.gbs for device in facts.devices]
    if wrong := [number for number in numbers if number is not None and not is_amount(number)]:
        raise TopologyError(f"{where} has {wrong[0]:g} of links or GB/s: what is unknown is left out", 1, 1, file)


def _name(wanted: Any) -> str:
    if get_origin(wanted) is Literal:
        return f"one of {', '.join(map(repr, get_args(wanted)))}"
    return getattr(wanted, "__name__", str(wanted))


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."
