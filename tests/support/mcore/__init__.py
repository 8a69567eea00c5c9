"""Real Megatron-core on CPU ranks. `versions`: what is there; the rest runs in ranks' processes."""
