"""Versions of diffusers that these modules know."""

from tokenring.integrations.versions import KnownVersions

# Run, by benchmarks/diffusers_models.py.
KNOWN = KnownVersions("diffusers", (0, 37), (0, 42), compare="an output and the gradients of a step")
check_version, pip_requirement = KNOWN.check, KNOWN.pip_requirement
