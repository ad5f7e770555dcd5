"""A kit on disk: templates rendered, the rest copied."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn_export.code_templates import render
from attn_export.kits.languages import HERE, Language

TEMPLATE = ".j2"
LEFT_OUT = shutil.ignore_patterns("__pycache__", "node_modules", "build")


def write_project(language: Language, context: Mapping[str, Any], folder: Path) -> None:
    """Write a language's files.

    Args:
        language: The kit's template.
        context: Values that the templates use.
        folder: An existing folder; gets the files.
    """
    for source, place in language.folders.items():
        shutil.copytree(HERE / source, folder / place, dirs_exist_ok=True, ignore=LEFT_OUT)
    for template in sorted(folder.rglob(f"*{TEMPLATE}")):
        template.with_suffix("").write_text(render(template, context), encoding="utf-8")
        template.unlink()
