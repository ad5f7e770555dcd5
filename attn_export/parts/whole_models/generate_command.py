"""`attn-export generate`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.commands.options import option, with_help
from attn_export.commands.output import echo
from attn_export.errors import UsageError, printable

_COUNT = 64


@with_help("Build and ship", 'generate models/tiny-llama --prompt "Once upon a time"')
@option("bundle", type=Path)
@option("--prompt", metavar="TEXT", help="The text to continue; needs the bundle's tokenizer.")
@option("--ids", metavar="1,2,3", help="The token ids to continue; ids are printed.")
@option(
    "--count", type=int, least=1, default=_COUNT, show_default=True, metavar="N",
    help="The most tokens to generate.",
)  # fmt: skip
@option(
    "--temperature", type=float, least=0, metavar="T",
    help="Divides the logits before a token is drawn; 0 takes the largest.  [default: that of "
    "generation_config.json, or 0]",
)  # fmt: skip
@option("--top-k", type=int, least=1, metavar="K", help="Draw from the K likeliest tokens.")
@option(
    "--top-p", type=float, metavar="P",
    help="Draw from the likeliest tokens that have P together.",
)  # fmt: skip
@option(
    "--repetition-penalty",
    type=float,
    metavar="R",
    help="Makes tokens that were there before less likely, above 1.",
)
@option("--seed", type=int, least=0, default=0, show_default=True, metavar="N", help="Of draws.")
@option(
    "--threads", type=int, least=1, most=1024, metavar="N",
    help="Threads, at most one per core.  [default: all cores]",
)  # fmt: skip
@option("--dialect", metavar="NAME", help="The graphs to run.  [default: the fastest]")
def generate_command(
    bundle: Path,
    prompt: str | None,
    ids: str | None,
    count: int,
    threads: int | None,
    dialect: str | None,
    **options: Any,
) -> int:
    """Continue a prompt with a whole model that `build --model` wrote, without torch.

    Tokens are printed as they come, until the model ends the text. No chat template is applied.
    """
    from attn_export.bundle.text_ends import ENDS
    from attn_export.parts.whole_models.bundle_text import BundleText
    from attn_export.runtimes.decode_session import DecodeSession

    if (prompt is None) == (ids is None):
        raise UsageError("generate takes --prompt TEXT or --ids 1,2,3")
    session = DecodeSession(bundle, threads=threads, dialect=dialect)
    text = BundleText(bundle)
    start = _ids(ids) if ids is not None else text.encode(str(prompt))
    given = {name: value for name, value in options.items() if value is not None}
    said = text.generation
    draws = {**said.draws(), **given}
    if said.draws().keys() - given.keys():
        shown = ", ".join(f"{name} {value}" for name, value in draws.items() if name != "seed")
        echo(f"by {ENDS}: {shown}; --temperature 0 takes the largest logits", err=True)
    if said.unused:
        echo(
            f"{ENDS} has, and generate does not use: {printable(', '.join(said.unused))}", err=True
        )
    tokens = session.generate(np.array([start]), count, stop=said.ends, **draws)
    single = (int(token[0]) for token in tokens)
    pieces = map(str, single) if ids is not None else text.decode(start, single)
    _print(pieces, " " if ids is not None else "")
    if ids is None:
        echo("no chat template applied", err=True)
    return 0


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(
            f"--ids are token ids with commas, as in 1,2,3; got {printable(text, 60)!r}"
        ) from error


def _print(pieces: Iterator[str], between: str) -> None:
    """Print texts as they come, with nothing that a terminal or a CI system would obey."""
    line = ""
    for number, piece in enumerate(pieces):
        safe = between if number else ""
        for char in piece:
            begun = (line + char).lstrip()
            is_command = begun == "::" or begun.endswith("##[")
            is_shown = (char.isprintable() or char in "\n\t") and not is_command
            line = "" if char == "\n" else begun[-3:]
            safe += char if is_shown else f"\\x{ord(char):02x}" if is_command else ascii(char)[1:-1]
        echo(safe, nl=False)
    echo("")
