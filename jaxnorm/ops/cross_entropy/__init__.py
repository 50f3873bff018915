"""Cross-entropy with integer labels."""
