"""Probes of this machine, and of those of a job: tools, the PCI tree, drivers, files."""
