"""What users call: attention, its context, sharding, capture, compilation."""
