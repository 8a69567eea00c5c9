"""Whole transformer layers: the schedules of all their operators, chosen together, and their prices."""
