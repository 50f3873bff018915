"""The norms of both APIs of Flax; `jaxnorm.nnx`, `jaxnorm.linen` and `jaxnorm.replacement` show them."""
