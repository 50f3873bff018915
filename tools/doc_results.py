"""The tables and pictures of the documentation that are drawn from results while MkDocs builds it.

A page has `<!-- drawn: NAME -->` where that table of `bench.tables` goes, and `<!-- pictures: NAME -->` where those of
`bench/results/NAME.json` go.
"""

import io
import re
import sys
from pathlib import Path
from typing import Any

# `mkdocs` has its own folder on the path, and not the clone's root.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from bench import plot, report, tables

RESULTS = Path(__file__).resolve().parent.parent / "bench" / "results"
PLACE = re.compile(r"<!-- pictures: (\w+) -->")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """MkDocs calls this with each page."""

    def pictures(place: re.Match[str]) -> str:
        from mkdocs.structure.files import File

        links = []
        for direction, picture in plot.pictures(report.load(RESULTS / f"{place[1]}.json")):
            content = io.BytesIO()
            picture.savefig(content)
            name = f"{place[1]}-{direction}.png"
            files.append(File.generated(config, f"{Path(page.file.src_uri).parent}/{name}", content=content.getvalue()))
            links.append(f"![GB/s against the row length, {direction}]({name})")
        return "\n\n".join(links)

    return PLACE.sub(pictures, tables.drawn(markdown, RESULTS))
