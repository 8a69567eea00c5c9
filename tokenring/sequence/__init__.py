"""The request of a call: who owns which positions, who sees whom, and how large all of it is."""
