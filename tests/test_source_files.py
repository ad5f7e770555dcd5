"""Tests of each file of the package, by reading it: names, sizes, and the public interface."""

from __future__ import annotations

import ast
from importlib.metadata import version

import pytest
from package_files import FILES, tree

import attn_export

pytestmark = pytest.mark.xdist_group("test_architecture")  # the tests share the parsed files


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


def test_nothing_is_printed_but_by_the_command_line():
    for file in FILES:
        calls = [node.func for node in ast.walk(tree(file)) if isinstance(node, ast.Call)]
        names = [call.id for call in calls if isinstance(call, ast.Name)]
        assert not {"print", "breakpoint", "input"} & set(names), file
