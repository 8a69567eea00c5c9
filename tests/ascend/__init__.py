"""An Ascend machine without one: the device, its attention operators and HCCL, stricter than the real ones."""
