"""Text of a bundle of a whole model: its tokenizer, and the tokens at which a text ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from attn_export.bundle.text_ends import ENDS, TOKENIZER, Generation, read_generation
from attn_export.errors import BundleError, ExportError, UsageError, one_line
from attn_export.runtimes.child import limited
from attn_export.system_info import check_installed
from attn_export.untrusted_files import read_bytes

_MOST_BYTES = 2**26
"""The largest size of a tokenizer."""

_BROKEN = "\ufffd"
"""What stands for bytes that are no character yet."""

_CONTEXT = 6
"""The number of tokens before the first new one that it is decoded with, as spaces depend on it."""


class BundleText:
    """The tokenizer of a bundle, read when it is used.

    Attributes:
        generation: The tokens that end a text, and how tokens are drawn.
    """

    def __init__(self, bundle: Path) -> None:
        self._path = bundle / TOKENIZER
        self._tokenizer: Any = None
        self.generation = read_generation(bundle)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ids: list[int] = self._read().encode(text).ids
        if not ids:
            raise UsageError("the prompt has no token; give a text")
        return ids

    def decode(self, before: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
        """Yield the text of tokens as it grows; bytes wait until they are a character.

        `before`: The tokens before them.
        """
        decode, ids = self._read().decode, list(before[-_CONTEXT:])
        start, shown = 0, len(ids)
        for token in tokens:
            ids.append(token)
            old, new = decode(ids[start:shown]), decode(ids[start:])
            if len(new) > len(old) and not new.endswith(_BROKEN):
                yield new[len(old) :]
                start, shown = shown, len(ids)
        yield decode(ids[start:])[len(decode(ids[start:shown])) :]

    def _read(self) -> Any:
        if self._tokenizer is None:
            if not self._path.is_file():
                raise UsageError(f"{self._path.parent} has no {TOKENIZER}; give --ids 1,2,3")
            import tokenizers

            content = _checked_tokenizer(self._path)
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        return self._tokenizer


def files_of(model: Any, checkpoint: Path | None) -> dict[str, bytes]:
    """Return what generation needs besides the graphs: files of a bundle, by name."""
    files = {}
    if model.can_generate():
        said = read_generation(checkpoint) if checkpoint is not None else Generation()
        own = getattr(model.generation_config, "eos_token_id", None)
        if own is None:
            own = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
        ends = said.ends or tuple(own if isinstance(own, list) else [] if own is None else [own])
        files[ENDS] = msgspec.json.encode(msgspec.structs.replace(said, eos_token_id=ends))
    if checkpoint is not None and (checkpoint / TOKENIZER).is_file():
        files[TOKENIZER] = _checked_tokenizer(checkpoint / TOKENIZER)
    return files


def _checked_tokenizer(path: Path) -> bytes:
    """Return a tokenizer's file, which a process with limits has read before."""
    check_installed("tokenizers")
    try:
        content = read_bytes(path, _MOST_BYTES)
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from error
    limited(f"{__name__}:_try_tokenizer", str(path), path=str(path))
    return content


def _try_tokenizer(path: str) -> None:
    """Read a tokenizer and let it encode a text; it is native code, and may crash."""
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(path)
        tokenizer.decode(tokenizer.encode("Hello, world\n").ids)
    except Exception as error:  # as the package raises them
        raise ExportError(f"{path} is no tokenizer: {one_line(error)}") from error
