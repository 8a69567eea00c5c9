"""The interconnects that join the ranks, as wires that messages share."""
