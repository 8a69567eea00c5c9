"""Prove that schedules and programs do what the mask asks, and never stop."""
