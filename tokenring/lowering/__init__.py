"""From a schedule to the program of one rank, and its bytes, for a target."""
