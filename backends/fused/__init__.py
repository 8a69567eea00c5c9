"""Operators of vendors that take a whole linear layer: its product and its messages are one."""
