"""Check that rooms import what lies below them, and nothing imports round: the contracts of pyproject.toml.

usage: python ci/rooms.py [REPOSITORY]

The linter takes a link for a package of its own, so it gets a copy without links. Imports inside functions count, and
those for types do. It follows no names in strings, by which transports and kernels are loaded.
"""

from __future__ import annotations

import os
import shutil
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from tempfile import TemporaryDirectory

REPO = Path(__file__).resolve().parent.parent
PACKAGE = "tokenring"


def main(repo: Path = REPO) -> int:
    """Check a repository; returns the exit code: 0, or 1 where a contract is broken."""
    repo = repo.resolve()
    with TemporaryDirectory() as folder:
        place = Path(folder)
        shutil.copytree(repo / PACKAGE, place / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(repo / "pyproject.toml", place)
        os.chdir(place)
        try:
            return check_here()
        finally:
            os.chdir(repo)


def check_here(cache: str | None = None) -> int:
    """Check the package in the working directory; returns the exit code.

    cache: a folder that keeps what each file imports, for those who check often; None: all files are read.
    """
    from importlinter.cli import lint_imports

    # A folder for each graph: one that both share keeps the times of files once, and the second takes them for read.
    contracts, modules = (None, None) if cache is None else (f"{cache}/contracts", f"{cache}/modules")
    broken = lint_imports(cache_dir=contracts, no_cache=cache is None, no_logo=True)
    if (circle := import_circle(imports_here(modules))) is not None:
        print(f"These import each other round: {' -> '.join(circle)}", file=sys.stderr)
        return 1
    return broken


def imports_here(cache: str | None = None) -> dict[str, set[str]]:
    """What each module imports, also inside functions and for types."""
    import grimp

    graph = grimp.build_graph(PACKAGE, cache_dir=cache)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def import_circle(imports: dict[str, set[str]]) -> list[str] | None:
    """Modules of which each imports the next, ending with the first; None: there are none.

    Beside the contracts it sees packages that import their own modules, as the public names do.
    """
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))  # it has who is imported before who imports
    return None


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
