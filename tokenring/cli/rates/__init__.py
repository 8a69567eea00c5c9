"""`tokenring rates`: the speed of kernels and transports on this machine."""
