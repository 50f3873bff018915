"""Linear layers in float8, for training too."""
