"""Cuts from a Python file what refers to names that are gone, and tells which of its own names go with that.

Of a display an element goes, or an entry; a tuple within a display is a record and goes whole. A call goes with its
argument, unless that is starred. Of `a if b else c` the other branch stays, and `op in GONE` is false. A function goes
with any of its statements, but a branch of an `if` goes alone, and so does an assert beside others.
"""

import ast
import enum
import io
import re
import tokenize
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate, pairwise


class Found(enum.Enum):
    KEPT, GONE, FALSE, TRUE = range(4)


KEPT, GONE, FALSE, TRUE = Found
NOT = {KEPT: KEPT, GONE: GONE, FALSE: TRUE, TRUE: FALSE}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


@dataclass
class Gone:
    """Names with their modules, as jaxnorm.ops.softmax or ops.SOFTMAX, and the words for them in text."""

    names: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)

    def has(self, name: str | None) -> bool:
        parts = (name or "").split(".")
        return any(".".join(parts[: i + 1]) in self.names for i in range(len(parts)))

    def is_in(self, text: str) -> bool:
        """A word that may be English, as softmax, counts where it is all there is."""
        return text in self.words or bool(pattern(frozenset(self.words)).search(text))


@cache
def pattern(words: frozenset[str]) -> re.Pattern[str]:
    special = "|".join(re.escape(word) for word in sorted(words) if re.search("[_./]", word))
    return re.compile(rf"(?<![\w-])({special or '(?!)'})(_fwd|_bwd)?(?!\w)")


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def says_nothing(node: ast.stmt) -> bool:
    """Whether a file of such statements has no use."""
    return is_docstring(node) or isinstance(node, ast.Import | ast.ImportFrom) or "pytestmark" in defined(node)


def stored(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def loaded(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def defined(node: ast.stmt) -> set[str]:
    """The names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return {name for target in getattr(node, "targets", [getattr(node, "target", None)]) for name in stored(target)}
    return set()


class Module:
    """A source, and the whole names of what it defines, imports and uses."""

    def __init__(self, name: str, source: str):
        self.name, self.source, self.tree = name, source, ast.parse(source)
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.imports: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.imports |= {local(alias): imported(node, alias) for alias in node.names}

    @cached_property
    def tokens(self) -> list[tuple[int, int, str]]:
        tokens = tokenize.generate_tokens(io.StringIO(self.source).readline)
        return [(self.at(*t.start), self.at(*t.end), t.string) for t in tokens if t.type not in LAYOUT]

    def at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where its text begins and ends. A column of `ast` counts bytes."""

        def at(line: int, column: int) -> int:
            text = self.source[self.starts[line - 1] : self.starts[line]]
            return self.at(line, len(text.encode()[:column].decode()))

        n: ast.expr = node  # type: ignore[assignment]  # or a statement, an alias, a keyword
        return at(n.lineno, n.col_offset), at(n.end_lineno or 0, n.end_col_offset or 0)

    def whole_name(self, node: ast.AST | None) -> str | None:
        if isinstance(node, ast.Attribute):
            of = self.whole_name(node.value)
            return of and f"{of}.{node.attr}"
        return self.imports.get(node.id, f"{self.name}.{node.id}") if isinstance(node, ast.Name) else None

    @cached_property
    def defines(self) -> set[str]:
        return {f"{self.name}.{name}" for node in self.tree.body for name in defined(node)}

    @cached_property
    def loaded(self) -> set[str]:
        return loaded(self.tree)

    @cached_property
    def uses(self) -> set[str]:
        """Whole names, of what it imports too, and `module.*` where names are looked up; parameters may be fixtures."""
        found = {name for whole in self.imports.values() for name in accumulate(whole.split("."), "{}.{}".format)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.arg):
                found.add(f"{self.name}.{node.arg}")
            elif isinstance(node, ast.Call) and is_lookup(node):
                found.add(f"{self.whole_name(node.args[0])}.*")
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(self.whole_name(node) or "")
        return found


def is_lookup(node: ast.Call) -> bool:
    """Whether it gets something by a name that only runs tell."""
    return ast.unparse(node.func) == "getattr" and not isinstance(node.args[1], ast.Constant)


def local(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def imported(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    if isinstance(node, ast.ImportFrom):
        return f"{node.module}.{alias.name}"
    return alias.name if alias.asname else alias.name.partition(".")[0]


class Pruner:
    """One pass over a module: `edits` are what to cut, and names that go are added to `gone`."""

    def __init__(self, module: Module, gone: Gone, unused: Set[str] = frozenset()):
        """`unused`: names of imports that go, too."""
        self.module, self.gone, self.unused = module, gone, unused
        self.source, self.starts, self.span = module.source, module.starts, module.span
        self.shadowed: set[str] = set()
        self.loaded: set[str] | None = None  # by the function in which a statement is
        self.edits: list[tuple[int, int, str]] = []
        name = module.name
        for node in module.tree.body:
            names = {f"{name}.{n}" for n in defined(node)}
            self.exports = f"{name}.__all__" in names
            if (names and names <= gone.names) or self.statement(node) is GONE:
                self.cut(node)
                gone.names |= names
                if isinstance(node, ast.Import | ast.ImportFrom):
                    gone.names |= {f"{name}.{local(alias)}" for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                gone.names |= {f"{name}.{local(a)}" for a in node.names if gone.has(imported(node, a))}

    def pruned(self) -> tuple[str, list[str]]:
        """The new source, and what was cut from the old one."""
        outer = [e for e in set(self.edits) if not any(o[0] <= e[0] and e[1] <= o[1] and o != e for o in self.edits)]
        text = self.source
        for start, end, new in sorted(outer, reverse=True):
            text = text[:start] + new + text[end:]
        cuts = [self.source[start:end] for start, end, _ in sorted(outer) if end > start]
        return re.sub(r"\n{4,}", "\n\n\n", text).strip() + "\n", cuts

    # Statements

    def cut(self, node: ast.stmt) -> None:
        """Its lines, with comments above it."""
        first = min(n.lineno for n in (node, *getattr(node, "decorator_list", ())))
        lines = self.source.splitlines()
        while first > 1 and lines[first - 2].lstrip().startswith("#"):
            first -= 1
        self.edits.append((self.starts[first - 1], self.starts[node.end_lineno or 0], ""))

    def each(self, targets: ast.Tuple, values: ast.Tuple) -> Found:
        """Of names that are given together, some."""
        gone = [self.is_gone(value) for value in values.elts]
        if any(gone) and self.loaded is not None:
            return GONE
        pairs = list(zip([stored(target) for target in targets.elts], gone, strict=True))
        self.gone.names |= {f"{self.module.name}.{name}" for names, is_gone in pairs if is_gone for name in names}
        gone = [is_gone or self.is_unused(names) for names, is_gone in pairs]
        self.items(targets, targets.elts, gone)
        return self.items(values, values.elts, gone)

    def is_unused(self, names: Set[str]) -> bool:
        return bool(names) and self.loaded is not None and not any(n in self.loaded or n.startswith("_") for n in names)

    def body(self, nodes: Sequence[ast.stmt]) -> Found:
        unused = [node for node in nodes if isinstance(node, ast.Assign) and self.is_unused(defined(node))]
        for node in unused:
            self.cut(node)
        gone = [node for node in nodes if node not in unused and self.statement(node) is GONE]
        left = [node for node in nodes if node not in gone and not is_docstring(node)]
        may_go = ast.If | ast.Assert if any(isinstance(node, ast.Assert) for node in left) else ast.If
        if gone and not (left and all(isinstance(node, may_go) for node in gone)):
            return GONE
        for node in gone:
            self.cut(node)
        return KEPT

    def statement(self, node: ast.stmt) -> Found:
        if is_docstring(node):
            return KEPT
        if isinstance(node, ast.Import | ast.ImportFrom):
            gone = [self.gone.has(imported(node, alias)) or local(alias) in self.unused for alias in node.names]
            return self.items(node, node.names, gone)
        if isinstance(node, ast.If):
            return self.branches(node)
        if isinstance(node, ast.Assert):
            return KEPT if self.look(node.test) is KEPT else GONE
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=names) as targets], value=ast.Tuple(elts=values) as given):
                if len(names) == len(values) and not any(isinstance(name, ast.Starred) for name in names):
                    return self.each(targets, given)
        with self.scope(node):
            for _, value in ast.iter_fields(node):
                children = value if isinstance(value, list) else [value]
                if children and isinstance(children[0], ast.stmt):
                    found = self.body(children)
                else:
                    found = self.all([child for child in children if isinstance(child, ast.AST)])
                if found is GONE:
                    return GONE
        return KEPT

    def branches(self, node: ast.If) -> Found:
        test = self.look(node.test)
        if test is KEPT and self.body(node.body) is GONE:
            test = FALSE
        if test is KEPT:
            if node.orelse and self.body(node.orelse) is GONE:
                self.edits.append((self.span(node.body[-1])[1], self.span(node)[1], ""))
            return KEPT
        left = node.body if test is TRUE else node.orelse
        if not left:
            return GONE
        start, end = self.starts[left[0].lineno - 1], self.span(left[-1])[1]
        text = self.source[start:end]
        if self.source[: self.span(left[0])[0] + 4].endswith("elif"):
            text = text.replace("elif", "if", 1)
        else:
            text = re.sub("^    ", "", text, flags=re.MULTILINE)
        self.edits.append((self.starts[node.lineno - 1], self.span(node)[1], text))
        return KEPT

    @contextmanager
    def scope(self, node: ast.AST) -> Iterator[None]:
        """Within a function or a comprehension its own names are no module's."""
        before = self.shadowed, self.loaded
        if isinstance(node, ast.ClassDef):
            self.loaded = None
        elif isinstance(node, FUNCTIONS):
            self.loaded = loaded(node)
            names = {n.arg for n in ast.walk(node.args) if isinstance(n, ast.arg)}
            self.shadowed = self.shadowed | names | stored(node)
        elif isinstance(node, COMPREHENSIONS):
            self.shadowed = self.shadowed.union(*(stored(generator.target) for generator in node.generators))
        yield
        self.shadowed, self.loaded = before

    # Expressions

    def all(self, nodes: Sequence[ast.AST]) -> Found:
        """GONE if one is; a condition that is decided is written down."""
        found = [self.look(node) for node in nodes]
        self.edits += [(*self.span(n), str(f is TRUE)) for n, f in zip(nodes, found, strict=True) if f in (TRUE, FALSE)]
        return GONE if GONE in found else KEPT

    def look(self, node: ast.AST, record: bool = False) -> Found:
        match node:
            case ast.Constant(value=str(text)):
                exports = self.exports and self.gone.has(f"{self.module.name}.{text}")
                return GONE if exports or self.gone.is_in(text) else KEPT
            case ast.Name(ctx=ast.Store()):
                return KEPT
            case ast.Name() | ast.Attribute():
                of = node
                while isinstance(of, ast.Attribute):
                    of = of.value
                if not isinstance(of, ast.Name):
                    return self.look(of)
                return GONE if of.id not in self.shadowed and self.gone.has(self.module.whole_name(node)) else KEPT
            case ast.JoinedStr():
                edits = len(self.edits)
                found = self.all(list(ast.iter_child_nodes(node)))
                del self.edits[edits:]
                return found
            case ast.Tuple(elts=elts) | ast.List(elts=elts) | ast.Set(elts=elts):
                gone = [self.is_gone(element) for element in elts]
                return GONE if record and any(gone) and isinstance(node, ast.Tuple) else self.items(node, elts, gone)
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                return self.items(node, values, [bool(k and self.is_gone(k)) | self.is_gone(v) for k, v in pairs])
            case ast.Call():
                args = sorted((*node.args, *node.keywords), key=self.span)
                gone = [self.all([arg]) is GONE for arg in args]
                starred = [isinstance(a, ast.Starred) or (isinstance(a, ast.keyword) and not a.arg) for a in args]
                if self.all([node.func]) is GONE or any(g and not s for g, s in zip(gone, starred, strict=True)):
                    return GONE
                return self.items(node, args, gone)
            case ast.Compare(left=left, ops=[*_, operator], comparators=others):
                if self.all([left, *others]) is KEPT or any(isinstance(n, ast.Call) for n in ast.walk(node)):
                    return self.all([left, *others])
                return TRUE if isinstance(operator, ast.NotIn | ast.NotEq | ast.IsNot) else FALSE
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return NOT[self.look(operand)]
            case ast.BoolOp(op=operator, values=values):
                found = [self.look(value) for value in values]
                decides = FALSE if isinstance(operator, ast.And) else TRUE
                if GONE in found or decides in found:
                    return GONE if GONE in found else decides
                word = "and" if decides is FALSE else "or"
                return (
                    NOT[decides]
                    if KEPT not in found
                    else self.items(node, values, [f is not KEPT for f in found], word)
                )
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self.items(node, [left, right], [self.is_gone(left), self.is_gone(right)], "|")
            case ast.BinOp(left=left, op=ast.Mult(), right=right) if FALSE in (self.look(left), self.look(right)):
                return GONE
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.chosen(node, test, body, orelse)
            case ast.comprehension(ifs=conditions):
                found = [self.look(condition) for condition in conditions]
                for condition, decided in zip(conditions, found, strict=True):
                    if decided is TRUE:
                        self.edits.append(
                            (self.last("if", self.span(condition)[0])[0] - 1, self.span(condition)[1], "")
                        )
                return GONE if GONE in found or FALSE in found else self.all([node.target, node.iter])
        with self.scope(node):
            return self.all(list(ast.iter_child_nodes(node)))

    def is_gone(self, node: ast.AST) -> bool:
        found = self.look(node, record=True)
        return found is GONE if found in (KEPT, GONE) else self.all([node]) is GONE

    def chosen(self, node: ast.IfExp, test: ast.expr, body: ast.expr, orelse: ast.expr) -> Found:
        found, (start, end) = self.look(test), self.span(node)
        gone = [self.is_gone(body), self.is_gone(orelse)]
        if found in (GONE, FALSE) or gone[0]:
            self.edits.append((start, self.last("else", self.span(orelse)[0])[1] + 1, ""))
            return GONE if gone[1] else KEPT
        if found is TRUE or gone[1]:
            self.edits.append((self.last("if", self.span(test)[0])[0] - 1, end, ""))
        return KEPT

    def last(self, word: str, before: int) -> tuple[int, int]:
        """The last such token that ends before."""
        return max((start, end) for start, end, text in self.module.tokens if text == word and end <= before)

    def items(self, node: ast.AST, items: Sequence[ast.AST], gone: Sequence[bool], separator: str = ",") -> Found:
        """Cuts these items of a display, a call, an import or a chain of operators; GONE if none is left."""
        if not any(gone) or all(gone):
            return GONE if gone and all(gone) else KEPT
        spans, (start, end) = [self.span(item) for item in items], self.span(node)
        between = [(a[1], b[0]) for a, b in pairwise(spans)]
        at = [next(t for t in self.module.tokens if t[2] == separator and a <= t[0] < b) for a, b in between]
        begins = [self.begin(node, spans[0][0], start, at), *(self.after(t[1]) for t in at)]
        last = max(i for i, is_gone in enumerate(gone) if not is_gone)
        self.edits += [(begins[i], begins[i + 1], "") for i in range(last) if gone[i]]
        one = isinstance(node, ast.Tuple) and gone.count(False) == 1
        rest = [t for t in self.module.tokens if spans[-1][1] <= t[0] and t[1] <= end]
        trailing = next((t for t in rest if t[2] == ","), None)
        closing = (
            0 if separator != "," else sum(t[2] == "(" for t in self.module.tokens if at[-1][1] <= t[0] < spans[-1][0])
        )
        stop = trailing[1] if trailing else rest[closing - 1][1] if closing else spans[-1][1]
        if separator != ",":
            stop = end
        if last < len(items) - 1:
            keeps = trailing or one
            self.edits.append((at[last][1] if keeps else at[last][0] - (separator != ","), stop, ""))
        elif one and not trailing:
            self.edits.append((stop, stop, ","))
        return KEPT

    def begin(self, node: ast.AST, first: int, start: int, at: list[tuple[int, int, str]]) -> int:
        """Where the first item begins, with what brackets it."""
        if isinstance(node, ast.Dict | ast.List | ast.Set):
            return self.after(start + 1)
        if isinstance(node, ast.Call):
            return self.after(next(t[1] for t in self.module.tokens if t[2] == "(" and t[0] >= self.span(node.func)[1]))
        return first if isinstance(node, ast.Tuple | ast.Import | ast.ImportFrom) else start

    def after(self, position: int) -> int:
        """The next token that is no comment on the same line."""
        start, _, text = next(t for t in self.module.tokens if t[0] >= position)
        if text.startswith("#") and "\n" not in self.source[position:start]:
            return self.after(start + len(text))
        return start


def prune(module: Module, gone: Gone, loaded: Set[str]) -> tuple[Module, list[str]]:
    """What is left and what was cut; `loaded`: the names that the module used before anything was."""
    cuts: list[str] = []
    while True:
        text, more = Pruner(module, gone, loaded - module.loaded).pruned()
        if not more:
            return module, cuts
        module, cuts = Module(module.name, text), cuts + more
