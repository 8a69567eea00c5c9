"""Codecs: torch code that writes rows of numbers in wire formats, and reads them."""
