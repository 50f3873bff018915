"""Quantisation to few bits.

A NaN makes the scale of its row or group NaN, and an infinity makes it infinite, without a max_scale: either
dequantises to NaN. `dequantize` and `quantized_dot` pass the cotangent of the dequantised array on to x.
"""
