"""Quantising to few bits.

A NaN makes the scale of its row or group NaN, and an infinity makes it infinite, if there is no max_scale: what is
dequantised is NaN in both cases. `dequantize` and `quantized_dot` pass the cotangent of what they take for the array on
to it.
"""
