"""`tokenring plan`: the fastest schedule for a workload, and why it is."""
