"""Looks at this machine, and at those of a job: tools, the PCI tree, drivers, files."""
