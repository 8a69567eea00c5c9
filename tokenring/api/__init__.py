"""The functions and classes that users call: attention, its context, sharding, capture, compilation."""
