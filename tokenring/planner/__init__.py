"""Which schedule, how long it takes, and why."""
