"""Hugging Face transformers, over the ranks of a context. Importing this imports no transformers."""
