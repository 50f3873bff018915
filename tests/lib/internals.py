"""What tests use of the package beside its public names: every such import stands here."""

from jaxnorm.primitive import weights

__all__ = ["weights"]
