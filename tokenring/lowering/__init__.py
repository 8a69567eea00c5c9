"""Lower a schedule to the program of one rank, and count its bytes, for a target."""
