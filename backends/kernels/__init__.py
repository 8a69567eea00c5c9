"""Local attention kernels that also return the log-sum-exp."""
