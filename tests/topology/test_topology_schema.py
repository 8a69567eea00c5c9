"""The page on the JSON against the types and against documents."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from tokenring.errors import TopologyError
from tokenring.topology.model import facts
from tokenring.topology.model.graph import BandwidthSource
from tokenring.topology.model.schema import FORMAT, VERSION, from_json, to_json
from tokenring.topology.model.verdict import Class, Confidence
from tokenring.topology.sources import read

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "topology"
PAGE = (ROOT / "docs" / "topology-json.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`\"?([\w-]+)\"?`", PAGE)) | set(re.findall(r"\w+", " ".join(re.findall(r"`\{(.*?)\}`", PAGE))))


def document(name: str) -> dict[str, object]:
    made: dict[str, object] = json.loads(to_json([read((DATA / name).read_text(encoding="utf-8"), name)]))
    return made


def test_every_word_is_on_the_page() -> None:
    kinds = [facts.Device, facts.Link, facts.Measurement, facts.Note, facts.SourceOrigin, facts.Facts]
    words = {field.name for kind in kinds for field in fields(kind)}
    words |= {*get_args(Class), *facts.LINK_KINDS, *get_args(facts.DeviceKind), *get_args(facts.Coverage)}
    words |= {*get_args(Confidence), *get_args(BandwidthSource), FORMAT}
    assert words - NAMED == set()


@pytest.mark.parametrize("name", ["npu-910b.txt", "nccl-switch.xml", "nvidia-pairs-spaces.txt"])
def test_documents_have_the_keys_of_the_page(name: str) -> None:
    made = document(name)
    assert list(made) == ["format", "version", "verdict", "devices", "links", "facts"]
    assert made["version"] == VERSION
    for part in ("verdict", "devices", "links"):
        entries = made[part] if isinstance(made[part], list) else [made[part]]
        assert isinstance(entries, list) and entries
        assert {key for entry in entries for key in entry} <= NAMED
    links = made["links"]
    assert isinstance(links, list)
    assert all(list(link) == ["a", "b", "kind", "count", "bandwidth_gbs", "source", "switched"] for link in links)


@pytest.mark.parametrize("version", [0, 2, "1", 1.5, True, None, [1]])
def test_other_versions_are_refused(version: object) -> None:
    made = document("npu-910b.txt") | {"version": version}
    with pytest.raises(TopologyError, match=r"1:1: tokenring-topology version .*: this tokenring reads version 1"):
        from_json(json.dumps(made))


def test_a_verdict_cannot_be_changed_alone() -> None:
    made = document("npu-910b.txt")
    made["verdict"] = {"class": "switch"}
    assert json.loads(to_json(from_json(json.dumps(made))))["verdict"]["class"] == "full-mesh"
