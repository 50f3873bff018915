"""The gated RMSNorm with a quantised result."""
