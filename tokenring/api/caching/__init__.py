"""Attention over keys and values that are cached: a cache dealt over the ranks, and the calls that use it."""
