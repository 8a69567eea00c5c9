"""Versions of torchtitan that these modules know."""

from tokenring.integrations.versions import KnownVersions

KNOWN = KnownVersions("torchtitan", (0, 3), (0, 3))  # run, by benchmarks/torchtitan_models.py
check_version, pip_requirement = KNOWN.check, KNOWN.pip_requirement
