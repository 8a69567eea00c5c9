"""A public class name has one meaning in the package, and docstrings begin with what a thing is or does."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
QUESTIONS = ("What", "Whether", "Of", "How", "Where", "Which", "Who", "When", "Why", "As", "By", "From", "That", "This")


@cache
def named(path: Path) -> list[ast.Module | ast.ClassDef | ast.FunctionDef]:
    """A module, its classes and functions; no file changes once it was asked for."""
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node for node in tree if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]


def public_classes(*roots: Path) -> dict[str, list[str]]:
    """Where each class that has no underscore is defined."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in (path for root in roots for path in root.rglob("*.py")):
        for node in named(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.name)
    return found


def twice(*roots: Path) -> dict[str, list[str]]:
    return {name: paths for name, paths in public_classes(*roots).items() if len(paths) > 1}


def test_each_class_name_is_there_once() -> None:
    rooms = [path for path in (REPO / "tokenring").iterdir() if path.is_dir() and not path.is_symlink()]
    assert len(public_classes(REPO / "backends", REPO / "topology", *rooms)) > 300
    assert not twice(REPO / "backends", REPO / "topology", *rooms)


def test_a_second_meaning_is_found(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("class Link: ...\nclass _Own: ...\n", encoding="utf-8")
    assert list(twice(tmp_path)) == ["Link"]


def questions(*roots: Path) -> list[str]:
    """Docstrings that begin with a word of QUESTIONS: such a line has no verb."""
    found = []
    for path in (path for root in roots for path in root.rglob("*.py")):
        for node in named(path):
            words = (ast.get_docstring(node) or "").split(maxsplit=1)
            if words and words[0].rstrip(",") in QUESTIONS:
                found.append(f"{path.name}: {getattr(node, 'name', 'module')}")
    return found


def test_docstrings_ask_no_questions() -> None:
    rooms = [path for path in (REPO / "tokenring").iterdir() if path.is_dir() and not path.is_symlink()]
    assert not questions(REPO / "backends", REPO / "topology", *rooms)
    root = {path.name for path in (REPO / "tokenring").glob("*.py")}
    assert not [each for each in questions(REPO / "tokenring") if each.partition(":")[0] in root]


def test_a_question_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""What it is."""\n\n\ndef f() -> None:\n    """Do it."""\n', encoding="utf-8")
    assert questions(tmp_path) == ["a.py: module"]


def module_names(folders: list[Path]) -> dict[str, list[str]]:
    """The folders in which a module of each name lies."""
    found: dict[str, list[str]] = defaultdict(list)
    for folder in folders:
        for path in folder.glob("*.py"):
            found[path.stem].append(folder.name)
    return found


def test_modules_that_tests_import_have_names_of_their_own(pytestconfig: pytest.Config) -> None:
    # Folders of pytest's pythonpath stand beside each other: of two modules with one name, one is never found.
    folders = [Path(each) for each in pytestconfig.getini("pythonpath")]
    assert len(folders) > 20 and not {name: at for name, at in module_names(folders).items() if len(at) > 1}


def test_a_second_module_of_a_name_is_found(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.py").touch()
    assert module_names([tmp_path / "a", tmp_path / "b"]) == {"same": ["a", "b"]}
