"""GroupNorm.

A gradient keeps x and 8 bytes a group. With channels before all positions, as `channel_axis=1`, a group is a row of
`layer_norm`'s kernels, and XLA multiplies and activates their float32 result, by default on CPUs only. Channels between
positions run the formula. If positions are split, statistics are of whole groups, by one exchange each way.
"""
