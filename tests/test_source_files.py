"""Tests of each file of the package, by reading it: names, sizes, and the public interface."""

from __future__ import annotations

import ast
import collections
import re
from collections.abc import Iterator
from importlib.metadata import version

import pytest
from package_files import FILES, tree

import attn_export

pytestmark = pytest.mark.xdist_group("test_architecture")  # the tests share the parsed files

# -- names --------------------------------------------------------------------------------------


NAMED_BY_OTHERS = {"Attention": "the reference evaluator finds a class by the operator's name"}


def top_names(source: ast.Module, *defined: type[ast.stmt]) -> Iterator[str]:
    """Yield the names of variables and of some kinds of definitions at the top of a file."""
    for node in source.body:
        if isinstance(node, defined):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def types_of(source: ast.Module) -> Iterator[str]:
    """Yield the public classes and aliases of types that a file defines."""
    form = re.compile("[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*")
    yield from filter(form.fullmatch, top_names(source, ast.ClassDef))


def test_no_two_classes_or_aliases_have_one_name():
    counts = collections.Counter(name for file in FILES for name in types_of(tree(file)))
    assert len(counts) > 300
    assert {name for name, count in counts.items() if count > 1} == set(NAMED_BY_OTHERS)


@pytest.mark.parametrize("source", ["class Plan: ...", "Plan = int | str", "Plan: TypeAlias = int"])
def test_classes_and_aliases_are_found(source):
    assert list(types_of(ast.parse(f"{source}\nPLAN = 1\n_Plan = T = int"))) == ["Plan"]


# -- the public interface ---------------------------------------------------------------------

PUBLIC = [
    "AttentionSpec", "Attention", "AttnExportError", "Axis", "BundleError", "DecodeSession",
    "ExportError", "GraphError", "GroupedQueryAttention", "MultiHeadAttention",
    "MultiQueryAttention", "OutputError", "ParityError", "Report", "RuntimeFailure", "SpecError",
    "Subject", "UsageError", "WeightsError", "assert_parity", "build", "pool_kv_heads", "verify",
]  # fmt: skip


def test_the_public_names_are_pinned():
    assert attn_export.__all__ == sorted(PUBLIC)
    assert attn_export.__version__ == version("attn-export")


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_there_says_what_it_is_and_is_listed(name):
    value = getattr(attn_export, name)
    assert value.__doc__
    assert value.__name__ == name
    assert value.__module__.startswith("attn_export.")
    assert name in dir(attn_export)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = attn_export.nothing


def test_type_checkers_see_every_public_name():
    (guarded,) = (node for node in tree("__init__").body if isinstance(node, ast.If))
    names = {alias.name for node in guarded.body for alias in node.names}
    assert sorted(names) == sorted(PUBLIC)


# -- what can be counted ----------------------------------------------------------------------


def test_no_file_leaves_something_to_do():
    texts = {file: path.read_text(encoding="utf-8") for file, path in FILES.items()}
    assert [file for file, text in texts.items() if re.search("TODO|FIXME|XXX", text)] == []


def test_a_file_that_runs_as_a_program_does_so_at_its_end():
    bodies = {file: tree(file).body for file in FILES}
    found = {file for file, body in bodies.items() if any(map(_is_main_guard, body))}
    assert {"__main__", "runtimes/child_main"} <= found
    assert [file for file in found if not _is_main_guard(bodies[file][-1])] == []


def _is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def test_nothing_is_printed_but_by_the_command_line():
    for file in FILES:
        calls = [node.func for node in ast.walk(tree(file)) if isinstance(node, ast.Call)]
        names = [call.id for call in calls if isinstance(call, ast.Name)]
        assert not {"print", "breakpoint", "input"} & set(names), file
