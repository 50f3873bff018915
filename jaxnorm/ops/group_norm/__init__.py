"""GroupNorm.

For a gradient x and 8 bytes a group are kept. With channels before all positions, as `channel_axis=1`, a group is a row
of `layer_norm`'s kernels, and XLA multiplies and activates what these give in float32; by default so on CPUs. Channels
between positions are left to the formula. Of positions that are split the statistics are of whole groups, by one
exchange each way.
"""
