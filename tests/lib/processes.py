"""Interpreters that tests start."""

import os
import subprocess
import sys

# Warnings are errors, as in the tests themselves (pyproject.toml): all but that of an entry that another process is
# writing into a shared cache of compiled programs.
STRICT = [sys.executable, "-W", "error", "-W", "ignore:Error reading persistent compilation cache entry"]


def python(directory, *arguments, **environment) -> subprocess.CompletedProcess:
    """A fresh Python in this directory, with what it prints."""
    command, environment = [sys.executable, *arguments], {**os.environ, **environment}
    return subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True)
