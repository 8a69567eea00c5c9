"""What moves blocks between ranks."""
