"""Escapes of texts and numbers in the languages of kits."""

from __future__ import annotations

import json
import math
import re

from attn_export.code_templates import Escapes

_PLAIN_CODE = re.compile(r"[\w./+ ,\[\]()-]+", re.ASCII)
"""A pattern of texts that need no escape in a code span of Markdown, even in a table."""


def c_string(text: str) -> str:
    """Return a string literal of C and C++, with octal escapes for all but plain ASCII."""
    return f'"{"".join(map(_c_character, text.encode("utf-8", "replace")))}"'


def to_json(value: object) -> str:
    """Return JSON in ASCII, which is a literal of JavaScript too."""
    return json.dumps(value, allow_nan=False)


def number(value: float) -> str:
    """Return a finite number as a literal of C and C++."""
    if not math.isfinite(value):
        raise ValueError(f"{value!r:.60} is not a finite number")
    return repr(float(value))


def identifier(name: str) -> str:
    """Return a name unchanged if it is an ASCII identifier, else as a JSON string."""
    return name if name.isascii() and name.isidentifier() else to_json(name)


def markdown(text: str) -> str:
    """Return Markdown, on one line, that displays a text unchanged."""
    return "".join(map(_entity, "".join(c if c.isprintable() else " " for c in text)))


def markdown_code(text: str) -> str:
    """Return a code span of Markdown, or HTML code if the text needs escapes."""
    return f"`{text}`" if _PLAIN_CODE.fullmatch(text) else f"<code>{markdown(text)}</code>"


KIT_ESCAPES: Escapes = {
    "c_string": c_string,
    "json": to_json,
    "number": number,
    "identifier": identifier,
    "markdown": markdown,
    "code": markdown_code,
}
"""The filters of kits' templates beside those of all templates."""


def _c_character(byte: int) -> str:
    # Two question marks start a trigraph.
    plain = 32 <= byte < 127 and chr(byte) not in '"\\?'
    return chr(byte) if plain else f"\\{byte:03o}"


def _entity(character: str) -> str:
    return character if character.isalnum() or character in " ,.-" else f"&#{ord(character)};"
