"""python -m tokenring: the command `tokenring`, where torchrun wants a module."""

import sys

from tokenring.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
