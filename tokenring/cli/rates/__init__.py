"""`tokenring rates`: what kernels and transports reach on this machine."""
