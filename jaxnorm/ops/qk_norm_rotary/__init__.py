"""RMSNorm or LayerNorm over each head of queries and keys, and their rotary embedding."""
