"""RMSNorm or LayerNorm over each head of queries and keys, and their rotary embedding.

For a gradient q and k, or their one product with the values, are kept, and one float32 for each head of a token, two of
LayerNorm; with normalize=False positions or tables alone. One token may come without its axis, with positions. An array
of at most three axes, with all heads along the last, that can be read in both ways is an error unless a scale,
positions or a table tells one. Over a mesh, Auto axes that split the heads of the product are gathered, and with
Explicit ones XLA's code runs: a device is to have all heads of its tokens. Of a product of whose values nothing is read
these are not copied, and their part of the gradient is 0.
"""
