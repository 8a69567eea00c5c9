"""`tokenring topology`: the links of the accelerators, as read (`command`) or as measured (`measure`)."""
