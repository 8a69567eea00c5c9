"""The families of schemes: every published schedule is a member of one, under a name such as "usp/2".

A name is FAMILY, or FAMILY/NUMBERxNUMBER, then options: "tiles/2x4", "tiles/2x4/late", "ulysses/regather".
"""

from __future__ import annotations

from tokenring.schedule.families.basic import at_key, at_query
from tokenring.schedule.families.change import arranged, in_pieces, mirrored
from tokenring.schedule.families.family import Family
from tokenring.schedule.families.registry import FAMILIES, Named, expand, misfit, parse, variants

__all__ = [
    "FAMILIES",
    "Family",
    "Named",
    "arranged",
    "at_key",
    "at_query",
    "expand",
    "in_pieces",
    "mirrored",
    "misfit",
    "parse",
    "variants",
]
