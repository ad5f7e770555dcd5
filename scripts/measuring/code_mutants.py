"""Mutants of this package's code: one node of a file's syntax tree is changed in each."""

from __future__ import annotations

import ast
import copy
import dataclasses
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CodeMutant:
    """A change of one place in a file of the package.

    Attributes:
        file: The file, relative to the package.
        line: The line of the change, from 1.
        span: The first and the last byte of the text that is replaced, the last one excluded.
        old: The text that is replaced.
        new: The text in its place.
        function: The function around it, as `file:line`; of rows of tables, the file.
    """

    file: str
    line: int
    span: tuple[int, int]
    old: str
    new: str
    function: str


def mutants_of(file: str, source: str) -> Iterator[CodeMutant]:
    """Yield every mutant of a file."""
    starts = [0]
    for text in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(text))
    raw = source.encode()
    for node, function in _in_functions(ast.parse(source), file):
        if (new := _changed(node)) is None:
            continue
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[node.end_lineno - 1] + node.end_col_offset
        after = ast.unparse(new)
        after = f"({after})" if isinstance(new, ast.BinOp | ast.BoolOp | ast.Compare) else after
        before = raw[first:last].decode()
        yield CodeMutant(file, node.lineno, (first, last), before, after, function)


def _in_functions(tree: ast.Module, file: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield each node that is neither documentation nor an annotation, and its function."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[ast.AST, str]]:
        if isinstance(node, ast.FunctionDef):
            function = f"{file}:{node.lineno}"
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
                if isinstance(child, ast.AST) and not is_text and not _is_for_types(child):
                    yield child, function
                    yield from visit(child, function)

    yield from visit(tree, file)


def _is_for_types(node: ast.AST) -> bool:
    """Return whether a node has no effect on a run: imports, types, f-strings, `__name__`."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")
    return isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr | ast.Assert)


def _changed(node: ast.AST) -> ast.expr | ast.stmt | None:
    """Return a copy of a node with one change, or None if none is known."""
    if isinstance(node, ast.Constant):
        value = _other_constant(node.value)
        return None if value is None else ast.Constant(value)
    new = copy.copy(node)
    match new:
        case ast.Compare(ops=[op]) if type(op) in COMPARED:
            new.ops = [COMPARED[type(op)]()]
        case ast.BinOp(op=op) if type(op) in COMPUTED:
            new.op = COMPUTED[type(op)]()
        case ast.BoolOp(op=op):
            new.op = ast.And() if isinstance(op, ast.Or) else ast.Or()
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            return new.operand
        case ast.IfExp():
            new.body, new.orelse = new.orelse, new.body
        case ast.Return(value=ast.expr()) if not isinstance(new.value, ast.Constant):
            new.value = ast.Constant(None)
        case ast.Expr(value=ast.Call()):
            return ast.Pass()
        case _:
            return None
    return new if isinstance(new, ast.expr | ast.stmt) else None


def _other_constant(value: object) -> bool | int | float | str | None:
    """Return another number, truth value or name; None for other constants and for texts."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 2 if value else 1.0
    return f"{value}_" if isinstance(value, str) and value.isidentifier() else None


def chosen(sources: Mapping[str, str], count: int, seed: int) -> list[CodeMutant]:
    """Return a sample: of each folder a share by the number of its mutants, and at least 5."""
    draw = random.Random(seed)
    by_folder: dict[str, list[CodeMutant]] = defaultdict(list)
    for file, source in sorted(sources.items()):
        folder = file.rpartition("/")[0]
        by_folder[folder] += mutants_of(file, source)
    total = sum(map(len, by_folder.values()))
    sample: list[CodeMutant] = []
    for _, mutants in sorted(by_folder.items()):
        wanted = max(5, round(count * len(mutants) / total))
        sample += draw.sample(mutants, min(wanted, len(mutants)))
    draw.shuffle(sample)
    return sample


def planted(source: str, mutant: CodeMutant) -> str:
    """Return the source with the mutant's change."""
    raw, (first, last) = source.encode(), mutant.span
    return (raw[:first] + mutant.new.encode() + raw[last:]).decode()


RECORDER = '''
"""Record of the functions that each test runs, in this process or those that it starts."""
import os
FILE = {file!r}
_seen = set()
def ran(function):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if test and (function, test) not in _seen:
        _seen.add((function, test))
        try:
            with open(FILE, "a", encoding="utf-8") as file:
                file.write(f"{{function}}\\t{{test}}\\n")
        except OSError:
            pass
'''
"""Source of a module of a traced copy, to be formatted with the path of its record."""


def traced(file: str, source: str) -> str:
    """Return the source in which each function first records that it runs."""
    lines = source.split("\n")
    insertions = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            for first in body[:1]:
                decorators = getattr(first, "decorator_list", ())
                place = decorators[0].lineno if decorators else first.lineno
                insertions.append((place, first.col_offset, node.lineno))
    for place, indent, line in sorted(insertions, reverse=True):
        if lines[place - 1][:indent].strip():
            continue  # the body stands beside `def`
        call = f'__import__("attn_export._ran")._ran.ran("{file}:{line}")'
        lines.insert(place - 1, " " * indent + call)
    return "\n".join(lines)


def sources_of(package: Path) -> dict[str, str]:
    """Return the text of every file of the package but those of kits, by relative path."""
    return {
        file.relative_to(package).as_posix(): file.read_text(encoding="utf-8")
        for file in sorted(package.rglob("*.py"))
        if "sources" not in file.relative_to(package).parts[:-1]
    }
