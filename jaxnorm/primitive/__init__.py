"""From an `Op` to JAX primitives with all their rules."""
