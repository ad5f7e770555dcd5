"""Templates of programs and documents, into which only require_escape values can be written.

Names, paths and numbers may come from untrusted files. Each kind of place, such as a C
string or a cell of Markdown, has one filter in `ESCAPES`. Writing a text without one is an error.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PLAIN_CODE = re.compile(r"[\w./+ ,\[\]()-]+", re.ASCII)
"""A pattern of texts that need no escape in a code span of Markdown, even in a table."""


def render(template: Path, context: Mapping[str, Any]) -> str:
    """Return the text of a template with its values."""
    import jinja2
    from markupsafe import Markup

    def require_escape(value: object) -> object:
        # Filters and macros return Markup. Integers are written alike in all languages.
        if isinstance(value, Markup) or type(value) is int:
            return value
        raise TypeError(f"{template.name} writes {value!r:.60} without an escape")

    def marked(escape: Callable[[Any], str]) -> Callable[[Any], Markup]:
        return lambda value: Markup(escape(value))

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=True,
        finalize=require_escape,
    )
    environment.filters |= {name: marked(escape) for name, escape in ESCAPES.items()}
    return environment.from_string(template.read_text(encoding="utf-8")).render(context)


def c_string(text: str) -> str:
    """Return a string literal of C and C++, with octal escapes for all but plain ASCII."""
    return f'"{"".join(map(_c_character, text.encode("utf-8", "replace")))}"'


def python(value: object) -> str:
    """Return a literal of Python, in ASCII."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or type(value) in (str, int, float, bool):
        return ascii(value)
    if isinstance(value, Mapping):
        items = [f"{python(key)}: {python(item)}" for key, item in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(python, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(python, value))},)" if value else "()"
    raise ValueError(f"{value!r:.60} has no literal in Python")


def python_comment(text: str) -> str:
    """Return the text of a comment: one line of ASCII."""
    return ascii(text)[1:-1]


def to_json(value: object) -> str:
    """Return JSON in ASCII, which is a literal of JavaScript too."""
    return json.dumps(value, allow_nan=False)


def number(value: float) -> str:
    """Return a finite number as a literal of C and C++."""
    if not math.isfinite(value):
        raise ValueError(f"{value!r:.60} is not a finite number")
    return repr(float(value))


def shell(text: str) -> str:
    """Return a word of a POSIX shell, without characters that cannot be seen."""
    return shlex.quote("".join(filter(str.isprintable, text)))


def identifier(name: str) -> str:
    """Return a name unchanged if it is an ASCII identifier, else as a JSON string."""
    return name if name.isascii() and name.isidentifier() else to_json(name)


def markdown(text: str) -> str:
    """Return Markdown, on one line, that displays a text unchanged."""
    return "".join(map(_entity, "".join(c if c.isprintable() else " " for c in text)))


def markdown_code(text: str) -> str:
    """Return a code span of Markdown, or HTML code if the text needs escapes."""
    return f"`{text}`" if PLAIN_CODE.fullmatch(text) else f"<code>{markdown(text)}</code>"


ESCAPES: Mapping[str, Callable[[Any], str]] = {
    "c_string": c_string,
    "python": python,
    "python_comment": python_comment,
    "json": to_json,
    "number": number,
    "shell": shell,
    "identifier": identifier,
    "markdown": markdown,
    "code": markdown_code,
}
"""The filters of templates, by name."""


def _c_character(byte: int) -> str:
    # Two question marks start a trigraph.
    plain = 32 <= byte < 127 and chr(byte) not in '"\\?'
    return chr(byte) if plain else f"\\{byte:03o}"


def _entity(character: str) -> str:
    return character if character.isalnum() or character in " ,.-" else f"&#{ord(character)};"
