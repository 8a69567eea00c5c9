"""`tokenring plan`: which schedule, and why."""
