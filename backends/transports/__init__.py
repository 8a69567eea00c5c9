"""Transports: they move blocks between ranks."""
