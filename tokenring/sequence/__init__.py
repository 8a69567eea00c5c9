"""What is asked: who owns which positions, who sees whom, and how large all of it is."""
