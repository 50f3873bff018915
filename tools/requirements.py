"""What jaxnorm and its extras depend on, one requirement a line: with these pip compiles no kernels, as for jaxnorm.

python tools/requirements.py docs | pip install -r /dev/stdin
"""

import re
import sys
import tomllib
from pathlib import Path


def requirements(project: dict, extras: list[str]) -> list[str]:
    """The requirements of the package and of these extras, those of jaxnorm's own extras in their place."""
    found = list(project["dependencies"])
    extras = list(extras)
    for extra in extras:
        for requirement in project["optional-dependencies"][extra]:
            if own := re.fullmatch(r"jaxnorm\[(.*)\]", requirement):
                extras += [name for name in own[1].split(",") if name not in extras]
            else:
                found.append(requirement)
    return found


if __name__ == "__main__":
    pyproject = Path(__file__).resolve().parent.parent / "pyproject.toml"
    print(*requirements(tomllib.loads(pyproject.read_text())["project"], sys.argv[1:]), sep="\n")
