"""What a program, or a call, comes down to: `jaxnorm.explain` and `jaxnorm.info` show it."""
