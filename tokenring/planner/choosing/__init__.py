"""Chooses among the schedules that fit, and says why."""
