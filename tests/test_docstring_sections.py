"""Sections of docstrings: arguments, results, errors, and shapes of arrays."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

import pytest
from package_files import FILES, tree

pytestmark = pytest.mark.xdist_group("test_architecture")  # the tests share the parsed files


def public_definitions(file: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield the module, its public classes and functions, and their public methods."""
    yield "the module", tree(file)
    stack: list[ast.AST] = [tree(file)]
    while stack:
        for node in stack.pop().body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
                yield node.name, node
                if isinstance(node, ast.ClassDef):
                    stack.append(node)


@pytest.mark.parametrize("file", FILES)
def test_everything_public_has_a_docstring(file):
    bare = [name for name, node in public_definitions(file) if not ast.get_docstring(node)]
    assert bare == []


ARRAYS = {"Tensor", "ndarray", "Array", "Pair"}
"""Names in annotations of arrays and of pairs of arrays."""

HOLDERS = {"Mapping", "dict", "Callable"}
"""Names of generic types whose arrays need no shape: they have names, or are arguments."""

SHAPE = re.compile(r"\[[\w., ·+*/…-]*\]|\b(shapes?|scalars?)\b")


def public_functions(tree: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """Yield the public functions of a module, and the public methods of its public classes."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node


def parameters(node: ast.FunctionDef) -> list[ast.arg]:
    """Return the parameters of a function, without `self` and `cls`."""
    arguments = node.args
    starred = [arg for arg in (arguments.vararg, arguments.kwarg) if arg is not None]
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *starred]
    return [parameter for parameter in named if parameter.arg not in ("self", "cls")]


def needs_sections(node: ast.FunctionDef) -> bool:
    """Return whether a function has two parameters or more, and is no command."""
    # The docstring of a command is its help text; its options have help texts of their own.
    is_command = any("command(" in ast.unparse(decorator) for decorator in node.decorator_list)
    return not is_command and len(parameters(node)) >= 2


def lacks_args(node: ast.FunctionDef) -> bool:
    """Return whether the parameters of a function are not described."""
    return needs_sections(node) and "Args:" not in (ast.get_docstring(node) or "")


def lacks_returns(node: ast.FunctionDef) -> bool:
    """Return whether the result of a function is not described."""
    result = "None" if node.returns is None else ast.unparse(node.returns)
    text = ast.get_docstring(node) or ""
    described = "Returns:" in text or re.match(r"(Return|Yield)\b", text)
    return needs_sections(node) and not described and result not in NO_RESULT


NO_RESULT = {"None", "NoReturn", "Iterator[None]"}
"""Annotations of functions without a result; the last one is that of a context manager."""


def lacks_raises(node: ast.FunctionDef) -> bool:
    """Return whether a function raises an error that it does not describe."""
    text = ast.get_docstring(node) or ""
    described = "Raises:" in text or text.startswith("Raise ")
    return needs_sections(node) and not described and any(own_errors(node))


def own_errors(node: ast.AST) -> Iterator[ast.Raise]:
    """Yield the statements that raise an error in a function, but not in functions within it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise) and child.exc is not None:
            yield child
        if not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield from own_errors(child)


def lacks_shape(node: ast.FunctionDef) -> bool:
    """Return whether a function takes or returns an array whose shape is not described."""
    annotations = [node.returns, *(parameter.annotation for parameter in parameters(node))]
    has_array = any(names_array(annotation) for annotation in annotations if annotation is not None)
    return has_array and not SHAPE.search(ast.get_docstring(node) or "")


def names_array(annotation: ast.AST) -> bool:
    """Return whether an annotation names an array, but not one in a mapping."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in HOLDERS:
        return False
    name = getattr(annotation, "id", getattr(annotation, "attr", None))
    return name in ARRAYS or any(map(names_array, ast.iter_child_nodes(annotation)))


@pytest.mark.parametrize("lacks", [lacks_args, lacks_returns, lacks_raises, lacks_shape])
def test_public_functions_describe_themselves(lacks: Callable[[ast.FunctionDef], bool]):
    undescribed = [
        f"{file}:{node.lineno}: {node.name}"
        for file in FILES
        for node in public_functions(tree(file))
        if lacks(node)
    ]
    assert not undescribed, "\n".join(undescribed)


@pytest.mark.parametrize(
    ("lacks", "source", "expected"),
    [
        (lacks_args, 'def f(a, b):\n    """Add."""', True),
        (lacks_args, 'def f(a, *, b):\n    """Add."""', True),
        (lacks_args, 'def f(a, *b):\n    """Add."""', True),
        (lacks_args, 'def f(self, a):\n    """Add."""', False),
        (lacks_args, 'def f(a, b):\n    """Add.\n\n    Args:\n        a: One.\n    """', False),
        (lacks_args, '@click.command("f")\ndef f(a, b):\n    """Add."""', False),
        (lacks_returns, 'def f(a, b) -> int:\n    """Add."""', True),
        (lacks_returns, 'def f(a) -> int:\n    """Add."""', False),
        (lacks_returns, 'def f(a, b) -> Iterator[None]:\n    """Add."""', False),
        (lacks_returns, 'def f(a, b) -> int:\n    """Return the sum."""', False),
        (lacks_returns, 'def f(a, b) -> int:\n    """Add.\n\n    Returns:\n        It."""', False),
        (lacks_raises, 'def f(a, b):\n    """Add."""\n    if a:\n        raise E', True),
        (lacks_raises, 'def f(a, b):\n    """Add."""\n    if a:\n        raise', False),
        (lacks_raises, 'def f(a, b):\n    """Add."""\n    def g(): raise E', False),
        (lacks_raises, 'def f(a, b):\n    """Raises:\n        E: If."""\n    raise E', False),
        (lacks_shape, 'def f(a: Tensor):\n    """Add."""', True),
        (lacks_shape, 'def f(a) -> tuple[np.ndarray | None, int]:\n    """Add."""', True),
        (lacks_shape, 'def f(a: Mapping[str, Array]):\n    """Add."""', False),
        (lacks_shape, 'def f(a: Tensor):\n    """Add `[B, L, H·D]`."""', False),
        (lacks_shape, 'def f(a: Array):\n    """Add arrays of any shape."""', False),
    ],
)  # fmt: skip
def test_undescribed_functions_are_found(
    lacks: Callable[[ast.FunctionDef], bool], source: str, expected: bool
):
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert lacks(function) is expected
