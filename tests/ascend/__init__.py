"""An Ascend machine without one: the device, its operators and HCCL; stricter than the real ones in what they refuse."""
