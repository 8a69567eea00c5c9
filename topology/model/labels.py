"""The meanings of the words in the cells of topology matrices, of all vendors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

COUNTED = {"NV": "nvlink", "MX": "mxlink", "MT": "mtlink", "MLK": "mlulink"}
WORDS: dict[str, tuple[str, bool]] = {  # kind, through a switch
    "XGMI": ("xgmi", False),
    "HCCS": ("hccs", False),
    "XLINK": ("hccs", False),  # how the open build of npu-smi writes HCCS
    "HCCS_SW": ("hccs", True),
    "XLINK_SW": ("hccs", True),
    "SIO": ("sio", False),
    "UB": ("ub", False),
    "PIX": ("pix", False),
    "PXB": ("pxb", False),
    "PHB": ("phb", False),
    "NODE": ("node", False),
    "SYS": ("sys", False),
    "SOC": ("sys", False),  # the old word
    "PCIE": ("pcie", False),
}
SELF = "X"
LONGEST = 400  # cells glued together
KEPT = 4096  # words: a matrix has a million cells and few words
NOTHING = ("N/A", "NA", "XXXX", "-", "...", "…")

_WORD = r"(?:NV|MX|MT|MLK)[0-9]{1,3}|MX|MLK|XGMI|(?:HCCS|X[Ll]ink)(?:_SW)?|SIO|UB|PIX|PXB|PHB|NODE|SYS|SOC|PCIE"
GLUED = re.compile(rf"(?:{_WORD}|X)+", re.ASCII)
PIECE = re.compile(rf"{_WORD}|X", re.ASCII)


@dataclass(frozen=True)
class Meaning:
    """The meaning of a label: a kind of link, how many of them, and whether they lead through a switch."""

    kind: str
    count: int | None = None
    switched: bool = False


def meaning(label: str) -> Meaning | None:
    """Return the meaning of a label; None for N/A, XXXX, and words that are unknown."""
    word = label.upper()
    if word in WORDS:
        return Meaning(WORDS[word][0], switched=WORDS[word][1])
    match = re.fullmatch(r"(NV|MX|MT|MLK)([0-9]{0,3})", word, re.ASCII)
    if match is None or match[2] == "0":
        return None
    return Meaning(COUNTED[match[1]], int(match[2]) if match[2] else None)


@lru_cache(KEPT)
def cells(token: str) -> tuple[str, ...] | None:
    """Return the cells of one word, which may be glued (PIXNODE); None where it is something else."""
    if token in NOTHING:
        return (token,)
    if len(token) > LONGEST:
        return None
    return tuple(PIECE.findall(token)) if GLUED.fullmatch(token) else None
