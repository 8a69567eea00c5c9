"""A schedule as data: made of moves and tiles, changed by passes, written and read."""
