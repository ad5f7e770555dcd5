"""Python files of the package, by name, and their syntax trees."""

from __future__ import annotations

import ast
import functools

from conftest import ROOT

PACKAGE = ROOT / "attn_export"
TEMPLATES = PACKAGE / "kits" / "python"  # code of users' projects, which lack this package
FILES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix(): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if not path.is_relative_to(TEMPLATES)
}


@functools.cache
def tree(file: str) -> ast.Module:
    return ast.parse(FILES[file].read_text(encoding="utf-8"))
