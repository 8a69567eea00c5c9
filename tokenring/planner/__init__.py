"""The planner: which schedule to take, how long it takes, and why."""
