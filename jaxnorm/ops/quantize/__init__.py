"""Quantising to few bits."""
