"""What stands in for CUDA's attention operators in tests: float64 arithmetic behind their real names and schemas."""
