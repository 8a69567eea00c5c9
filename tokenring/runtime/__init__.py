"""Runs a program: binds it to memory, transport and kernel, and agrees with the other ranks on the call."""
