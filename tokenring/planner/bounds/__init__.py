"""Bounds: no schedule can be faster than these."""
