"""`tokenring advise`: the flags of other engines for a model on a topology, with reasons and predicted costs."""
