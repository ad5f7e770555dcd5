"""A kit on disk: templates rendered, the rest copied."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn_export.kits.languages import HERE, Language

TEMPLATE = ".j2"
LEFT_OUT = shutil.ignore_patterns("__pycache__", "node_modules", "build")


def write_project(language: Language, context: Mapping[str, Any], folder: Path) -> None:
    """Write a language's files.

    Args:
        language: Which.
        context: What the templates use.
        folder: Is there; gets the files.
    """
    for source, place in language.folders.items():
        shutil.copytree(HERE / source, folder / place, dirs_exist_ok=True, ignore=LEFT_OUT)
    for template in sorted(folder.rglob(f"*{TEMPLATE}")):
        template.with_suffix("").write_text(_rendered(template, context), encoding="utf-8")
        template.unlink()


def _rendered(template: Path, context: Mapping[str, Any]) -> str:
    import jinja2

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=template.with_suffix("").suffix == ".html",
    )
    environment.filters["c_string"] = _c_string
    return environment.from_string(template.read_text(encoding="utf-8")).render(context)


def _c_string(text: str) -> str:
    """Return a literal of C and C++: what is not plain ASCII as the octal of its UTF-8 bytes."""
    return f'"{"".join(map(_c_character, text.encode("utf-8", "replace")))}"'


def _c_character(byte: int) -> str:
    # Two question marks begin a trigraph.
    plain = 32 <= byte < 127 and chr(byte) not in '"\\?'
    return chr(byte) if plain else f"\\{byte:03o}"
