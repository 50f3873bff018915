"""Matrix products with quantised operands."""
