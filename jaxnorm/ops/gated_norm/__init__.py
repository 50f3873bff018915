"""The gated RMSNorm."""
