"""Versions of transformers that these modules know."""

from tokenring.integrations.versions import KnownVersions

KNOWN = KnownVersions("transformers", (5, 23), (5, 23))  # run, by the tests and benchmarks/transformers_families.py
check_version, pip_requirement = KNOWN.check, KNOWN.pip_requirement
