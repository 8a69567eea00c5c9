"""Hugging Face models over the ranks of a ContextParallel: training, and serving. Importing this imports nothing."""
