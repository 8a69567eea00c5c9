"""What merges partial results, by device."""
