"""Cuts from a Python source what names things that are gone, and tells which names of its own go with that.

Of a display an element goes, or an entry; a tuple within a display is a record and goes whole, as does one without
parentheses. A call goes with its argument, unless that is starred, and a function or a class with any of its statements
but an `if` without `else`. `a if b else c` and `a or b` keep what is left. Layout is left to `ruff format`.
"""

import ast
import re
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, QualifiedNameSource, ScopeProvider

# What is a list of things that go one by one, and what may stay without one of two parts.
LISTS: dict[Any, str] = dict.fromkeys((cst.Tuple, cst.List, cst.Set, cst.Dict), "elements") | {cst.Call: "args"}
LISTS |= {cst.Import: "names", cst.ImportFrom: "names", cst.Module: "body", cst.IndentedBlock: "body"}
CHOICES: dict[Any, tuple[str, str]] = {cst.IfExp: ("body", "orelse")}
CHOICES |= {cst.BooleanOperation: ("left", "right"), cst.BinaryOperation: ("left", "right")}


@dataclass
class Gone:
    """Whole names, as jaxnorm.ops.softmax or ops.SOFTMAX, and the words for them in text."""

    names: set[str]
    words: set[str]

    def has(self, name: str) -> bool:
        return not self.names.isdisjoint(prefixes(name))

    def pattern(self) -> re.Pattern[str]:
        """Of the words that cannot be English, as softmax is."""
        special = "|".join(re.escape(word) for word in sorted(self.words) if re.search("[_./]", word))
        return re.compile(rf"(?<![\w-])({special or '(?!)'})(_fwd|_bwd)?(?!\w)")


class Module:
    """A source, what is left of it, and the whole names of what that defines and uses."""

    def __init__(self, name: str, source: str):
        self.name, self.source = name, source
        self.unused: set[str] = set()  # imports that nothing uses any more
        self.seen: set[str] = set()
        self.wrapper: MetadataWrapper | None = None
        self.take(source)
        self.defined, self.loaded = self.defines, self.loads
        self.named = self.uses | {f"{name}.{defined}" for defined in self.defined}

    def prune(self, gone: Gone) -> None:
        """Cuts from the source anew, as more is gone, and adds to that."""
        words = {word for word in gone.words if word in self.source}
        while (seen := self.named & gone.names | words | self.unused) != self.seen:
            self.wrapper = self.wrapper or MetadataWrapper(cst.parse_module(self.source), unsafe_skip_copy=True)
            self.seen = seen
            self.take(self.wrapper.visit(Pruner(self, gone)).code)
            self.unused |= (self.loaded - self.loads) & self.imports.keys()
            gone.names |= {f"{self.name}.{name}" for name in self.defined - self.defines - self.unused}

    def take(self, text: str) -> None:
        self.left, tree = text, ast.parse(text)
        nodes = list(ast.walk(tree))
        self.imports: dict[str, str] = {}
        for node in nodes:
            for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                of = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                name = alias.name if of or alias.asname else alias.name.partition(".")[0]
                self.imports[alias.asname or name] = of + name
        self.defines = {*self.imports, *(name for node in tree.body for name in names_of(node))}
        self.loads = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        # What it imports, too; parameters may be fixtures.
        self.uses = {prefix for whole in self.imports.values() for prefix in prefixes(whole)}
        self.uses |= {f"{self.name}.{node.arg}" for node in nodes if isinstance(node, ast.arg)}
        self.uses |= {self.whole(n) for n in nodes if isinstance(n, ast.Name | ast.Attribute)}
        idle = (ast.Import, ast.ImportFrom, ast.Expr)
        self.says_nothing = all(isinstance(n, idle) or names_of(n) == {"pytestmark"} for n in tree.body)

    def whole(self, node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            return f"{self.whole(node.value)}.{node.attr}"
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            return self.imports.get(node.id, f"{self.name}.{node.id}")
        return ""


def prefixes(name: str) -> set[str]:
    return set(accumulate(name.split("."), "{}.{}".format))


def names_of(node: ast.stmt) -> set[str]:
    """Those that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


class Pruner(cst.CSTTransformer):
    """`marked` are the nodes that go; one that cannot go alone marks what it is in."""

    METADATA_DEPENDENCIES = (ScopeProvider,)

    def __init__(self, module: Module, gone: Gone):
        super().__init__()
        self.module, self.gone, self.pattern = module, gone, gone.pattern()
        self.within: list[Any] = [None]
        self.marked: set[Any] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        if self.is_gone(node, self.within[-1]):
            self.marked.add(node)
        self.within.append(node)
        is_docstring = isinstance(node, cst.Expr) and isinstance(node.value, cst.SimpleString)
        return not is_docstring and not isinstance(node, cst.ImportAlias)

    def is_gone(self, node: cst.CSTNode, parent: Any) -> bool:
        match node:
            case cst.ImportAlias(evaluated_name=name, evaluated_alias=alias):
                of = f"{get_full_name_for_node(parent.module)}." if hasattr(parent, "module") else ""
                return self.gone.has(of + name) or (alias or (name if of else name.split(".")[0])) in self.module.unused
            case cst.SimpleString(raw_value=text) | cst.FormattedStringText(value=text):
                is_own = f"{self.module.name}.{text}" in self.gone.names  # as in `__all__`
                return is_own or text in self.gone.words or bool(self.pattern.search(str(text)))
            case cst.Name() | cst.Attribute() if node not in (
                getattr(parent, "attr", 0),
                getattr(parent, "keyword", 0),
            ):
                scope = self.get_metadata(ScopeProvider, node, None)
                found = scope.get_qualified_names_for(node) if scope else ()
                own = {QualifiedNameSource.LOCAL: f"{self.module.name}."}
                return any(self.gone.has(own.get(whole.source, "") + whole.name) for whole in found)
        return False

    def on_leave(self, original: Any, updated: Any) -> Any:
        self.within.pop()
        if type(original) in LISTS:
            updated = self.without_items(original, updated)
        elif type(original) in CHOICES:
            updated = self.chosen(original, updated)
        match original:
            case cst.CompIf(test=cst.Comparison(comparisons=[cst.ComparisonTarget(operator=cst.NotIn())])):
                return cst.RemoveFromParent() if original in self.marked else updated
        parent = self.within[-1]
        if original in self.marked and type(parent) not in CHOICES and not self.goes_alone(original, parent):
            self.marked.add(parent)
        return updated

    def goes_alone(self, node: Any, parent: Any) -> bool:
        match parent:
            case cst.Call():
                return isinstance(node, cst.Arg) and bool(node.star)
            case cst.IndentedBlock():
                return isinstance(node, cst.If) and not node.orelse
            case cst.Tuple():
                return bool(parent.lpar) and not isinstance(self.within[-2], cst.Element | cst.DictElement)
        return type(parent) in LISTS and node in getattr(parent, LISTS[type(parent)])

    def without_items(self, original: Any, updated: Any) -> Any:
        name = LISTS[type(original)]
        items = getattr(original, name)
        is_gone = [item in self.marked for item in items]
        if original in self.marked or not any(is_gone):
            return updated
        if all(is_gone) and not isinstance(original, cst.Module):
            self.marked.add(original)
            return updated
        kept: list[Any] = []
        for item, goes in zip(getattr(updated, name), is_gone, strict=True):
            if not goes:
                kept.append(item)
            elif kept and name != "body":
                is_last = item is getattr(updated, name)[-1]
                kept[-1] = kept[-1].with_changes(comma=comma_of_both(kept[-1].comma, item.comma, is_last))
        return updated.with_changes(**{name: kept})

    def chosen(self, original: Any, updated: Any) -> Any:
        """What stays of a condition or of two operands, marked if it is nothing."""
        first, second = CHOICES[type(original)]
        loses_first = not self.marked.isdisjoint({getattr(original, first), getattr(original, "test", None)})
        loses_second = getattr(original, second) in self.marked
        if loses_first != loses_second and isinstance(getattr(original, "operator", None), cst.Or | cst.BitOr | None):
            return getattr(updated, second if loses_first else first)
        if loses_first or loses_second:
            self.marked.add(original)
        return updated


def comma_of_both(before: Any, after: Any, is_last: bool) -> Any:
    """Of an item, and of the next, which goes: comments stay with the items that they stand beside or above."""
    lines = getattr(after, "whitespace_after", None)
    if not isinstance(lines, cst.ParenthesizedWhitespace):
        return after if is_last else before
    beside = getattr(before.whitespace_after, "first_line", cst.TrailingWhitespace())
    return after.with_changes(whitespace_after=lines.with_changes(first_line=beside))
