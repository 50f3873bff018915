"""Lookups of rows in a table, and sums of segments: each is the other's transpose.

XLA gathers the rows, at the rate of memory; the sums have a kernel. On a GPU XLA sorts positions by segment first;
the CPU kernel has a counting sort.
"""
