"""Layouts for a mask: which rank owns which chunk, so that work is balanced and few rows move."""
