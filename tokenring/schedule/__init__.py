"""Schedules, how they are made and asked: schemes, families, names, and the Schedule that users hold."""
