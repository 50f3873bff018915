"""The next token, drawn from rows of logits.

A draw is a function of a row's logits and one uniform number. What is kept of a row is a prefix of its columns by
descending logits, of equals the lowest numbers first: each filter shortens it. Kernels find where it ends without a
sort, and rows of -inf beside a few logits are drawn as any other. A result has no derivative but its log-probability,
with the id and what is kept held constant, and that is XLA's code. Over a mesh each device draws its rows; of rows that
an Explicit mesh splits XLA's code draws, and of others that are split the parts are gathered.
"""
