"""Figures that were measured on this machine, and are kept."""
