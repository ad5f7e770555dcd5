"""The token ids at which a text of a whole model ends."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from attn_export.errors import BundleError, one_line
from attn_export.schema import Count
from attn_export.untrusted_files import checked, parse_json, read_text

ENDS = "generation_config.json"
"""The file of a bundle or a checkpoint with the ids that end a text."""

TOKENIZER = "tokenizer.json"
"""The file of a bundle or a checkpoint with a tokenizer of the package `tokenizers`."""


class _Ends(Struct, frozen=True):
    """The part of a generation config that is read."""

    eos_token_id: Count | Annotated[tuple[Count, ...], Meta(max_length=1000)] | None = ()


def read_ends(folder: Path) -> tuple[int, ...]:
    """Return the ids that end a text by a generation config, if it is there and has any."""
    path = folder / ENDS
    if not path.is_file():
        return ()
    try:
        ends = checked(parse_json(read_text(path)), _Ends).eos_token_id
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read: {one_line(error)}") from error
    return ends if isinstance(ends, tuple) else () if ends is None else (ends,)
