"""What is beneath Python: the native modules, and the private names of JAX."""
