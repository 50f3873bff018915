"""Softmax and log-softmax.

A gradient is one native call; `softmax`'s is of the rounded y. `causal` is that of `jax.nn.dot_product_attention` with
is_causal=True, or where=jnp.tril(jnp.ones((queries, keys), bool)) without the array. A window keeps the keys after t +
offset - window; `offset` may be traced. Over split axes 8 bytes a row are exchanged, 12 for log-softmax.
"""
