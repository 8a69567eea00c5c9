"""Whatever --save writes, --from reads, to the same topology: dumps, some with figures that cannot be, and others."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from broken_dumps import DATA, fixtures
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenring.cli.main import main
from tokenring.errors import TopologyError
from tokenring.gc_pause import no_collection
from tokenring.topology.model.facts import LINK_KINDS, Device, Facts, Link, Measurement, Note
from tokenring.topology.model.graph import merge
from tokenring.topology.model.sanity import sound
from tokenring.topology.model.schema import from_json, to_json
from tokenring.topology.model.verdict import classify
from tokenring.topology.probing.files import read_file
from tokenring.topology.sources import read

REPO = Path(__file__).resolve().parents[2]
FOLDERS = ("topology", "ascend/fixtures")
FIGURE = re.compile(r"(?<![\w.])-?[0-9]+(?:\.[0-9]+)?")
STRANGE = ("0", "0.00", "-1", "1e30", "nan", "inf", "9" * 20, "0.0000001", "4096", "1")


def shared() -> Path | None:
    """`../shared` of a checkout, or of the main one where this is a worktree of it."""
    places = [REPO.parent]
    if (git := REPO / ".git").is_file():  # "gitdir: CHECKOUT/.git/worktrees/NAME"
        places.append(Path(git.read_text().partition(":")[2].strip()).parents[3])
    return next((place / "shared" for place in places if (place / "shared/topology").is_dir()), None)


def dumps() -> Iterator[Path]:
    """Every file of third parties; none where there are none."""
    root = shared()
    for folder in FOLDERS if root else ():
        assert root is not None
        yield from (path for path in sorted((root / folder).rglob("*")) if path.is_file())


def same_again(facts: list[Facts]) -> None:
    again = from_json(to_json(facts))
    assert again == facts
    assert merge(again) == merge(facts)
    assert classify(merge(again)) == classify(merge(facts))


def test_every_dump() -> None:
    seen = 0
    for path in [*dumps(), *sorted(DATA.iterdir())]:
        try:
            facts = read_file(str(path))
        except TopologyError:
            continue
        same_again(facts)
        seen += 1
    assert seen > 100


def strange(text: str, chance: random.Random) -> str:
    """A dump with some of its figures exchanged for such as cannot be."""
    for _ in range(chance.randint(1, 6)):
        found = list(FIGURE.finditer(text))
        if found:
            each = chance.choice(found)
            text = text[: each.start()] + chance.choice(STRANGE) + text[each.end() :]
    return text


@pytest.mark.parametrize("seed", range(4))
def test_dumps_with_figures_that_cannot_be(seed: int) -> None:
    chance, texts = random.Random(seed), [text for text in fixtures() if len(text) < 60_000]
    read_at_all = 0
    for _ in range(80):
        text = strange(chance.choice(texts), chance)
        try:
            facts = [read(text)]
        except TopologyError:
            continue
        same_again(facts)
        read_at_all += 1
    assert read_at_all > 20


P2P = """\
Device: 0, NVIDIA A100-SXM4-80GB, pciBusID: 7, pciDeviceID: 0, pciDomainID:0
Device: 1, NVIDIA A100-SXM4-80GB, pciBusID: f, pciDeviceID: 0, pciDomainID:0
Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)
   D\\D     0      1
     0 1290.00   0.00
     1   0.00 1290.00
"""
NOWHERE = """\
<system version="1"><cpu numaid="0"><pci busid="0000:07:00.0" class="0x030200"><gpu dev="0" sm="80" rank="0" gdr="1">
<nvlink target="0000:99:00.0" count="0" tclass="0x030200"/></gpu></pci></cpu></system>
"""


@pytest.mark.parametrize("text", [P2P, NOWHERE], ids=["0.00 GB/s", "0 links to no device"])
def test_the_command_reads_what_it_saves(text: str, tmp_path: Path) -> None:
    dump, saved = tmp_path / "dump.txt", tmp_path / "saved.json"
    dump.write_text(text, encoding="utf-8")
    said = [StringIO(), StringIO(), StringIO()]
    assert main(["topology", "--from", str(dump), "--save", str(saved)], said[0], said[0], StringIO()) == 0
    assert main(["topology", "--from", str(dump)], said[1], said[1], StringIO()) == 0
    assert main(["topology", "--from", str(saved)], said[2], said[2], StringIO()) == 0
    assert said[1].getvalue() == said[2].getvalue()


def test_what_cannot_be_is_said() -> None:
    facts = read(P2P)
    assert [each.gbs for each in facts.measurements] == [None, None]
    assert "GPU0 to GPU1: 0 GB/s is taken for unknown" in [note.text for note in facts.notes]


NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)
AMOUNTS = st.none() | st.floats() | st.integers(-5, 1 << 60).map(float)
KINDS = st.sampled_from(["accelerator", "nic", "switch"])
INDICES = st.none() | st.integers(0, 1 << 60)
DEVICES = st.builds(Device, st.sampled_from(["a", "b", "c", "d"]), KINDS, index=INDICES, gbs=AMOUNTS,
                    host=st.none() | NAMES, model=NAMES)  # fmt: skip
ENDS = st.sampled_from(["a", "b", "c", "d", "e"])
LINKS = st.builds(Link, ENDS, ENDS, st.sampled_from([*LINK_KINDS, "string"]), st.none() | st.integers(-3, 1 << 60),
                  AMOUNTS, st.booleans(), st.sampled_from([None, "up", "down"]), st.none() | NAMES)  # fmt: skip
MEASURED = st.builds(Measurement, ENDS, ENDS, AMOUNTS, AMOUNTS, AMOUNTS, st.none() | NAMES, AMOUNTS)
NOTES = st.builds(Note, NAMES, st.none() | st.integers(1, 9), role=st.sampled_from(["remark", "evidence", "doubt"]))
FACTS = st.builds(
    Facts, st.sampled_from(["links", "pcie", "devices"]), st.lists(DEVICES, max_size=5).map(tuple),
    st.lists(LINKS, max_size=8).map(tuple), st.lists(MEASURED, max_size=4).map(tuple),
    st.lists(NOTES, max_size=3).map(tuple),
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(FACTS.map(sound), min_size=1, max_size=3))
def test_generated_facts(facts: list[Facts]) -> None:
    same_again(facts)


def test_names_that_are_no_text(tmp_path: Path) -> None:
    """A file's name may have bytes that are no characters; it is the host's, where there are several."""
    texts = (DATA / "nvidia-mesh.txt").read_bytes()
    files = [tmp_path / "a\udcff.txt", tmp_path / "b\udcfe.txt"]
    for file in files:
        file.write_bytes(texts)
    saved = tmp_path / "saved.json"
    out = StringIO()
    assert main(["topology", "--from", *map(str, files), "--save", str(saved)], out, out, StringIO()) == 0, out
    assert main(["topology", "--from", str(saved)], out, out, StringIO()) == 0, out.getvalue()


def matrix(devices: int) -> str:
    names = [f"GPU{i}" for i in range(devices)]
    rows = ("\t".join([a, *("X" if a == b else "NV18" for b in names), "0-63", "0"]) for a in names)
    return "\n".join(["\t" + "\t".join([*names, "CPU Affinity", "NUMA Affinity"]), *rows, ""])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_thousand_gpus() -> None:
    with no_collection():  # as in the command
        assert classify(merge([read(matrix(1024))])).name == "switch"
        facts = [read(matrix(256))]
        assert from_json(to_json(facts)) == facts


def test_a_thousand_gpus_as_json() -> None:
    words = ",".join(['"SYS"'] * 1024)
    rows = []
    for i in range(1024):
        row = words.split(",")
        row[i] = '"X"'
        rows.append(f"[{','.join(row)}]")
    ids = ",".join(f'"{i}"' for i in range(1024))
    facts = read(f'{{"ids": [{ids}], "matrix": [{",".join(rows)}]}}')
    assert len(facts.links) == 1024 * 1023 // 2
