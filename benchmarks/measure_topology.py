"""Measure shaped links, told nothing, and compare with what was configured.

    benchmarks/measure_topology.py path/to/testbed.py [--ranks 4 8] [--link-gbit 0.1] [--uplink-gbit 0.1] [--only ring]

For each topology: the class, the greatest error of a link's, port's and uplink's bandwidth, and the seconds
of the measurement. Exit code 1 if a class is wrong or a bandwidth is off by more than a tenth. Needs root
and the test bed script. Ranks print the JSON document; what the test bed sets in their environment
beside torchrun's variables is taken away from them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parent.parent
TOLERANCE = 0.1
SECONDS = 60
GBS = 1 / 8  # of 1 Gbit/s
TOLD = "env -u TESTBED_TOPOLOGY -u TESTBED_LINK_GBIT -u TESTBED_UPLINK_GBIT"


class Setting(NamedTuple):
    """What the test bed is told; `inside`: the shape of an island; `uplinks`: how many can be told apart."""

    topology: str
    ranks: int
    wanted: str
    inside: str | None = None
    uplinks: int = 0
    half: bool = False

    def __str__(self) -> str:
        words = [self.topology, *(["half duplex"] if self.half else [])]
        if self.topology == "two-node":
            words.append(f"{self.inside} inside")
        return f"{', '.join(words)}, {self.ranks} ranks"

    def links(self) -> int:
        """Links and ports beside uplinks."""
        if self.topology == "ring" or "switch" in (self.wanted, self.inside):
            return self.ranks
        size = self.ranks // 2 if self.topology == "two-node" else self.ranks
        return self.ranks // size * (size * (size - 1) // 2)


def settings(ranks: int) -> list[Setting]:
    leaves = ranks // 2
    made = [
        Setting("full-mesh", ranks, "full-mesh"),
        Setting("switch", ranks, "switch"),
        Setting("ring", ranks, "ring"),
    ]
    for half in (False, True):
        made.append(Setting("pcie-tree", ranks, "islands", "switch", leaves if leaves > 2 else 1, half))
    for inside in ("full-mesh", "switch"):
        made.append(Setting("two-node", ranks, "islands", inside, 1))
    return made


class Answer(NamedTuple):
    """What came of one setting."""

    setting: Setting
    found: str
    seconds: float  # of all, with the start of the processes
    errors: dict[str, float]  # by kind of link, the greatest
    complaints: list[str]
    evidence: list[str]

    @property
    def right(self) -> bool:
        return not self.complaints


def measure(testbed: str, setting: Setting, link_gbit: float, uplink_gbit: float, limit: float = 170.0) -> Answer:
    """Run one setting. Raises CalledProcessError with the ranks' output, or TimeoutExpired."""
    command = [sys.executable, testbed, "run", "--topology", setting.topology, "--ranks", str(setting.ranks)]
    command += ["--link-gbit", str(link_gbit), "--uplink-gbit", str(uplink_gbit), "--timeout", str(limit)]
    command += ["--half-duplex-uplink"] if setting.half else []
    command += ["--node-fabric", setting.inside] if setting.topology == "two-node" and setting.inside else []
    command += ["--", *TOLD.split(), sys.executable, "-m", "tokenring", "topology", "--measure", "--json"]
    command += ["--transport", "gloo", "--seconds", str(SECONDS)]
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": str(REPO)}
    began = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit + 10)
    seconds = time.monotonic() - began
    lines = [line.removeprefix("[0] ") for line in done.stdout.splitlines() if line.startswith("[0] ")]
    start = next((at for at, line in enumerate(lines) if line == "{"), None)
    if done.returncode or start is None:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return compare(setting, json.loads("\n".join(lines[start:])), link_gbit * GBS, uplink_gbit * GBS, seconds)


def compare(setting: Setting, document: dict[str, Any], link: float, uplink: float, seconds: float) -> Answer:
    """The document against what was configured, GB/s."""
    verdict = document["verdict"]
    complaints = []
    if verdict["class"] != setting.wanted:
        complaints.append(f"class {verdict['class']}")
    shapes = {island["shape"] for island in verdict["islands"]}
    # A pair has no shape: a link of its own and a switch differ only by the port that leads out.
    if setting.inside and shapes != {setting.inside}:
        complaints.append(f"inside {', '.join(sorted(shapes))}")
    errors = {}
    for kind, wanted, number in (("link", link, setting.links()), ("uplink", uplink, setting.uplinks)):
        widths = [each["bandwidth_gbs"] for each in document["links"] if each["kind"] == kind]
        if len(widths) != number:
            complaints.append(f"{len(widths)} of kind {kind}, not {number}")
        if widths:
            errors[kind] = max((width / wanted - 1 for width in widths), key=abs)
            if abs(errors[kind]) > TOLERANCE:
                complaints.append(f"{kind} off by {errors[kind]:+.0%}")
    half = any(line.startswith("uplink ") and line.endswith("half duplex") for line in verdict["evidence"])
    if half != setting.half:
        complaints.append(f"duplex of the uplink: {'half' if half else 'full'}")
    found = f"{verdict['class']} ({verdict['confidence']})"
    return Answer(setting, found, seconds, errors, complaints, verdict["evidence"])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("testbed", help="the test bed script")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--link-gbit", type=float, help="default: 0.1 for 4 ranks, 0.05 for more")
    parser.add_argument("--uplink-gbit", type=float, help="default: as the links")
    parser.add_argument("--only", default="", help="settings whose name contains this")
    spec = parser.parse_args(arguments)
    wrong = 0
    print(f"{'configured':42} {'found':20} {'links':>7} {'uplinks':>8} {'s':>6}")
    for ranks in spec.ranks:
        link = spec.link_gbit or (0.1 if ranks <= 4 else 0.05)
        for setting in settings(ranks):
            if spec.only not in str(setting):
                continue
            answer = measure(spec.testbed, setting, link, spec.uplink_gbit or link)
            cells = [f"{answer.errors[kind]:+.1%}" if kind in answer.errors else "" for kind in ("link", "uplink")]
            print(f"{setting!s:42} {answer.found:20} {cells[0]:>7} {cells[1]:>8} {answer.seconds:6.1f}", end="")
            print(f"  WRONG: {'; '.join(answer.complaints)}" if answer.complaints else "", flush=True)
            for line in answer.evidence if answer.complaints else ():
                print(f"    {line}", flush=True)
            wrong += not answer.right
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
