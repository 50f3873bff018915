"""Cuts from a page of Markdown the sections, paragraphs, rows, items and lines of examples with words that are gone."""

import posixpath
import re

from pruning import Gone, Module, pattern, prune, says_nothing

FENCE = re.compile(r"^( *```\w*\n.*?^ *```)$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:]+)\)")
ITEM = re.compile(r"^(?=[-*] |\d+\. |\|)", re.MULTILINE)


def names(text: str, gone: Gone) -> bool:
    """A word that may be English counts within a code span."""
    words = " ".join([*re.findall("`([^`]+)`", text), *re.findall("^::: (.*)", text)])
    in_code = {word.rpartition(".")[2] for word in re.findall(r"[\w.]+", words)}
    return bool(in_code & gone.words or pattern(frozenset(gone.words)).search(text))


def level(block: str) -> int:
    """Of a heading; 0: it is none."""
    return len(block) - len(block.lstrip("#")) if block.startswith("#") else 0


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def prune_page(text: str, gone: Gone, op: str) -> tuple[str, list[str]]:
    """The new page, empty where nothing is left, and what was cut."""
    parts = FENCE.split(text.strip())
    blocks = [
        block for i, part in enumerate(parts) for block in ([part] if i % 2 else re.split(r"\n\n+", part.strip("\n")))
    ]
    kept: list[str] = []
    cuts: list[str] = []
    inside = 0  # a section that goes: the level of its heading
    for block in filter(None, blocks):
        if level(block) and level(block) <= inside:
            inside = 0
        if level(block) and not inside and (names(block, gone) or block.lstrip("# ").lower() == op.replace("_", " ")):
            inside = level(block)
        left = "" if inside else pruned(block, gone)
        if left != block:
            cuts.append(block)
            if kept and not left and kept[-1].endswith(":"):
                cuts.append(kept.pop())
        kept += [left] if left else []
    while empty := [a for a, b in zip(kept, [*kept[1:], "# "], strict=True) if level(a) and 0 < level(b) <= level(a)]:
        kept = [block for block in kept if block not in empty]
    return ("\n\n".join(kept) + "\n" if cuts else text), cuts


def pruned(block: str, gone: Gone) -> str:
    if block.startswith("```python"):
        return pruned_example(block, gone)
    if not names(block, gone):
        return block
    items = ITEM.split(block)
    if block.startswith("```") or len(items) == 1:
        return ""
    words = "|".join(map(re.escape, gone.words))
    items = [re.sub(rf"`({words})`, |, `({words})`", "", item) if item.startswith("|") else item for item in items]
    left = [item for item in items if not names(item, gone)]
    rows = [item for item in left if item.startswith("|")]
    return "".join(left).rstrip() if len(rows) != 2 and any(left) else ""


def pruned_example(block: str, gone: Gone) -> str:
    head, code = block.split("\n", 1)
    try:
        module = Module("example", code.removesuffix("```"))
    except SyntaxError:
        return "" if names(block, gone) else block
    left, cuts = prune(module, Gone(gone.names | {f"example.{word}" for word in gone.words}, gone.words), module.loaded)
    if not cuts:
        return block
    return "" if all(map(says_nothing, left.tree.body)) else f"{head}\n{left.source}```"


def without_links(page: str, text: str, lost: set[str]) -> str:
    """The page, in which links to these pages and anchors are text alone."""

    def text_of(link: re.Match[str]) -> str:
        path, _, anchor = link[2].partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        return link[1] if {target, f"{target}#{anchor}"} & lost else link[0]

    return LINK.sub(text_of, text)
