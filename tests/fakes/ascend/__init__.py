"""An Ascend machine without one: device, operators and HCCL, stricter than the real ones in what they refuse."""
