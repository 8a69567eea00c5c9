"""Suggestions for misspelt names (did you mean ...?): the known name that is nearest to one that is unknown."""

from __future__ import annotations

from collections.abc import Iterable

LIKE = 0.6  # how alike two names are at least, as difflib counts it
BEGINNING = 3  # letters from which on a beginning means the first name that begins so
LONGEST = 80  # characters of what was written: nobody means a name by more


def nearest(written: object, known: Iterable[str]) -> str | None:
    """Return the known name most like what was written, in whatever case; None where none is like it."""
    if not isinstance(written, str) or not 0 < len(written) <= LONGEST:
        return None
    from difflib import get_close_matches  # only where something went wrong

    names = {name.lower(): name for name in known}
    if written in names.values():
        return None  # it is not the name that is wrong
    small = written.lower()
    longer = [name for name in names if len(small) >= BEGINNING and name.startswith(small)]
    found = longer or get_close_matches(small, names, 1, LIKE)
    return names[found[0]] if found else None


def hint(written: object, known: Iterable[str], prefix: str = "") -> str:
    """Return the end of an error's sentence: "; did you mean ring?", or nothing. prefix: stands before a name."""
    found = nearest(written, known)
    return "" if found is None else f"; did you mean {prefix}{found}?"
