"""Graphs with inputs that are fixed to a value: the option --fix-input."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from attn_export.errors import AttnExportError, UsageError, printable
from attn_export.graph.load import load_proto
from attn_export.runtimes.child import limited
from attn_export.temp_folders import scratch


@contextlib.contextmanager
def fixed_graphs(paths: Sequence[Path], values: Mapping[str, str]) -> Iterator[list[Path]]:
    """Yield temporary copies of graphs in which inputs have a value; the files without `values`.

    In a copy, the input is an initialiser, an `If` on it is its branch, and what only the other
    branch reads is gone.
    """
    if not values:
        yield [*paths]
        return
    known = {path: {value.name for value in load_proto(path).graph.input} for path in paths}
    for name in values:
        if not any(name in names for names in known.values()):
            inputs = ", ".join(printable(text, 60) for text in sorted(set().union(*known.values())))
            raise UsageError(f"--fix-input {name}: there is no such input; choose from {inputs}")
    with scratch() as folder:
        copies = {}
        for number, (path, names) in enumerate(known.items()):
            copies[path] = folder / str(number) / path.name
            copies[path].parent.mkdir()
            chosen = {name: text for name, text in values.items() if name in names}
            limited(
                "attn_export.graph.fixed_inputs:fix_inputs", str(path),
                path=str(path), output=str(copies[path]), values=chosen,
            )  # fmt: skip
        try:
            yield [copies[path] for path in paths]
        except AttnExportError as error:
            text = str(error)
            for path, copy in copies.items():
                text = text.replace(str(copy), str(path))
            error.args = (text,)
            raise
