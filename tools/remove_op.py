"""Removes an op from the tree in which it runs, and so shows where an op is.

    python tools/remove_op.py sandwich_norm

In the product an op is `src/ops/<op>/`, `jaxnorm/ops/<op>/`, a line of `cmake/ops.cmake`, and an import and names in
`jaxnorm/__init__.py`. Its modules of Flax, tests, benchmarks, pages and examples go as well. Prints each file that goes
and each text that is cut, and at last where the product still names the op.
"""

import argparse
import os
import re
import shutil
from pathlib import Path

from pruning import Gone, Module, prune, says_nothing
from pruning_pages import anchors, prune_page, without_links

FOLDERS = ("jaxnorm", "src", "cmake", "tests", "bench", "docs", "examples")
PRODUCT = ("jaxnorm/", "src/", "cmake/", "CMakeLists.txt")
ROOTS = ("tests/lib/", "tests/", "examples/ports/", "examples/")  # where modules are imported from


def files(*suffixes: str) -> list[str]:
    found = [*Path().glob("*.*"), *(path for folder in FOLDERS for path in Path(folder).rglob("*"))]
    return sorted(str(path) for path in found if path.suffix in suffixes and path.is_file())


def module_of(path: str) -> str:
    root = next((root for root in ROOTS if path.startswith(root)), "")
    return path.removeprefix(root).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class Tree:
    """The sources of the tree; what is cut is written and told at the end, but for files that go whole."""

    def __init__(self) -> None:
        paths = files(".py", ".md", ".yml", ".cmake", ".txt", ".cc", ".cu", ".h", ".cuh")
        self.texts = {path: Path(path).read_text() for path in paths}
        self.modules = {
            path: Module(module_of(path), text) for path, text in self.texts.items() if path.endswith(".py")
        }
        self.loaded = {path: module.loaded for path, module in self.modules.items()}  # before anything is cut
        self.before = dict(self.texts)
        self.cuts: dict[str, list[str]] = {}

    def write(self, path: str, text: str, cuts: list[str]) -> None:
        self.texts[path] = text
        self.cuts.setdefault(path, []).extend(cuts)
        if path in self.modules:
            self.modules[path] = Module(module_of(path), text)

    def forget(self, path: str) -> None:
        del self.texts[path]
        self.modules.pop(path, None)

    def remove(self, path: str) -> None:
        self.forget(path)
        self.cuts[path] = []

    def uses(self) -> set[str]:
        return {name for module in self.modules.values() for name in module.uses}

    def save(self) -> None:
        for path, text in self.texts.items():
            if text != self.before[path]:
                Path(path).write_text(text)
        for path, cuts in sorted(self.cuts.items()):
            if Path(path).is_dir():
                print(f"{path}: goes")
                shutil.rmtree(path)
            elif path not in self.texts:
                print(f"{path}: goes")
                Path(path).unlink()
            for cut in cuts:
                first, *more = cut.strip(" \n,").splitlines() or [""]
                print(f"{path}: cuts {first}" + (f" ... {len(more)} more lines" if more else ""))


class Removal:
    def __init__(self, op: str):
        self.op, self.tree = op, Tree()
        imports = self.tree.modules["jaxnorm/__init__.py"].imports
        public = [name for name, whole in imports.items() if f".{op}." in whole]
        archives = (f"tests/artefacts/{name}.zip" for name in public)
        self.tree.cuts |= {archive: [] for archive in archives if Path(archive).is_file()}
        source = "".join(text for path, text in self.tree.texts.items() if path.startswith(f"jaxnorm/ops/{op}/"))
        self.gone = Gone({f"jaxnorm.ops.{op}"}, {op, *public, *re.findall(r'"(jaxnorm_\w+)"', source)})
        self.used = self.tree.uses()

    def remove_product(self) -> None:
        for folder in filter(os.path.isdir, (f"src/ops/{self.op}", f"jaxnorm/ops/{self.op}")):
            for path in [path for path in self.tree.texts if path.startswith(f"{folder}/")]:
                self.tree.forget(path)
            self.tree.cuts[folder] = []
        for path in [path for path in self.tree.texts if path.endswith((".cmake", ".txt"))]:
            text = self.tree.texts[path]
            lines = re.findall(rf"^ *jaxnorm_op\({self.op}\b.*\)\n", text, re.MULTILINE)
            self.tree.write(path, text.replace("".join(lines), ""), lines)

    def prune_modules(self) -> bool:
        """One pass; whether it cut anything. In tests and the like a name goes, too, that has lost all its users."""
        before = len(self.gone.names), len(self.tree.texts)
        for path, module in list(self.tree.modules.items()):
            is_named = any(word in module.source for word in self.gone.words)
            if not is_named and not (module.uses | module.defines) & self.gone.names:
                continue
            left, cuts = prune(module, self.gone, self.tree.loaded[path])
            if not cuts:
                continue
            self.tree.write(path, left.source, cuts)
            if all(map(says_nothing, left.tree.body)):
                self.tree.remove(path)
                self.gone.names.add(module.name)
                self.gone.words |= {path, module.name}
        used = self.tree.uses()
        others = [module for path, module in self.tree.modules.items() if not path.startswith(PRODUCT)]
        own = {name for module in others if f"{module.name}.*" not in used for name in module.defines}
        self.gone.names |= own & self.used - used
        return before != (len(self.gone.names), len(self.tree.texts))

    def remove_programs(self) -> None:
        """C++ programs of tests with structs of this op and of no other, except those of norms."""
        structs: dict[str, set[str]] = {}
        for header in Path("src/ops").glob("*/call.h"):
            structs[header.parent.name] = set(re.findall(r"^struct (\w+)", header.read_text(), re.MULTILINE))
        others = [op for op in structs if Path("jaxnorm/ops", op).is_dir() and op not in ("norm", self.op)]
        of_others = {name for op in others for name in structs[op]}
        for path, text in list(self.tree.texts.items()):
            words = (
                set(re.findall(r"\w+", text)) if path.startswith("tests/") and path.endswith((".cc", ".cu")) else set()
            )
            if words & structs.get(self.op, set()) and not words & of_others:
                self.tree.remove(path)
                self.gone.words |= {path, Path(path).stem}

    def prune_pages(self) -> None:
        pages = {path: text for path, text in self.tree.texts.items() if path.endswith(".md")}
        lost: set[str] = set()
        for path, text in pages.items():
            left, cuts = prune_page(text, self.gone, self.op)
            if cuts:
                self.tree.write(path, left, cuts)
                lost |= {f"{path}#{anchor}" for anchor in anchors(text) - anchors(left)}
            if not left.strip():
                self.tree.remove(path)
                lost.add(path)
        for path in pages.keys() & self.tree.texts.keys():
            self.tree.texts[path] = without_links(path, self.tree.texts[path], lost)
        contents = self.tree.texts["mkdocs.yml"].splitlines(keepends=True)
        cuts = [line for line in contents if f"docs/{line.strip(' -').strip()}" in lost]
        self.tree.write("mkdocs.yml", "".join(line for line in contents if line not in cuts), cuts)

    def print_rest(self) -> None:
        words = re.compile(rf"\b({'|'.join(self.gone.words)})(_fwd|_bwd)?\b")
        for path, text in self.tree.texts.items():
            for number, line in enumerate(text.splitlines() if path.startswith(PRODUCT) else (), 1):
                if words.search(line):
                    print(f"still named in {path}:{number}: {line.strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ops = sorted(path.parent.name for path in Path("jaxnorm/ops").glob("*/op.py"))
    parser.add_argument("op", choices=ops)
    removal = Removal(parser.parse_args().op)
    removal.remove_programs()
    removal.remove_product()
    while removal.prune_modules():
        pass
    removal.prune_pages()
    removal.tree.save()
    removal.print_rest()


if __name__ == "__main__":
    main()
