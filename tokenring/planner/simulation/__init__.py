"""The simulation of how long a program takes: messages share wires, kernels share cores."""
