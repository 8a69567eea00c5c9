"""`tokenring topology`: what links the accelerators, as read (`command`) or as measured (`measure`)."""
