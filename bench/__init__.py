"""The benchmarks of jaxnorm: `python -m bench --help`.

They measure the jaxnorm that is installed. `python -m` and pytest put the clone's root first on the path, where a
jaxnorm without native modules lies; importing this package moves the root behind everything that is installed.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if (ROOT / "pyproject.toml").exists():
    sys.path.sort(key=lambda entry: Path(entry).resolve() == ROOT)
