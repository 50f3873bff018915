"""Softmax and log-softmax.

A gradient is one native call; that of `softmax` is of y as it was rounded. `causal` is as
`jax.nn.dot_product_attention` has it with is_causal=True, and as where=jnp.tril(jnp.ones((queries, keys), bool))
without such an array. A window leaves the keys after t + offset - window; an `offset` is traced or not. Over axes that
are split 8 bytes a row are exchanged, of log-softmax 12.
"""
