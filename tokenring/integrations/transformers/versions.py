"""Versions of transformers, accelerate and trl that these modules know.

benchmarks/transformers_families.py ran with the oldest and the newest of transformers,
benchmarks/transformers_trainers.py with those of all three.
"""

from tokenring.integrations.versions import KnownVersions

KNOWN = KnownVersions("transformers", (5, 20), (5, 24))
ACCELERATE = KnownVersions("accelerate", (1, 10), (1, 15), "the losses of some steps")
TRL = KnownVersions("trl", (1, 9), (1, 16), "the losses of some steps")
check_version, pip_requirement = KNOWN.check, KNOWN.pip_requirement


def check_trainer(trainer: type, any_version: bool = False) -> None:
    """Raise UnsupportedError for versions of what a trainer's class is made of that were not run.

    trainer: a class that derives from transformers' Trainer, perhaps by way of one of trl's.
    Raises BackendUnavailable for one that cannot be imported.
    """
    KNOWN.check(any_version)
    ACCELERATE.check(any_version)
    if any(each.__module__.partition(".")[0] == "trl" for each in trainer.__mro__):
        TRL.check(any_version)
