"""The layers of Flax, and what changing a model's layers takes in any library."""
