"""Tables of what other engines ship for context parallelism: their flags, what each needs, and what it moves.

Read in the versions that `Engine.version` says. A choice that an engine refuses, or computes wrongly in silence, has a
reason there.
"""

from __future__ import annotations

from tokenring.cli.advise.diffusion_engines import DIFFUSION
from tokenring.cli.advise.training_engines import TRAINING

ENGINES = {each.name: each for each in (*TRAINING, *DIFFUSION)}
