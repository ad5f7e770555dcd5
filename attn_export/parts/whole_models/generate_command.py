"""`attn-export generate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attn_export.bundle.text_ends import ENDS
from attn_export.commands.options import option, with_help
from attn_export.commands.output import echo
from attn_export.errors import UsageError, printable

if TYPE_CHECKING:
    from attn_export.parts.whole_models.bundle_text import BundleText
    from attn_export.runtimes.decode_session import DecodeSession

_COUNT = 64

_TOGETHER = 8
"""The most prompts that are one batch."""


@with_help(
    "Build and ship",
    'generate models/tiny-llama --prompt "Once upon a time"',
    'generate models/tiny-chat --chat --prompt "Who are you?" --stop "User:"',
)
@option("bundle", type=Path)
@option("--prompt", metavar="TEXT", help="The text to continue; needs the bundle's tokenizer.")
@option("--ids", metavar="1,2,3", help="The token ids to continue; ids are printed.")
@option(
    "--prompts", "file", type=Path, metavar="FILE",
    help="Several prompts: texts in FILE.txt, one on each line, or texts, lists of ids or lists of "
    "messages in FILE.json or FILE.jsonl. A line of JSON is printed for each.",
)  # fmt: skip
@option(
    "--chat", "is_chat", is_flag=True,
    help="Apply the bundle's chat template to each text, as a message of the user, or to messages.",
)  # fmt: skip
@option(
    "--stop", "stops", multiple=True, metavar="TEXT",
    help="End before this text. May be given several times.",
)  # fmt: skip
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
    file: Path | None,
    is_chat: bool,
    stops: Sequence[str],
    count: int,
    threads: int | None,
    dialect: str | None,
    **options: Any,
) -> int:
    """Continue prompts with a whole model that `build --model` wrote, without torch.

    Tokens are printed as they come, until the model ends the text. Without --chat, no chat template
    is applied.
    """
    from attn_export.parts.whole_models.bundle_text import BundleText
    from attn_export.parts.whole_models.generated_text import (
        print_json,
        print_pieces,
        rows_of,
        until,
    )
    from attn_export.parts.whole_models.prompts import encoded, is_text, parse_ids, read_prompts
    from attn_export.report.progress import progress
    from attn_export.runtimes.decode_session import DecodeSession

    if [prompt, ids, file].count(None) != 2:
        raise UsageError("generate takes --prompt TEXT, --ids 1,2,3 or --prompts FILE")
    given = read_prompts(file) if file else [parse_ids(ids) if ids is not None else str(prompt)]
    texts = [is_text(each) for each in given]
    for flag, is_given in (("--chat", is_chat), ("--stop", stops)):
        if is_given and not all(texts):
            raise UsageError(f"{flag} is for text, and token ids were given; leave it out")
    if not all(stops):
        raise UsageError("--stop is empty; give a text")
    session = DecodeSession(bundle, threads=threads, dialect=dialect)
    text = BundleText(bundle)
    starts = [encoded(each, text, is_chat=is_chat) for each in given]
    draws = _draws(text, options)
    ends = (*text.generation.ends, *(each for stop in stops for each in text.special_ids(stop)))
    is_alone = file is None
    with progress(quiet=is_alone) as bar:
        bar.expect(len(starts))
        for first in range(0, len(starts), _TOGETHER):
            some = slice(first, first + _TOGETHER)
            tokens = _tokens(session, starts[some], count, stop=ends, **draws)
            rows = rows_of(tokens, len(starts[some]))
            for start, row, gives_text in zip(starts[some], rows, texts[some], strict=True):
                pieces = until(text.decode(start, row), stops) if gives_text else map(str, row)
                if is_alone:
                    print_pieces(pieces, "" if gives_text else " ")
                    continue
                found = {"text": "".join(pieces)} if gives_text else {"ids": [*map(int, pieces)]}
                with bar.hidden():
                    print_json(found)
                bar.advance("generating")
    if any(texts) and not is_chat:
        echo("no chat template applied" + "; --chat applies it" * text.has_template, err=True)
    return 0


def _draws(text: BundleText, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of draws: those that were given, then those of the generation config."""
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
    return draws


def _tokens(
    session: DecodeSession, prompts: Sequence[list[int]], count: int, **options: Any
) -> Iterator[np.ndarray]:
    """Return the next tokens of prompts, which are padded on the right."""
    lengths = [len(prompt) for prompt in prompts]
    ids = np.array([prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts])
    return session.generate(ids, count, lengths=lengths, **options)
