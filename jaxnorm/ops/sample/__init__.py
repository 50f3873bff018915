"""The next token, drawn from rows of logits.

A draw is a function of a row's logits and one uniform number. Filters keep a prefix of the row's columns by descending
logits, of equals the lowest numbers first, and each shortens it. Kernels find its end without a sort, and draw rows of
-inf with a few logits like others. Only the log-probability has a derivative, with the id and what is kept held
constant, by XLA's code. Over a mesh each device draws its rows. XLA's code draws rows that an Explicit mesh splits;
rows that others split are gathered.
"""
