"""Interpreters that tests start."""

import sys

# Warnings are errors, as in the tests themselves (pyproject.toml): all but that of an entry that another process is
# writing into a shared cache of compiled programs.
STRICT = [sys.executable, "-W", "error", "-W", "ignore:Error reading persistent compilation cache entry"]
