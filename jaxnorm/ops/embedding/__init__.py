"""Rows with an index: the lookup in a table, and the sums of segments, each of which is the other's transpose.

XLA gathers the rows, which it does at the rate of memory; the kernel is that of the sums. On a GPU it takes positions
in the order of their segments, to which XLA sorts them; a CPU counts them.
"""
