"""The measurement on the ranks at hand: all of them call it, and get equal facts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tokenring.errors import ConfigurationError
from tokenring.topology.measure.infer import infer
from tokenring.topology.measure.lab import OutOfTime, Tell, TransportLab
from tokenring.topology.measure.model import FORMAT, Model, facts, process
from tokenring.topology.measure.survey import Tables, survey
from tokenring.topology.model.facts import Facts, SourceOrigin

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tokenring.backends.interfaces import Transport

SECONDS = 60.0
WAIT_SECONDS = 60.0  # for another rank


def measure(
    transport: Transport | None, seconds: float = SECONDS, tell: Tell = lambda done, steps, what: None
) -> Facts:
    """Measure facts of the ranks of a transport (None: one rank), within about `seconds`. Raises PeerLost.

    Raises ConfigurationError for seconds that are not above 0 and finite.
    """
    if not 0 < seconds < math.inf:
        raise ConfigurationError(f"measuring in {seconds:g} seconds: use more than 0, and a number")
    if transport is None or transport.world_size == 1:
        return Facts("links", (process(0),), origin=SourceOrigin(FORMAT))
    lab = TransportLab(transport, seconds, tell)
    tables = Tables(lab.ranks)
    try:
        survey(lab, tables)
        model = infer(tables, lab)
    except OutOfTime as error:
        text = f"{seconds:g} seconds were too short: they ended with {error}"
        model = Model(lab.ranks, doubts=[text])
    return facts(model, tables)


def measure_group(group: ProcessGroup | None, transport: str | Transport, seconds: float) -> Facts:
    """Measure facts of the ranks of a group, as measure does.

    A transport that is given by name is closed afterwards. Raises ConfigurationError if there is no process
    group.
    """
    if not isinstance(transport, str):
        return measure(transport, seconds)
    import torch.distributed as dist

    from tokenring.backends.registry import make_transport

    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ConfigurationError("there is no process group: call torch.distributed.init_process_group first")
    if dist.get_world_size(group) == 1:
        return measure(None, seconds)
    made = make_transport(transport, group, WAIT_SECONDS)
    try:
        return measure(made, seconds)
    finally:
        made.close()
