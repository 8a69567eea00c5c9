"""What no schedule can be faster than."""
