"""Python files of the package, by name, their syntax trees, and what they load."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys

from conftest import ROOT

PACKAGE = ROOT / "attn_export"
TEMPLATES = (
    PACKAGE / "parts/kits/sources/python"
)  # code of users' projects, which lack this package
FILES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix(): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if not path.is_relative_to(TEMPLATES)
}


@functools.cache
def tree(file: str) -> ast.Module:
    return ast.parse(FILES[file].read_text(encoding="utf-8"))


def loaded_by(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has after `code`."""
    code += "\nimport sys, json; sys.stdout.write(json.dumps(sorted(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return set(json.loads(ran.stdout))
