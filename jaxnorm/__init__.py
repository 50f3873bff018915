"""Fused normalisation kernels for JAX."""

import pkgutil

# Python started in a clone's root finds this source directory before the installed package. The native modules are
# in the installed one, so its directory is searched too.
__path__ = pkgutil.extend_path(__path__, __name__)

from jaxnorm.norms import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]
