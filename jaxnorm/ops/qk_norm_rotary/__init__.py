"""RMSNorm or LayerNorm over each head of queries and keys, and their rotary embedding.

A gradient keeps q and k, or qkv, and one float32 for each head of a token, two for LayerNorm; with normalize=False only
positions or tables. A single token may lack its axis, with positions. qkv of at most three axes may have all heads
along the last; where its shape can be read both ways it is an error, unless a scale, positions or a table tells. Over a
mesh a device must have all heads of its tokens: Auto axes that split those of qkv are gathered, and with Explicit ones
XLA's code runs. Values that nothing reads are not copied, and their part of the gradient is 0.
"""
