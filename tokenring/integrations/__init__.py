"""Where other projects' training code meets our attention. Each sub-package imports its project only when used."""
