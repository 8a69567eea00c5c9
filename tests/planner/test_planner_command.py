"""`tokenring plan`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tokenring.cli.main import main
from tokenring.planner.choosing.plan import Plan
from tokenring.planner.machines.presets import PRESETS
from tokenring.topology.model.schema import to_json

pytestmark = pytest.mark.usefixtures("plans_kept")

DATA = Path(__file__).resolve().parents[1] / "data"
FEW = ("--seq", "4k", "--heads", "8", "--pass", "forward")
SMALL = ("--topology", "preset:a10-pix-4", *FEW)
TWO = ("--schedules", "ring,direct-kv")  # where it is not about which are looked at
GOLDEN = {
    "plan-a10": ("--topology", "preset:a10-pix-4", "--seq", "8k", "--heads", "8", "--kv-heads", "2", "--dtype", "fp16"),
    "plan-mi300x": ("--topology", "preset:mi300x-8", "--seq", "64k", "--heads", "6", "--mask", "full", *FEW[4:]),
}


def plan(*options: str) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    code = main(["plan", *options], out, err)
    return code, out.getvalue(), err.getvalue()


def printed(*options: str) -> str:
    code, out, err = plan(*options)
    assert (code, err) == (0, "")
    return out


@pytest.mark.parametrize("name", GOLDEN)
def test_text(name: str) -> None:
    assert printed(*GOLDEN[name]) == (DATA / f"{name}.txt").read_text(encoding="utf-8")


MESHES = {
    "atlas-800t-a2": "a ring uses 1 of the 7 links of each rank; direct schedules use all of them",
    "atlas-850": "a ring uses 1 of the 7 links of each rank",
    "atlas-800-910a": "a ring uses 1 of the 3 links of each rank",
    "atlas-800t-a2*2": "a ring uses 1 of the 7 links of each rank",
}


@pytest.mark.parametrize("name", MESHES)
def test_says_how_many_links_a_ring_uses(name: str) -> None:
    options = ("--seq", "4k", "--heads", "8", "--schedules", "ring", "--pass", "forward", "--dtype", "fp16")
    assert MESHES[name] in printed("--topology", f"preset:{name}", *options)


@pytest.mark.parametrize("name", ["atlas-a3", "hgx-h100", "a10-pix-4"])
def test_says_nothing_of_the_kind_where_ports_are_shared(name: str) -> None:
    options = ("--seq", "4k", "--heads", "16", "--schedules", "ring", "--pass", "forward")
    assert "a ring uses" not in printed("--topology", f"preset:{name}", *options)


def test_part_of_a_mesh_has_fewer_links() -> None:
    """Four ranks of an A2 mesh have three links each, and two have one: of that a ring uses all."""
    options = ("--topology", "preset:atlas-800t-a2", "--seq", "4k", "--heads", "8", "--schedules", "ring")
    assert "a ring uses 1 of the 3 links" in printed(*options, "--ranks", "4")
    assert "a ring uses" not in printed(*options, "--ranks", "2")


def test_all_shows_all() -> None:
    few, every = printed(*SMALL), printed(*SMALL, "--all")
    assert "more were simulated" in few or "more cannot win" in few
    assert "more were simulated" not in every
    assert len(every.splitlines()) > len(few.splitlines())


def test_json_is_a_plan() -> None:
    text = printed(*SMALL, "--json")
    assert Plan.from_json(text).name == json.loads(text)["name"] == json.loads(text)["candidates"][0]["name"]
    assert list(json.loads(text)["candidates"][0]) == [
        "name", "predicted_seconds", "compute_seconds", "exposed_seconds", "worst_link_bytes", "peak_bytes",
        "bound_seconds", "reason", "connections", "connection_bytes",
    ]  # fmt: skip


def test_saves(tmp_path: Path) -> None:
    text = printed(*SMALL, "--json", "--save", str(tmp_path / "plan.json"))
    assert (tmp_path / "plan.json").read_text(encoding="utf-8") == text
    assert Plan.load(tmp_path / "plan.json").schedule.verify()


def test_explains() -> None:
    text = printed(*SMALL, "--explain", "ring")
    for part in ("\nring: ", " × the lower bound\n", "lower bound ", "(into ", "\nforward: ", "0:GPU1>pcie-switch1: "):
        assert part in text
    assert "\nbackward: " not in text


@pytest.mark.parametrize("extra", [(), ("--explain", "ring")])
def test_draws_a_timeline(tmp_path: Path, extra: Sequence[str]) -> None:
    printed(*SMALL, *extra, "--timeline", str(tmp_path / "a.svg"))
    root = ElementTree.fromstring((tmp_path / "a.svg").read_text(encoding="utf-8"))
    assert root.tag.endswith("svg")
    assert "simulated on a10-pix-4, 4 ranks" in "".join(root.itertext())
    printed(*SMALL, *extra, "--timeline", str(tmp_path / "a.json"))
    events = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {event["pid"] for event in events if "pid" in event}
    assert any(event.get("ph") == "X" for event in events)


LARGE = ("--seq", "640k", "--heads", "64", "--kv-heads", "8")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--topology", "preset:hgx-h100*40", "--explain", "ring"), "--explain needs a schedule of 320 ranks"),
        (("--topology", "preset:hgx-h100*40", "--timeline", "a.svg"), "--timeline needs a schedule of 320 ranks"),
        (("--topology", "preset:hgx-h100*40", "--ranks", "316", "--seq", "316k"), "40, 316 ranks' cannot be"),
    ],
)
def test_refuses_what_would_take_hours(options: Sequence[str], says: str) -> None:
    """Rank by rank, or all of it written down, for more ranks than that is done for."""
    code, _, err = plan(*LARGE, *options)
    assert (code, err.count("\n")) == (2, 1)
    assert says in err


def test_draws_names_as_text(tmp_path: Path) -> None:
    """A topology's name may hold anything."""
    from nets import call, setting, workload

    import tokenring as tr
    from tokenring.cli.trace.predicted import drawn, timeline
    from tokenring.planner.choosing.auto import make
    from tokenring.planner.interconnects.interconnect import mesh_fabric, of_one_host
    from tokenring.planner.simulation.predict import predict

    asked = call(setting(of_one_host('<b> & "x" </svg>', mesh_fabric(2, 1.0)), workload(2, (2, 2), 64)), tr.Full())
    found = predict(make(asked, "ring"), asked.setting, record=True)
    made = timeline("ring", asked.setting, found)
    assert '<b> & "x" </svg>' in "".join(ElementTree.fromstring(drawn("a.svg", made)).itertext())
    assert json.loads(drawn("a.json", made))["traceEvents"]
    assert max(bar.ended for bar in made.bars) <= found.seconds * (1 + 1e-9)


def test_sweeps(tmp_path: Path) -> None:
    code, text, err = plan(*SMALL, *TWO, "--sweep", "seq=1k..4k", "--svg", str(tmp_path / "a.svg"))
    assert code == 0
    lines = text.splitlines()
    assert [line.split()[0] for line in lines] == ["tokens", "1k", "2k", "4k"]
    root = ElementTree.fromstring((tmp_path / "a.svg").read_text(encoding="utf-8"))
    words = [each.text for each in root.iter() if each.text]
    assert {"1k", "2k", "4k"} <= set(words)
    assert lines[1].split()[4] in words  # the winner at 1k
    assert all(line.startswith("planning for ") for line in err.splitlines())


def test_a_length_that_cannot_be_planned_for_loses_no_other() -> None:
    """64 tokens fit into so little memory, and no more."""
    code, text, _ = plan(*SMALL, "--sweep", "seq=64..256", "--memory-limit", "200k")
    assert code == 0
    _, first, *others = text.splitlines()
    assert first.split()[0] == "64" and "not planned" not in first
    assert [line.split()[:3] for line in others] == [[length, "not", "planned:"] for length in ("128", "256")]
    assert all("no schedule fits in 205 kB a rank" in line for line in others)
    code, _, err = plan(*SMALL, "--sweep", "seq=1k..2k", "--memory-limit", "200k")
    assert code == 2 and "no schedule fits in 205 kB a rank" in err


@pytest.mark.parametrize("stray", [("--json",), ("--save", "a.json"), ("--timeline", "a.svg"), ("--explain", "ring")])
def test_a_sweep_is_not_one_plan(stray: Sequence[str]) -> None:
    code, _, err = plan(*SMALL, "--sweep", "seq=1k..2k", *stray)
    assert code == 2
    assert f"{stray[0]} is for one plan, and --sweep makes one for every length: leave one out" in err


def test_part_of_a_topology() -> None:
    assert ": 2 ranks;" in printed(*SMALL, "--ranks", "2")
    text = printed(*SMALL, "--tp", "2")
    assert "4:4 heads × 128" in text
    assert ": 2 ranks (tensor parallelism 2);" in text


class TestRanksOfSeveralMachines:
    """--ranks of a preset that names one machine."""

    def test_a_multiple_is_so_many_over_their_nics(self) -> None:
        """As the preset of so many says it, with tensor parallelism after that; and the reason says what was taken."""
        few = ("--topology", "preset:a10-pix-4", "--seq", "4k", "--heads", "8", "--pass", "forward", "--tp", "4")
        asked, meant = printed(*few, "--ranks", "8"), printed(*few, "--topology", "preset:a10-pix-4*2")
        assert "on a10-pix-4*2, every 4th rank: 2 ranks (tensor parallelism 4);" in meant
        assert "; 8 ranks are 2 of a10-pix-4 over their NICs\n" in asked
        assert asked.replace("; 8 ranks are 2 of a10-pix-4 over their NICs", "") == meant

    def test_as_many_as_it_has_is_one(self) -> None:
        assert printed(*SMALL, "--ranks", "4") == printed(*SMALL)

    def test_of_several_it_is_the_first_so_many(self) -> None:
        several = ("--topology", "preset:a10-pix-4*2", *FEW)
        assert "on a10-pix-4*2, 4 ranks: 4 ranks;" in printed(*several, "--ranks", "4")
        assert plan(*several, "--ranks", "16")[0] == 2


def test_topologies_from_files(tmp_path: Path) -> None:
    (tmp_path / "saved.json").write_text(to_json(PRESETS["mi300x-8"].facts()), encoding="utf-8")
    text = printed("--topology", str(tmp_path / "saved.json"), *FEW, *TWO)
    assert "on full mesh: 8 ranks; published figures of AMD" in text
    text = printed("--topology", str(DATA / "topology" / "nvidia-switch.txt"), *FEW, *TWO, "--device", "h100-sxm")
    assert "on switch: 8 ranks; published figures of NVIDIA H100" in text
    assert "links of kind nvlink have no known bandwidth: 25 GB/s each is assumed" in text


def test_rates_that_are_asked_for() -> None:
    assert "100 TFLOP/s, as given" in printed(*SMALL, *TWO, "--tflops", "100")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--seq", "0"), "--seq 0: write a number from 1 to"),
        (("--seq", "8q"), "--seq 8q: write a number"),
        (("--seq", "900000000000G"), "--seq 900000000000G: write a number"),
        (("--memory-limit", "lots"), "--memory-limit lots: write a number"),
        (("--memory-limit", "1k"), "no schedule fits in 1.02 kB a rank; the smallest needs"),
        (("--topology", "preset:nothing"), "unknown preset 'preset:nothing'"),
        (("--device", "h9"), "unknown device 'h9'"),
        (("--tflops", "0"), "--tflops 0.0: give a rate above 0"),
        (("--tflops", "nan"), "--tflops nan: give a rate above 0"),
        (("--mask", "diagonal"), "unknown mask 'diagonal'"),
        (("--layout", "spiral"), "unknown layout 'spiral'"),
        (("--schedules", "spiral"), "unknown schedule 'spiral'"),
        (("--topology", "preset:mi300x-8", "--schedules", "relay"), "auto was restricted to relay"),
        (("--explain", "spiral"), "unknown schedule 'spiral'"),
        (("--explain", "ulysses", "--heads", "6"), "6 query heads over 6 kv heads do not split into 4"),
        (("--tp", "3"), "tensor parallelism of 3 does not divide 4 ranks"),
        (("--tp", "4", "--heads", "6"), "6 query heads do not split over tensor parallelism of 4"),
        (("--ranks", "9"), "--ranks 9: a10-pix-4 has 4"),
        (("--ranks", "4100"), "asks for 1025 hosts; from 1 to 1024 can be had"),
        (("--ranks", "0"), "--ranks 0: a10-pix-4 has 4"),
        (("--heads", "0"), "--heads 0: use 1 or more"),
        (("--kv-heads", "3"), "8 query heads are not a multiple of 3 kv heads"),
        (("--sweep", "seq=8k"), "--sweep seq=8k: write seq=8k..1M"),
        (("--sweep", "dim=8..16"), "--sweep dim=8..16: write seq="),
        (("--sweep", "seq=8k..4k"), "the first length is the larger one"),
        (("--svg", "a.svg"), "--svg draws a --sweep"),
        (("--topology", str(DATA / "topology" / "npu-hccs.txt")), "has no accelerators to plan for"),
        (("--topology", str(DATA / "topology" / "nvidia-switch.txt")), "no compute figures of 'accelerators of an unk"),
        (("--topology", "missing.txt"), "cannot read 'missing.txt'"),
        (("--save", "missing/plan.json"), "cannot write 'missing/plan.json'"),
        (("--timeline", "missing/plan.svg"), "cannot write 'missing/plan.svg'"),
        (("--dtype", "fp64"), "argument --dtype: invalid choice"),
    ],
)
def test_refuses(options: Sequence[str], says: str) -> None:
    """One line, exit code 2."""
    code, _, err = plan(*SMALL, *options)
    assert code == 2
    assert says in err
    assert err.startswith("tokenring: ")
    assert err.count("\n") == 1
