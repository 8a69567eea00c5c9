"""Transports and attention kernels, imported as `tokenring.backends`."""

if __name__ == "backends":  # reached through the repository root: a second copy of every class
    raise ImportError("import tokenring.backends, not backends")
