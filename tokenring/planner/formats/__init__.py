"""Wire formats of attention, chosen within an error that is allowed."""
