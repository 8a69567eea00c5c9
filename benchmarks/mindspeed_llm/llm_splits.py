"""Splits of a step beside context parallelism: what Megatron's flags say of them, and what they ask of a model."""

from __future__ import annotations

import re
from dataclasses import dataclass

NUMBERED = re.compile(r"(tp|pp|vpp|ep)(\d+)")
EXPERTS = 4  # of a model whose experts are split, two of which see a token
LAYERS_OF_STAGE = 2


@dataclass(frozen=True)
class Splits:
    """Ranks for tensors, stages and experts, stages again within a rank, and what of forward is computed again."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    sp: bool = False
    recompute: bool = False

    @property
    def ranks(self) -> int:
        """Return how many ranks there are for each of context parallelism; experts are split over these."""
        return self.tp * self.pp

    def flags(self) -> dict[str, list[str]]:
        """Return the flags, in place of those that a script may have."""
        found = self._of_model(self.tp, self.pp, self.ep)
        if self.vpp > 1:
            found["--num-layers-per-virtual-pipeline-stage"] = [str(LAYERS_OF_STAGE // self.vpp)]
        if self.sp:
            found["--sequence-parallel"] = []
        if self.recompute:
            found |= {
                "--recompute-granularity": ["full"], "--recompute-method": ["uniform"],
                "--recompute-num-layers": ["1"],
            }  # fmt: skip
        return found

    def flags_of_whole(self) -> dict[str, list[str]]:
        """Return the flags for the same model and batches on one rank."""
        return self._of_model(1, 1, 1)

    def _of_model(self, tp: int, pp: int, ep: int) -> dict[str, list[str]]:
        found = {"--tensor-model-parallel-size": [str(tp)], "--pipeline-model-parallel-size": [str(pp)]}
        if self.pp > 1:
            found["--num-layers"] = [str(LAYERS_OF_STAGE * self.pp)]
            found["--global-batch-size"] = [str(self.pp)]  # interleaved stages want a multiple of their number
        if self.ep > 1:
            found |= {
                "--num-experts": [str(EXPERTS)], "--expert-model-parallel-size": [str(ep)],
                "--moe-router-topk": ["2"], "--moe-router-load-balancing-type": ["none"],
                "--moe-token-dispatcher-type": ["alltoall"], "--moe-ffn-hidden-size": ["64"],
            }  # fmt: skip
        return found


def splits_of(text: str) -> Splits:
    """Return the splits of a text like "tp2+sp" or "pp2+vpp2+recompute". Raises ValueError for other words."""
    found: dict[str, int | bool] = {}
    for word in text.split("+"):
        if numbered := NUMBERED.fullmatch(word):
            found[numbered[1]] = int(numbered[2])
        elif word in ("sp", "recompute"):
            found[word] = True
        elif word != "none":
            raise ValueError(f"{word!r} of {text!r} is no split: take tp2, pp2, vpp2, ep2, sp, recompute, or none")
    if found.get("vpp", 1) not in (1, 2):
        raise ValueError(f"{text!r}: each stage has two layers here, so vpp is 2")
    return Splits(**found)  # type: ignore[arg-type]
