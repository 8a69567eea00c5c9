"""Mergers of partial results, by device."""
