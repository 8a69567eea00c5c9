"""Attention of other libraries, as it runs on a CPU: what their races with ours take in place of their kernels."""
