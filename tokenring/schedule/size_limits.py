"""Limits on the size of a schedule: one that would take minutes to make in silence is refused at once."""

from __future__ import annotations

from tokenring.errors import ConfigurationError

MADE_RANKS = 256  # of a schedule that is made and proved: half a minute, which grows with the square
JOB_RANKS = 4096  # planned for in a job, each with its own part: the most for which that was measured
MADE_TILES = 1 << 18  # as a ring of so many ranks has, of two chunks each
GROUPS_AS_ONE = 8  # head groups, each at fewer ranks, that take as long as one everywhere (measured: ulysses, ring)


def check_size(name: str, ranks: int, layout: str, pieces: int | None) -> None:
    """Raise ConfigurationError for a schedule that would take minutes to make and to prove."""
    from tokenring.schedule.families.registry import parse
    from tokenring.sequence.layout import read_name

    wrong = f"schedule {name!r} for {ranks:,} ranks"
    if ranks > MADE_RANKS:
        raise ConfigurationError(
            f"{wrong}: more than {MADE_RANKS} take minutes to make and to prove: ask for fewer, or for what it costs: "
            f"`tokenring plan --topology preset:NAME*HOSTS`"
        )
    scheme = parse(name).make(ranks)
    chunks = 2 * ranks * read_name(layout)[1]
    groups = max(1, scheme.head_groups // GROUPS_AS_ONE)
    tiles = chunks**2 * (pieces or scheme.q_pieces * scheme.kv_pieces) * groups
    if tiles > MADE_TILES:
        raise ConfigurationError(
            f"{wrong}, layout {layout}{f', in {pieces} pieces' if pieces else ''}: {tiles:,} tiles take minutes to "
            f"make and to prove; at most {MADE_TILES:,}: use fewer ranks, a coarser layout or fewer pieces"
        )
