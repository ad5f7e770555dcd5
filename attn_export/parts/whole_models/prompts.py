"""Prompts of `generate`: texts, token ids, and conversations, on the command line or in a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from attn_export.errors import UsageError, one_line, printable
from attn_export.parts.whole_models.bundle_text import BundleText
from attn_export.untrusted_files import checked, parse_json, read_text

Prompt = str | list[Any]
"""A text, token ids, or the messages of a conversation with a role each."""

_Items = Annotated[list[int | dict[str, Any]], Meta(min_length=1)]
_PROMPTS: Any = Annotated[list[str | _Items], Meta(min_length=1, max_length=10_000)]
"""The schema of a file."""


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a file.

    `path`: ``FILE.txt`` with a text on each line, ``FILE.jsonl`` with JSON on each line, or
        ``FILE.json`` with a list of prompts or with one conversation.
    """
    if path.suffix not in (".txt", ".json", ".jsonl"):
        raise UsageError(f"--prompts is FILE.txt, FILE.json or FILE.jsonl; got {path}")
    try:
        text = read_text(path).replace("\r\n", "\n")
        values: Any = [line for line in text.split("\n") if line.strip()]
        if path.suffix == ".json":
            values = parse_json(text)
        elif path.suffix == ".jsonl":
            values = [parse_json(line) for line in values]
        if isinstance(values, list) and any(isinstance(each, int | dict) for each in values):
            values = [values]
        prompts: list[Prompt] = checked(values, _PROMPTS)
    except OSError as error:
        raise UsageError(f"--prompts {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"--prompts {path} cannot be read: {one_line(error)}") from error
    for number, prompt in enumerate(prompts, start=1):
        if not isinstance(prompt, str) and not (_are_ids(prompt) or _are_messages(prompt)):
            raise UsageError(
                f"--prompts {path}: prompt {number} is {printable(repr(prompt), 60)}; give a text, "
                'token ids, or messages such as {"role": "user", "content": "Hello"}'
            )
    return prompts


def parse_ids(text: str, about: str = "--ids") -> list[int]:
    """Return the token ids of a text such as 1,2,3."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(
            f"{about} are token ids with commas, as in 1,2,3; got {printable(text, 60)!r}"
        ) from error


def padded(prompts: Sequence[Iterable[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return prompts as one array `[B, L]`, padded on the right, and their lengths `[B]`."""
    rows = [[*prompt] for prompt in prompts]
    lengths = [len(row) for row in rows]
    return np.array([row + [0] * (max(lengths) - len(row)) for row in rows]), np.array(lengths)


def is_text(prompt: Prompt) -> bool:
    """Return whether a prompt is continued by text; token ids are continued by ids."""
    return isinstance(prompt, str) or _are_messages(prompt)


def encoded(prompt: Prompt, text: BundleText, *, is_chat: bool) -> list[int]:
    """Return the token ids of a prompt.

    `is_chat`: Whether the chat template is applied to texts and conversations.
    """
    if not isinstance(prompt, str) and not is_text(prompt):
        return prompt
    if is_chat:
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return text.encode_chat(said)
    if not isinstance(prompt, str):
        raise UsageError("messages with a role need the chat template; give --chat")
    return text.encode(prompt)


def _are_ids(prompt: Prompt) -> bool:
    return all(isinstance(each, int) for each in prompt)


def _are_messages(prompt: Prompt) -> bool:
    return all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in prompt)
