"""RMSNorm and LayerNorm with a quantised result."""
