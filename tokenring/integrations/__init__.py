"""Integrations into other projects' training code. Each sub-package imports its project only when used."""
