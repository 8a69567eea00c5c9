"""What joins the ranks, as wires that messages share."""
