"""Removes an op from the tree in which it runs, and so shows where an op is.

    python tools/remove_op.py sandwich_norm

In the product an op is `src/ops/<op>/`, `jaxnorm/ops/<op>/`, a line of `cmake/ops.cmake`, and an import and names in
`jaxnorm/__init__.py`. Its modules of Flax, tests, benchmarks, pages and examples go as well. Prints the files that go
or that are cut, and where the product still names the op.
"""

import argparse
import os
import re
import shutil
from pathlib import Path

from pruning import Gone, Module

FOLDERS = ("jaxnorm", "src", "cmake", "tests", "bench", "docs", "examples")
SUFFIXES = (".py", ".md", ".yml", ".cmake", ".txt", ".cc", ".cu", ".h", ".cuh")
PRODUCT = ("jaxnorm/", "src/", "cmake/", "CMakeLists.txt")
ROOTS = re.compile("^(tests/lib|tests|examples/ports|examples)/")  # where modules are imported from

BLOCK = re.compile(r"(?ms)^ *```.*?^ *```$|(?:^(?! *```)[^\n]+\n?)+")  # of a page: an example or a paragraph
LINK = re.compile(r"\[([^\]]*)\]\((?:[^)\s:]*/)?([^)\s:#/]*)#?([^)\s:]*)\)")  # text, page, heading
ITEM = re.compile(r"^(?=[-*] |\d+\. |\|)", re.MULTILINE)


class Removal:
    """`texts` are the sources of the tree, of which nothing is written before `save`."""

    def __init__(self, op: str):
        self.op, self.folders = op, (f"jaxnorm/ops/{op}/", f"src/ops/{op}/")
        paths = [*Path().glob("*.*"), *(path for folder in FOLDERS for path in Path(folder).rglob("*"))]
        self.before = {str(path): path.read_text() for path in sorted(paths) if path.suffix in SUFFIXES}
        self.texts = {path: text for path, text in self.before.items() if not path.startswith(self.folders)}
        self.modules = {
            path: Module(ROOTS.sub("", path)[:-3].removesuffix("/__init__").replace("/", "."), text)
            for path, text in self.texts.items()
            if path.endswith(".py")
        }
        imports = self.modules["jaxnorm/__init__.py"].imports
        self.public = [name for name, whole in imports.items() if f".{op}." in whole]
        source = "".join(text for path, text in self.before.items() if path.startswith(self.folders[0]))
        self.gone = Gone({f"jaxnorm.ops.{op}"}, {op, *self.public, *re.findall(r'"(jaxnorm_\w+)"', source)})
        self.used = self.uses()

    def uses(self) -> set[str]:
        return {name for module in self.modules.values() for name in module.uses}

    def remove(self, path: str, name: str) -> None:
        del self.texts[path]
        self.gone.words |= {path, name}

    def prune_sources(self) -> None:
        """C++ programs of tests go that include headers of this op and of no other but norms; of CMake, the line."""
        for path, text in list(self.texts.items()):
            included = set(re.findall('#include "ops/(\\w+)/', text)) - {"norm", "shared"}
            if path.startswith("tests/") and included == {self.op}:
                self.remove(path, Path(path).stem)
            elif path.endswith(".cmake"):
                self.texts[path] = re.sub(rf"(?m)^ *jaxnorm_op\({self.op}\b.*\)\n", "", text)

    def prune_modules(self) -> bool:
        """One pass; whether more is gone. In tests and the like a name goes, too, that has lost all its users."""
        before = len(self.gone.names), len(self.gone.words)
        for path, module in list(self.modules.items()):
            module.prune(self.gone)
            self.texts[path] = module.left
            if module.left != module.source and module.says_nothing:
                self.remove(path, module.name)
                self.gone.names.add(self.modules.pop(path).name)
        used = self.uses()
        own = [module for path, module in self.modules.items() if not path.startswith(PRODUCT)]
        self.gone.names |= {f"{m.name}.{name}" for m in own for name in m.defines} & self.used - used
        return before != (len(self.gone.names), len(self.gone.words))

    def prune_pages(self) -> None:
        """And links to what has gone become text."""
        pages = [path for path in self.texts if path.endswith(".md")]
        before = {target for path in pages for target in targets(path, self.texts[path])}
        for path in pages:
            self.texts[path] = self.pruned_page(self.texts[path])
        lost = before.difference(*(targets(path, self.texts[path]) for path in pages))
        for path in pages:
            self.texts[path] = LINK.sub(lambda link: link[not lost.isdisjoint(link.group(2, 3))], self.texts[path])
            if not self.texts[path]:
                del self.texts[path]
        contents = self.texts["mkdocs.yml"].splitlines(keepends=True)
        self.texts["mkdocs.yml"] = "".join(c for c in contents if Path(c.strip(" -").rstrip()).name not in lost)

    def pruned_page(self, text: str) -> str:
        """Without the sections, paragraphs, examples, rows and items that name the op; empty where nothing is left."""
        kept: list[str] = []
        inside = 0  # a section that goes: the level of its heading
        blocks = BLOCK.findall(text)
        for block in blocks:
            depth = level(block)
            inside = 0 if 0 < depth <= inside else inside
            is_ops = self.names(block) or block.strip("# \n").lower() == self.op.replace("_", " ")
            inside = inside or depth * is_ops
            left = "" if inside else self.pruned_block(block).strip("\n")
            # What said what was to come, or is a section of nothing.
            while kept and (0 < depth <= level(kept[-1]) if left else kept[-1].endswith(":")):
                kept.pop()
            kept += [left] if left else []
        return "\n\n".join(kept) + "\n" * bool(kept) if any(map(self.names, blocks)) else text

    def pruned_block(self, block: str) -> str:
        if not self.names(block):
            return block
        words = "|".join(map(re.escape, self.gone.words))
        items = [] if block.startswith("```") else ITEM.split(block)
        items = [re.sub(rf"`({words})`, |, `({words})`", "", item) if item.startswith("|") else item for item in items]
        left = [item for item in items if not self.names(item)]
        is_head = sum(item.startswith("|") for item in left) == 2
        return "" if len(items) < 2 or is_head else "".join(left).rstrip()

    def names(self, text: str) -> bool:
        """A word that may be English counts where it is code."""
        code = " ".join([*re.findall("`([^`]+)`", text), *re.findall("^::: (.*)", text)])
        words = {word.strip(".") for word in re.findall(r"[\w.]+", code)}
        is_gone = any(word.rpartition(".")[2] in self.gone.words or self.gone.has(word) for word in words)
        return is_gone or bool(self.gone.pattern().search(text))

    def save(self) -> None:
        artefacts = {f"tests/artefacts/{name}.zip" for name in self.public}
        for gone in filter(
            os.path.exists, [*self.folders, *sorted(artefacts | self.before.keys() - self.texts.keys())]
        ):
            print(f"{gone.rstrip('/')}: goes")
            shutil.rmtree(gone) if os.path.isdir(gone) else os.remove(gone)
        for path, text in self.texts.items():
            if text != self.before[path]:
                print(f"{path}: is cut")
                Path(path).write_text(text)
            for number, line in enumerate(text.splitlines() if path.startswith(PRODUCT) else (), 1):
                if self.gone.pattern().search(line):
                    print(f"still named in {path}:{number}: {line.strip()}")


def level(block: str) -> int:
    """Of a heading; 0: it is none."""
    return len(block) - len(block.lstrip("#"))


def targets(path: str, page: str) -> set[str]:
    """What links may name: the page, and its headings."""
    headings = [block.strip("# \n").lower() for block in BLOCK.findall(page) if level(block)]
    return {re.sub(r"[^\w-]", "", heading.replace(" ", "-")) for heading in headings} | {
        Path(path).name for _ in page[:1]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=sorted(path.parent.name for path in Path("jaxnorm/ops").glob("*/op.py")))
    removal = Removal(parser.parse_args().op)
    removal.prune_sources()
    while removal.prune_modules():
        pass
    removal.prune_pages()
    removal.save()


if __name__ == "__main__":
    main()
