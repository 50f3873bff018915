"""The norms of both APIs of Flax; `jaxnorm.nnx`, `jaxnorm.linen` and `jaxnorm.blocks` show them."""
