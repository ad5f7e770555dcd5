"""Chat templates of checkpoints and bundles, and messages as transformers renders them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from attn_export.errors import BundleError, UsageError, one_line
from attn_export.untrusted_files import checked, parse_json, read_text

CHAT = "tokenizer_config.json"
"""The file of a bundle or a checkpoint with a chat template, and with names of special tokens."""

_TOKENS = "special_tokens_map.json"
"""The file of older checkpoints with names of special tokens."""

_OWN_FILE = "chat_template.jinja"
"""The file of a checkpoint with the template, which precedes that in `CHAT`."""

_DEFAULT = "default"
"""The name of the template for messages alone, where there are several."""

_MOST_CHARACTERS = 2**22
"""The longest text that a template may make."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of a message's reasoning; templates read the first, or that of gpt-oss, the second."""

_Text = Annotated[str, Meta(max_length=2**20)]
_Name = Annotated[str, Meta(max_length=1000)]
Messages = Sequence[Mapping[str, Any]]


class ChatTemplate(Struct, frozen=True):
    """A chat template, and the special tokens that it may name, such as ``bos_token``."""

    chat_template: _Text
    tokens: dict[_Name, _Name] = {}

    def content(self) -> bytes:
        """Return the file of a bundle, which `read_template` and transformers read."""
        return msgspec.json.encode({"chat_template": self.chat_template, **self.tokens})


class _Named(Struct, frozen=True):
    name: _Name
    template: _Text


class _Config(Struct, frozen=True):
    chat_template: _Text | list[_Named] | None = None
    extra_special_tokens: dict[_Name, Any] | list[Any] | None = None


def read_template(folder: Path) -> ChatTemplate | None:
    """Return the chat template of a checkpoint or a bundle; None if it has none by default."""
    path = folder / CHAT
    try:
        values = parse_json(read_text(path)) if path.is_file() else {}
        said = checked(values, _Config)
        path = folder / _TOKENS
        if path.is_file() and "added_tokens_decoder" not in values:
            values = {**values, **checked(parse_json(read_text(path)), dict[str, Any])}
        template = said.chat_template
        if isinstance(template, list):
            template = {each.name: each.template for each in template}.get(_DEFAULT)
        extra = said.extra_special_tokens
        named = {**values, **(extra if isinstance(extra, dict) else {})}
        tokens = {name: _content(token) for name, token in named.items() if name.endswith("_token")}
        path = folder / _OWN_FILE
        if path.is_file():
            template = read_text(path)
        given = {name: token for name, token in tokens.items() if isinstance(token, str)}
        found = {"chat_template": template, "tokens": given}
        return None if template is None else checked(found, ChatTemplate)
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read: {one_line(error)}") from error


def _content(token: object) -> object:
    """Return the text of a token, which may have settings beside it."""
    return token.get("content") if isinstance(token, dict) else token


# -- in the process with limits -----------------------------------------------------------------


def rendered(template: str, tokens: Mapping[str, str], messages: Messages) -> str:
    """Return the text of messages, after which the assistant speaks.

    A template may take any time and memory: the caller limits them.
    """
    from jinja2 import TemplateError

    given = {"messages": [_plain(message) for message in messages], "tools": None}
    try:
        pieces, length = [], 0
        compiled = _environment().from_string(template)
        for piece in compiled.generate(
            **tokens, **given, documents=None, add_generation_prompt=True
        ):
            pieces.append(piece)
            length += len(piece)
            if length > _MOST_CHARACTERS:
                raise UsageError(
                    f"the chat template makes more than {_MOST_CHARACTERS} characters of the "
                    "messages"
                )
        return "".join(pieces)
    except (UsageError, MemoryError):
        raise
    except TemplateError as error:
        raise UsageError(f"the chat template refuses the messages: {one_line(error)}") from error
    except Exception as error:  # a template may do anything
        raise UsageError(f"the chat template fails: {one_line(error)}") from error


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without what is null, and its reasoning by the names that templates read."""
    given = {name: value for name, value in message.items() if value is not None}
    reasoning = next((given[name] for name in _REASONING if name in given), None)
    if reasoning is None:
        return given
    return {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _environment() -> Any:
    """Return jinja2's immutable sandbox with what transformers gives templates."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """The tag around what the assistant said, which changes no text."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 has it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class PlainNamespace(Namespace):
        """A namespace without names that reach into Python."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"a namespace has no {name!r}")
            super().__setitem__(name, value)

    def namespace(*args: Any, **values: Any) -> PlainNamespace:
        space = PlainNamespace()
        for name, value in dict(*args, **values).items():
            space[name] = value
        return space

    class Dictionaries:
        """`dict`, without the attributes of a class."""

        fromkeys = staticmethod(dict.fromkeys)

        def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
            return dict(*args, **values)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
        sort_keys: bool = False,
    ) -> str:  # fmt: skip
        # That of jinja2 escapes HTML.
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
            sort_keys=sort_keys,
        )  # fmt: skip

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": refuse, "dict": Dictionaries(), "namespace": namespace,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
    }  # fmt: skip
    return environment
