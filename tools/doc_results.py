"""The tables of the documentation that are drawn from results while MkDocs builds it.

A page has `<!-- drawn: NAME -->` where that table of `bench.tables` goes.
"""

import sys
from pathlib import Path
from typing import Any

# `mkdocs` has its own folder on the path, and not the clone's root.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from bench import tables

RESULTS = Path(tables.__file__).parent / "results"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this with each page."""
    return tables.drawn(markdown, RESULTS)
