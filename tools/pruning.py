"""Cuts from a Python source what names things that are gone, and tells which names of its own go with that.

Of a display an element goes, or an entry; a tuple within a display is a record and goes whole. A call goes with its
argument, unless that is starred. A condition that names what is gone is false, one with `not in` is none. A function
or a class goes with any of its statements, but a branch of an `if` goes alone.
"""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, QualifiedNameSource, ScopeProvider

# What is a list of things that go one by one.
LISTS = {
    **dict.fromkeys((cst.Tuple, cst.List, cst.Set, cst.Dict), "elements"),
    **dict.fromkeys((cst.Import, cst.ImportFrom), "names"),
    **dict.fromkeys((cst.Module, cst.IndentedBlock), "body"),
    cst.Call: "args",
}
# What may stay without one of its parts.
CHOICES = (cst.If, cst.IfExp, cst.BooleanOperation, cst.BinaryOperation, cst.CompFor)


@dataclass
class Gone:
    """Whole names, as jaxnorm.ops.softmax or ops.SOFTMAX, and the words for them in text."""

    names: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        return any(part in self.names for part in accumulate(name.split("."), "{}.{}".format))

    def pattern(self) -> re.Pattern[str]:
        """Of the words that cannot be English, as softmax is."""
        special = "|".join(re.escape(word) for word in sorted(self.words) if re.search("[_./]", word))
        return re.compile(rf"(?<![\w-])({special or '(?!)'})(_fwd|_bwd)?(?!\w)")


class Module:
    """A source, what is left of it, and the whole names of what that defines and uses."""

    def __init__(self, name: str, source: str):
        self.name, self.source, self.left = name, source, source
        self.unused: set[str] = set()  # imports that nothing uses any more
        self.seen: set[str] = set()
        self.parse()
        self.defined, self.loaded = self.defines, self._loads()
        self.named = self.uses | {f"{name}.{defined}" for defined in self.defined}

    @cached_property
    def wrapper(self) -> MetadataWrapper:
        return MetadataWrapper(cst.parse_module(self.source), unsafe_skip_copy=True)

    def prune(self, gone: Gone) -> None:
        """Cuts from the source anew, as more is gone, and adds to that."""
        while (
            seen := self.named & gone.names | {w for w in gone.words if w in self.source} | self.unused
        ) != self.seen:
            self.seen = seen
            self.left = self.wrapper.visit(Pruner(self, gone)).code
            self.parse()
            unused = (self.loaded - self._loads()) & self.imports.keys()
            gone.names |= {f"{self.name}.{name}" for name in self.defined - self.defines - self.unused - unused}
            self.unused |= unused

    def parse(self) -> None:
        self.tree = ast.parse(self.left)
        self.imports: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                of = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    name = alias.name if of or alias.asname else alias.name.partition(".")[0]
                    self.imports[alias.asname or name] = of + name
        self.defines = {*self.imports, *(name for node in self.tree.body for name in names_of(node))}
        self.uses = self._uses()

    def _loads(self) -> set[str]:
        return {n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}

    def _uses(self) -> set[str]:
        """Of what it imports too, and `module.*` where names are looked up; parameters may be fixtures."""
        found = {name for whole in self.imports.values() for name in accumulate(whole.split("."), "{}.{}".format)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.arg):
                found.add(f"{self.name}.{node.arg}")
            elif isinstance(node, ast.Call) and is_lookup(node):
                found.add(f"{self.whole_name(node.args[0])}.*")
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(self.whole_name(node))
        return found

    def whole_name(self, node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            return f"{self.whole_name(node.value)}.{node.attr}"
        return self.imports.get(node.id, f"{self.name}.{node.id}") if isinstance(node, ast.Name) else ""

    def says_nothing(self) -> bool:
        """Whether it has no use any more."""
        imports = (ast.Import, ast.ImportFrom)
        return all(
            isinstance(node, imports) or is_text(node) or "pytestmark" in names_of(node) for node in self.tree.body
        )


def is_lookup(node: ast.Call) -> bool:
    return ast.unparse(node.func) == "getattr" and not isinstance(node.args[1], ast.Constant)


def is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def names_of(node: ast.stmt) -> set[str]:
    """Those that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return set()


class Pruner(cst.CSTTransformer):
    """`marked` are the nodes that go; one that cannot go alone marks what it is in."""

    METADATA_DEPENDENCIES = (ScopeProvider,)

    def __init__(self, module: Module, gone: Gone):
        super().__init__()
        self.module, self.gone, self.pattern = module, gone, gone.pattern()
        self.within: list[cst.CSTNode] = []
        self.marked: set[cst.CSTNode] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        parent = self.within[-1] if self.within else None
        self.within.append(node)
        if isinstance(node, cst.Expr) and isinstance(node.value, cst.SimpleString | cst.ConcatenatedString):
            return False  # a docstring
        if self.is_gone(node, parent):
            self.marked.add(node)
        return not isinstance(node, cst.ImportAlias)

    def is_gone(self, node: cst.CSTNode, parent: cst.CSTNode | None) -> bool:
        if isinstance(node, cst.ImportAlias):
            of = f"{get_full_name_for_node(parent.module)}." if isinstance(parent, cst.ImportFrom) else ""
            local = node.evaluated_alias or node.evaluated_name.partition("." if not of else " ")[0]
            return self.gone.has(of + node.evaluated_name) or local in self.module.unused
        if isinstance(node, cst.SimpleString | cst.FormattedStringText):
            text = node.value if isinstance(node, cst.FormattedStringText) else str(node.raw_value)
            is_own = f"{self.module.name}.{text}" in self.gone.names  # as in `__all__`
            return is_own or text in self.gone.words or bool(self.pattern.search(text))
        is_label = (isinstance(parent, cst.Attribute) and node is parent.attr) or (
            isinstance(parent, cst.Arg) and node is parent.keyword
        )
        if is_label or not isinstance(node, cst.Name | cst.Attribute):
            return False
        scope = self.get_metadata(ScopeProvider, node, None)
        found = scope.get_qualified_names_for(node) if scope else ()
        return any(
            self.gone.has(f"{self.module.name}.{n.name}" if n.source is QualifiedNameSource.LOCAL else n.name)
            for n in found
        )

    def on_leave(self, original: Any, updated: Any) -> Any:
        self.within.pop()
        if type(original) in LISTS:
            updated = self.with_items(original, updated)
        elif isinstance(original, CHOICES):
            updated = self.chosen(original, updated)
        parent = self.within[-1] if self.within else None
        is_item = type(parent) in LISTS and original in getattr(parent, LISTS[type(parent)])
        if original in self.marked and parent and not is_item and not isinstance(parent, CHOICES):
            self.marked.add(parent)
        return updated

    def with_items(self, original: Any, updated: Any) -> Any:
        name = LISTS[type(original)]
        items: Sequence[Any] = getattr(original, name)
        gone = [item for item in items if item in self.marked]
        if not gone or original in self.marked:
            return updated
        if isinstance(original, cst.Call):
            goes = not all(item.star for item in gone)
        elif isinstance(original, cst.IndentedBlock):
            goes = not all(isinstance(item, cst.If) and not item.orelse for item in gone)
        else:
            # What is returned, or given to several names, goes whole as well: it has no parentheses.
            is_record = isinstance(self.within[-1], cst.Element | cst.DictElement) if self.within else False
            goes = isinstance(original, cst.Tuple) and (is_record or not original.lpar)
        if goes or (len(gone) == len(items) and not isinstance(original, cst.Module)):
            self.marked.add(original)
            return updated
        kept: list[Any] = []
        for old, new in zip(items, getattr(updated, name), strict=True):
            if old not in self.marked:
                kept.append(new)
            elif kept and name != "body":
                kept[-1] = kept[-1].with_changes(comma=comma_of_both(kept[-1].comma, new.comma, old is items[-1]))
        return updated.with_changes(**{name: kept})

    def chosen(self, original: Any, updated: Any) -> Any:
        """What stays of a condition or of two operands, marked if it is nothing."""
        if isinstance(original, cst.CompFor):
            gone = [part for part in original.ifs if part in self.marked]
            others = (original.target, original.iter, original.inner_for_in)
            if any(part in self.marked for part in others) or not all(map(is_not_in, gone)):
                self.marked.add(original)
            left = [new for old, new in zip(original.ifs, updated.ifs, strict=True) if old not in self.marked]
            return updated.with_changes(ifs=left) if gone else updated
        if isinstance(original, cst.If | cst.IfExp):
            first, second = original.body, original.orelse
            loses = [original.test in self.marked or first in self.marked, second in self.marked]
        else:
            first, second = original.left, original.right
            loses = [first in self.marked, second in self.marked]
            if any(loses) and not isinstance(original.operator, cst.Or | cst.BitOr):
                loses = [True, True]
        if not any(loses):
            return updated
        if isinstance(original, cst.If) and not loses[0]:
            return updated.with_changes(orelse=None)
        if all(loses) or (isinstance(original, cst.If) and not isinstance(second, cst.If)):
            self.marked.add(original)
            return updated
        if isinstance(original, cst.If):
            return updated.orelse.with_changes(leading_lines=updated.leading_lines)
        kept = {"body": updated.body, "orelse": updated.orelse} if isinstance(original, cst.IfExp) else {}
        kept = list(kept.values()) or [updated.left, updated.right]
        return kept[1 if loses[0] else 0]


def is_not_in(condition: cst.CompIf) -> bool:
    test = condition.test
    return isinstance(test, cst.Comparison) and isinstance(test.comparisons[0].operator, cst.NotIn)


def comma_of_both(before: Any, after: Any, is_last: bool) -> Any:
    """Of an item, and of the next, which goes: comments stay with the items that they stand beside or above."""
    lines = getattr(after, "whitespace_after", None)
    if not isinstance(lines, cst.ParenthesizedWhitespace):
        return after if is_last else before
    own = before.whitespace_after
    first = own.first_line if isinstance(own, cst.ParenthesizedWhitespace) else cst.TrailingWhitespace()
    return after.with_changes(whitespace_after=lines.with_changes(first_line=first))
