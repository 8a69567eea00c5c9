"""The package as it is shipped: folders, links, guards, version, and what importing it costs."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest
from patience import patient

import tokenring

REPO = Path(__file__).resolve().parents[2]
CODE = ("tokenring", "backends", "topology", "tests", "ci", "benchmarks", "hardware", "examples")
MOST_IMPORTS = 75  # of ours, for all public names; a fifth of them are packages


def run_python(
    code: str, cwd: Path, python: str = sys.executable, **env: str
) -> subprocess.CompletedProcess[str]:
    command = [python, "-c", code]
    return subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=patient(60))


def test_package_list_equals_folders() -> None:
    """A sub-package that is not listed works in the checkout and is missing from the wheel."""
    tomllib = pytest.importorskip("tomllib", reason="the list is the same on every Python")
    listed = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = [
        ".".join(Path(folder).relative_to(REPO).parts)
        for folder, _, files in os.walk(REPO / "tokenring", followlinks=True)
        if any(name.endswith(".py") for name in files)
    ]
    assert sorted(found) == listed


def test_every_package_has_an_init() -> None:
    for name in ("tokenring", "backends", "topology"):
        for module in (REPO / name).rglob("*.py"):
            assert module.with_name("__init__.py").exists(), f"{module.parent} has no __init__.py"


@pytest.mark.parametrize("name", ["backends", "topology"])
class TestMappedFolder:
    def test_is_linked(self, name: str) -> None:
        link = REPO / "tokenring" / name
        assert link.is_symlink(), f"{link} must be a link: a copy would go stale"
        assert os.readlink(link) == f"../{name}"

    def test_twin_import_is_refused(self, name: str) -> None:
        result = run_python(f"import {name}", cwd=REPO)
        assert f"ImportError: import tokenring.{name}, not {name}" in result.stderr

    def test_import_through_the_package_works(self, name: str) -> None:
        assert run_python(f"import tokenring.{name}", cwd=REPO).returncode == 0


def test_no_file_is_over_400_lines() -> None:
    files = (path for folder in CODE for path in (REPO / folder).rglob("*.py"))
    too_long = {str(path): n for path in files if (n := len(path.read_text().splitlines())) > 400}
    assert not too_long


def test_python_s_collector_is_turned_off_in_one_place() -> None:
    """Which turns it on again (test_verify)."""
    shipped = (path for folder in ("tokenring", "backends", "topology", "ci", "benchmarks", "hardware", "examples")
               for path in (REPO / folder).rglob("*.py"))  # fmt: skip
    found = [path.relative_to(REPO) for path in shipped if "gc.disable" in path.read_text()]
    assert found == [Path("tokenring/gc_pause.py")]


def test_changelog_agrees_with_version() -> None:
    versions = re.findall(r"^## \[(\d.*?)\]", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == tokenring.__version__


def test_all_lists_the_public_names() -> None:
    """Ruff (RUF022) keeps the list in order, and F822 knows that type checkers see each name."""
    assert len(tokenring.__all__) == len(set(tokenring.__all__))
    assert set(tokenring.__all__) == set(tokenring._HOMES)
    for name in tokenring.__all__:
        assert not isinstance(getattr(tokenring, name), ModuleType)
    public = {name for name in vars(tokenring) if not name.startswith("_")}
    modules = {name for name in public if isinstance(getattr(tokenring, name), ModuleType)}
    assert public - modules - {"TYPE_CHECKING", "ModuleType"} <= set(tokenring.__all__)


def imports(module: str, cwd: Path, python: str = sys.executable, **env: str) -> list[str]:
    """Modules that importing this one brings in after torch."""
    code = f"""
import json, sys
import torch
before = set(sys.modules)
from {module} import *
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    result = run_python(code, cwd, python, **env)
    assert result.returncode == 0, result.stderr
    found: list[str] = json.loads(result.stdout)
    return found


def foreign(modules: Iterable[str]) -> set[str]:
    """Packages that are neither ours, nor torch's, nor Python's."""
    return {name.partition(".")[0] for name in modules} - {"torch", "tokenring", "greedy"} - sys.stdlib_module_names


class TestImport:
    def test_is_quick_and_brings_in_no_foreign_package(self, tmp_path: Path) -> None:
        """All public names bring in few modules beyond torch's: a tenth of a second. Time itself is not for tests.

        No vendor package (torch_npu, triton, flash_attn, ...) and nothing else but torch.
        """
        found = imports("tokenring", tmp_path)
        assert len(found) <= MOST_IMPORTS
        assert not foreign(found)

    def test_takes_no_torch_before_it_is_needed(self, tmp_path: Path) -> None:
        """`tokenring topology` answers while torch would still be loading."""
        code = "import sys, tokenring.cli.main, tokenring.cli.topology.command; print('torch' in sys.modules)"
        assert run_python(code, tmp_path).stdout == "False\n"

    def test_sub_modules_do_not_hide_functions(self, tmp_path: Path, warm_torch: str) -> None:
        code = "import tokenring.schedule, tokenring; print(callable(tokenring.schedule), 'schedule' in dir(tokenring))"
        assert run_python(code, tmp_path, warm_torch).stdout == "True True\n"

    def test_unknown_names_are_refused(self) -> None:
        with pytest.raises(AttributeError, match="module 'tokenring' has no attribute 'nothing'"):
            _ = tokenring.nothing  # type: ignore[attr-defined]

    def test_checks_can_fail(self, tmp_path: Path, warm_torch: str) -> None:
        (tmp_path / "torch_npu.py").touch()
        (tmp_path / "greedy.py").write_text("import torch_npu, xmlrpc.client, ftplib, mailbox, wsgiref.util\n"
                                            "import tokenring, tokenring.cli, tokenring.topology.sources\n"
                                            "from tokenring import *")  # fmt: skip
        found = imports("greedy", tmp_path, warm_torch, PYTHONPATH=str(tmp_path))
        assert foreign(found) == {"torch_npu"}
        assert len(found) > MOST_IMPORTS
