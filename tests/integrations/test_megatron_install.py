"""ci/megatron: what it installs, leaves out and fails at; and that `make test` does not skip what it was to install."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from mcore import versions
from mcore.versions import PINNED, REPO, has_wheel, need
from patience import patient

Install = Callable[..., subprocess.CompletedProcess[str]]
FAKE = """#!/bin/sh
[ "$1" = -c ] && echo "{here}" && exit
for word; do last=$word; [ "$before" = --target ] && target=$word; before=$word; done
echo "$last"
mkdir -p "$target/megatron"
[ "$last" != "megatron-core=={broken}" ]
"""


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """ci/megatron with a Python that only pretends: of this version and system; pip fails at one of Megatron's."""

    def run(here: str = "3.11 linux", broken: str = "none") -> subprocess.CompletedProcess[str]:
        python = tmp_path / "python"
        python.write_text(FAKE.format(here=here, broken=broken))
        python.chmod(0o755)
        command = [REPO / "ci/megatron", python, tmp_path / "megatron"]
        return subprocess.run(command, capture_output=True, text=True, timeout=patient(20))

    return run


def folders(place: Path) -> list[str]:
    return sorted(each.name for each in (place / "megatron").iterdir() if each.suffix != ".part")


class TestInstall:
    def test_of_all_and_once(self, install: Install, tmp_path: Path) -> None:
        assert install().stdout.split() == [f"megatron-core=={version}" for version in PINNED]
        assert folders(tmp_path) == PINNED
        again = install()
        assert (again.returncode, again.stdout, again.stderr) == (0, "", "")

    def test_that_fails_is_a_failure_and_tried_again(self, install: Install, tmp_path: Path) -> None:
        done = install(broken=PINNED[1])
        assert done.returncode == 1
        assert done.stderr == f"ci/megatron: Megatron-core {PINNED[1]} was not installed: see above, and try again\n"
        assert folders(tmp_path) == PINNED[:1]
        assert install().returncode == 0
        assert folders(tmp_path) == PINNED

    def test_leaves_out_what_has_no_wheel_for_this_python(self, install: Install, tmp_path: Path) -> None:
        done = install("3.12 linux")
        assert done.returncode == 0
        assert done.stderr == (
            "ci/megatron: Megatron-core 0.12.1 has no wheel for Python 3.12 linux: its tests will skip\n"
        )
        assert folders(tmp_path) == PINNED[1:]

    @pytest.mark.parametrize("here", ["3.1 linux", "3.99 linux", "3.11 darwin"])
    def test_leaves_out_all_where_there_are_no_wheels(self, install: Install, tmp_path: Path, here: str) -> None:
        done = install(here)
        assert (done.returncode, done.stderr.count("has no wheel for Python " + here)) == (0, len(PINNED))
        assert folders(tmp_path) == []


class TestTests:
    @pytest.fixture(autouse=True)
    def elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TOKENRING_MEGATRON", str(tmp_path))

    def test_fail_under_make_without_megatron(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(versions, "has_wheel", lambda version: True)
        with pytest.raises(pytest.fail.Exception, match=f"no Megatron-core {PINNED[0]} in .*: make megatron"):
            need(PINNED[0], {"TOKENRING_MEGATRON_REQUIRED": "1"})

    def test_skip_by_hand_without_megatron(self) -> None:
        with pytest.raises(pytest.skip.Exception):
            need(PINNED[0], {})

    def test_skip_where_there_is_no_wheel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(versions, "has_wheel", lambda version: False)
        with pytest.raises(pytest.skip.Exception):
            need(PINNED[0], {"TOKENRING_MEGATRON_REQUIRED": "1"})

    def test_go_on_with_megatron(self, tmp_path: Path) -> None:
        core = tmp_path / PINNED[0] / "megatron/core"
        core.mkdir(parents=True)
        (core / "__init__.py").touch()
        need(PINNED[0], {"TOKENRING_MEGATRON_REQUIRED": "1"})

    def test_wheels_are_for_these(self) -> None:
        assert [has_wheel(version, (3, 12), "linux") for version in PINNED] == [False, True, True]
        assert not any(has_wheel(version, (3, 11), "darwin") for version in PINNED)
        assert all(has_wheel(version, (3, 11), "linux") for version in PINNED)

    def test_make_requires_it(self) -> None:
        """As CI calls it: pytest is not told to skip."""
        wanted = "\tTOKENRING_MEGATRON_REQUIRED=1 $(BIN)/python -m pytest "
        assert any(line.startswith(wanted) for line in (REPO / "Makefile").read_text().splitlines())
