"""An activation of a gate, times what it gates."""
