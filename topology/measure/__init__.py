"""Measurement of what links the ranks, by transfers alone: it follows from how these slow each other down.

    lab        transfers, timed where they arrive                       colours  all pairs in few rounds
    survey     what is measured of any machine: pairs, rounds, one to all
    infer      the decision: mesh, switch, ring or islands              rings, islands: what these take
    model      wires and ways: what a shape predicts, and its facts

Every rank makes the same decisions from the same numbers, so the ranks need no leader.
"""

from tokenring.topology.measure.run import measure

__all__ = ["measure"]
