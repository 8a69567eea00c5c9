"""Sequences as MindSpeed cuts, packs and masks them, in terms of ours. Importing this needs no MindSpeed."""
