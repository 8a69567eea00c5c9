"""Devices, links and what follows from them: facts, the graph, the verdict."""
