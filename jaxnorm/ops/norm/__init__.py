"""RMSNorm and LayerNorm, alone and with a residual."""
