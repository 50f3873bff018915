"""The ops: for each its formulas, its `Op` and its public functions."""
