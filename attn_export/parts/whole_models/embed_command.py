"""`attn-export embed`."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np

from attn_export.commands.options import STDOUT, file_option, option, quiet_option, with_help
from attn_export.commands.output import echo, messages, write_file
from attn_export.errors import UsageError, counted, printable, why_unread
from attn_export.untrusted_files import MOST_TEXT, read_text


@with_help("Build and ship", "embed models/minilm texts.txt -o vectors.npy")
@option("bundle", type=Path)
@option("file", metavar="[FILE]", required=False, default=STDOUT)
@option("--text", "texts", multiple=True, metavar="TEXT", help="A text, in place of FILE.")
@option("--ids", multiple=True, metavar="1,2,3", help="The token ids of a text, in place of FILE.")
@option("--ids-in-file", is_flag=True, help="Lines of FILE are token ids with commas.")
@option("--pairs", is_flag=True, help="Each text is a pair with a tab between: query and passage.")
@option(
    "--prompt", metavar="NAME",
    help="A prompt of the model, which is put before each text.  [default: the model's]",
)  # fmt: skip
@option("--sigmoid", is_flag=True, help="Make scores numbers from 0 to 1, as rerankers do.")
@option("--normalize", is_flag=True, help="Divide each vector by its length.")
@option(
    "--batch-size", type=int, least=1, most=2**16, default=32, show_default=True, metavar="N",
    help="The most texts that run together.",
)  # fmt: skip
@option(
    "--threads", type=int, least=1, most=1024, metavar="N",
    help="Threads, at most one per core.  [default: all cores]",
)  # fmt: skip
@option("--dialect", metavar="NAME", help="The graph to run.  [default: the fastest]")
@file_option(
    "--output", "output", "A .npy file for the vectors.  [default: JSON lines on stdout]", "-o"
)
@quiet_option
def embed_command(
    bundle: Path,
    file: str,
    texts: tuple[str, ...],
    ids: tuple[str, ...],
    ids_in_file: bool,
    pairs: bool,
    prompt: str | None,
    sigmoid: bool,
    normalize: bool,
    batch_size: int,
    threads: int | None,
    dialect: str | None,
    output: str | None,
    quiet: bool,
) -> int:
    """Make vectors or scores of texts with an encoder that `build --model` wrote, without torch.

    FILE has one text in each line; - or nothing is stdin. Texts of about one length run together.
    """
    from attn_export.parts.whole_models.embedding import Embedder, normalised, probabilities
    from attn_export.parts.whole_models.prompts import parse_ids
    from attn_export.report.progress import progress

    if bool(texts) + bool(ids) + (file != STDOUT) > 1:
        raise UsageError("embed takes one of FILE, --text and --ids")
    are_ids = bool(ids) or (ids_in_file and not texts)
    if are_ids and prompt:
        raise UsageError("--prompt is put before texts, not before ids")
    lines = [*(texts or ids or _lines(file))]
    with progress(quiet=quiet) as bar:
        bar.phase("loading the graph")
        embedder = Embedder(bundle, threads=threads, dialect=dialect)
        bar.expect(len(lines))

        def advance() -> None:
            bar.advance("embedding")

        if are_ids:
            given = [parse_ids(line, "ids") for line in lines]
            rows = embedder.of_ids(given, (), batch_size, advance)
        else:
            given_texts = [_text(line, pairs=pairs) for line in lines]
            rows = embedder.of_texts(given_texts, batch_size, advance, prompt)
    rows = [*probabilities(rows)] if sigmoid else rows
    rows = [*normalised(rows)] if normalize else rows
    say = messages(quiet=quiet)
    if embedder.cut:
        say(f"{counted(embedder.cut, 'text')} of {len(rows)} cut: more tokens than the model takes")
    if output is None or output == STDOUT:
        for row in rows:
            echo(json.dumps(_numbers(row)))
        return 0
    _save(output, rows)
    shape = [len(rows), *rows[0].shape]
    say(f"{embedder.output} {shape}: {printable(output, 200)}")
    return 0


def _lines(file: str) -> list[str]:
    """Return the lines of a file or of stdin."""
    if file == STDOUT:
        text = sys.stdin.read(MOST_TEXT + 1)
        if len(text) > MOST_TEXT:
            raise UsageError(f"stdin has more than {MOST_TEXT >> 20} MiB; give several parts")
    else:
        try:
            text = read_text(Path(file))
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {printable(file, 200)}: {why_unread(error)}") from error
    lines = text.removesuffix("\n").split("\n")
    if not text:
        raise UsageError("there is no text; give FILE, --text or --ids")
    return [line.removesuffix("\r") for line in lines]


def _text(line: str, *, pairs: bool) -> tuple[str, ...]:
    parts = tuple(line.split("\t")) if pairs else (line,)
    if pairs and len(parts) != 2:
        raise UsageError(
            f"--pairs: {printable(line, 60)!r} has {counted(len(parts) - 1, 'tab')}; give one"
        )
    return parts


def _numbers(row: np.ndarray) -> object:
    # The shortest texts that are read as the same numbers.
    return row.astype(str).astype(float).tolist()


def _save(output: str, rows: list[np.ndarray]) -> None:
    """Write vectors of one shape to a .npy file, in one step."""
    shapes = {row.shape for row in rows}
    if len(shapes) > 1:
        raise UsageError(
            "there is a row for each token, and texts have unequal lengths; leave -o out"
        )
    data = io.BytesIO()
    np.save(data, np.stack(rows), allow_pickle=False)
    write_file(output, data.getvalue())
