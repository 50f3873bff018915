"""Removes an op from the tree in which it runs, and so shows where an op is.

    python tools/remove_op.py sandwich_norm

In the product an op is `src/ops/<op>/`, `jaxnorm/ops/<op>/`, a line of `cmake/ops.cmake`, and an import and names in
`jaxnorm/__init__.py`. Its modules of Flax, tests, benchmarks, pages and examples go as well. Prints each file that goes
and each text that is cut, and at last where the product still names the op.
"""

import argparse
import difflib
import os
import re
import shutil
from pathlib import Path

from pruning import Gone, Module
from pruning_pages import anchors, prune_page, without_links

FOLDERS = ("jaxnorm", "src", "cmake", "tests", "bench", "docs", "examples")
SUFFIXES = (".py", ".md", ".yml", ".cmake", ".txt", ".cc", ".cu", ".h", ".cuh")
PRODUCT = ("jaxnorm/", "src/", "cmake/", "CMakeLists.txt")
ROOTS = re.compile("^(tests/lib|tests|examples/ports|examples)/")  # where modules are imported from


def module_of(path: str) -> str:
    return ROOTS.sub("", path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class Removal:
    """`texts` are the sources of the tree, of which nothing is written before `save`."""

    def __init__(self, op: str):
        self.op = op
        paths = [*Path().glob("*.*"), *(path for folder in FOLDERS for path in Path(folder).rglob("*"))]
        self.texts = {str(path): path.read_text() for path in sorted(paths) if path.suffix in SUFFIXES}
        self.before = dict(self.texts)
        self.modules = {path: Module(module_of(path), text) for path, text in self.texts.items() if path[-3:] == ".py"}
        public = [name for name, whole in self.modules["jaxnorm/__init__.py"].imports.items() if f".{op}." in whole]
        self.others = [Path(f"tests/artefacts/{name}.zip") for name in public]
        source = "".join(text for path, text in self.texts.items() if path.startswith(f"jaxnorm/ops/{op}/"))
        self.gone = Gone({f"jaxnorm.ops.{op}"}, {op, *public, *re.findall(r'"(jaxnorm_\w+)"', source)})
        self.used = self.uses()

    def uses(self) -> set[str]:
        return {name for module in self.modules.values() for name in module.uses}

    def remove(self, path: str, *words: str) -> None:
        del self.texts[path]
        self.modules.pop(path, None)
        self.gone.words |= {*words, path} if words else set()

    def remove_product(self) -> None:
        for folder in (f"src/ops/{self.op}/", f"jaxnorm/ops/{self.op}/"):
            self.others.append(Path(folder))
            for path in [path for path in self.texts if path.startswith(folder)]:
                self.remove(path)
        for path in self.texts:
            if path.endswith((".cmake", ".txt")):
                self.texts[path] = re.sub(rf"(?m)^ *jaxnorm_op\({self.op}\b.*\)\n", "", self.texts[path])

    def remove_programs(self) -> None:
        """C++ programs of tests with structs of this op and of no other, except those of norms."""
        structs = {
            path.parent.name: set(re.findall(r"(?m)^struct (\w+)", path.read_text()))
            for path in Path("src/ops").glob("*/call.h")
        }
        own = structs.pop(self.op, set())
        of_others = {
            name for op in structs if op != "norm" and Path("jaxnorm/ops", op).is_dir() for name in structs[op]
        }
        for path, text in list(self.texts.items()):
            words = set(re.findall(r"\w+", text))
            if path.startswith("tests/") and path.endswith((".cc", ".cu")) and words & own and not words & of_others:
                self.remove(path, Path(path).stem)

    def prune_modules(self) -> bool:
        """One pass; whether more is gone. In tests and the like a name goes, too, that has lost all its users."""
        before = len(self.gone.names), len(self.gone.words)
        for path, module in list(self.modules.items()):
            module.prune(self.gone)
            self.texts[path] = module.left
            if module.left != module.source and module.says_nothing():
                self.remove(path, module.name)
                self.gone.names.add(module.name)
        used = self.uses()
        own = [module for path, module in self.modules.items() if not path.startswith(PRODUCT)]
        names = {f"{m.name}.{name}" for m in own if f"{m.name}.*" not in used for name in m.defines}
        self.gone.names |= names & self.used - used
        return before != (len(self.gone.names), len(self.gone.words))

    def prune_pages(self) -> None:
        pages = {path: text for path, text in self.texts.items() if path.endswith(".md")}
        lost: set[str] = set()
        for path, text in pages.items():
            left = self.texts[path] = prune_page(text, self.gone, self.op)
            lost |= {f"{path}#{anchor}" for anchor in anchors(text) - anchors(left)}
            if not left.strip():
                self.remove(path)
                lost.add(path)
        for path in pages.keys() & self.texts.keys():
            self.texts[path] = without_links(path, self.texts[path], lost)
        contents = self.texts["mkdocs.yml"].splitlines(keepends=True)
        self.texts["mkdocs.yml"] = "".join(line for line in contents if f"docs/{line.strip(' -').rstrip()}" not in lost)

    def save(self) -> None:
        for path in self.others:
            if path.exists():
                print(f"{path}: goes")
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path, before in self.before.items():
            after = self.texts.get(path)
            if after is None and os.path.exists(path):
                print(f"{path}: goes")
                Path(path).unlink()
            elif after is not None and after != before:
                changes = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""))
                print(f"{path}: is cut", *changes[2:], sep="\n")
                Path(path).write_text(after)

    def print_rest(self) -> None:
        words = re.compile(rf"\b({'|'.join(self.gone.words)})(_fwd|_bwd)?\b")
        for path, text in self.texts.items():
            for number, line in enumerate(text.splitlines() if path.startswith(PRODUCT) else (), 1):
                if words.search(line):
                    print(f"still named in {path}:{number}: {line.strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=sorted(path.parent.name for path in Path("jaxnorm/ops").glob("*/op.py")))
    removal = Removal(parser.parse_args().op)
    removal.remove_programs()
    removal.remove_product()
    while removal.prune_modules():
        pass
    removal.prune_pages()
    removal.save()
    removal.print_rest()


if __name__ == "__main__":
    main()
