"""Cuts from a page of Markdown the sections, paragraphs, examples, rows and items that name what is gone."""

import posixpath
import re

from pruning import Gone

FENCE = re.compile(r"^( *```\w*\n.*?^ *```)$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:]+)\)")
ITEM = re.compile(r"^(?=[-*] |\d+\. |\|)", re.MULTILINE)


def names(text: str, gone: Gone) -> bool:
    """A word that may be English counts where it is code."""
    code = " ".join([*re.findall("`([^`]+)`", text), *re.findall("^::: (.*)", text)])
    words = {word.strip(".") for word in re.findall(r"[\w.]+", code)}
    is_gone = any(word.rpartition(".")[2] in gone.words or gone.has(f"jaxnorm.{word}") for word in words)
    return is_gone or any(map(gone.has, words)) or bool(gone.pattern().search(text))


def level(block: str) -> int:
    """Of a heading; 0: it is none."""
    return len(block) - len(block.lstrip("#"))


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def prune_page(text: str, gone: Gone, op: str) -> str:
    """The page, empty where nothing is left."""
    parts = [[part] if i % 2 else re.split(r"\n\n+", part.strip("\n")) for i, part in enumerate(FENCE.split(text))]
    blocks = [block for part in parts for block in part if block]
    kept: list[str] = []
    inside = 0  # a section that goes: the level of its heading
    for block in blocks:
        if 0 < level(block) <= inside:
            inside = 0
        if level(block) and not inside and (names(block, gone) or block.lstrip("# ").lower() == op.replace("_", " ")):
            inside = level(block)
        left = "" if inside else pruned(block, gone)
        if not left and kept and kept[-1].endswith(":"):
            kept.pop()
        kept += [left] if left else []
    if kept == blocks:
        return text
    while empty := [a for a, b in zip(kept, [*kept[1:], "# "], strict=True) if 0 < level(b) <= level(a)]:
        kept = [block for block in kept if block not in empty]
    return "\n\n".join(kept) + "\n"


def pruned(block: str, gone: Gone) -> str:
    if not names(block, gone):
        return block
    words = "|".join(map(re.escape, gone.words))
    items = ITEM.split(block) if not block.startswith("```") else []
    items = [re.sub(rf"`({words})`, |, `({words})`", "", item) if item.startswith("|") else item for item in items]
    left = [item for item in items if not names(item, gone)]
    is_head = sum(item.startswith("|") for item in left) == 2
    return "" if len(items) < 2 or is_head else "".join(left).rstrip()


def without_links(page: str, text: str, lost: set[str]) -> str:
    """The page, in which links to these pages and anchors are text alone."""

    def text_of(link: re.Match[str]) -> str:
        path, _, anchor = link[2].partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        return link[1] if {target, f"{target}#{anchor}"} & lost else link[0]

    return LINK.sub(text_of, text)
