"""How integers stand for weights and activations: in the terminal, as JSON and as a page."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from attn_export.errors import printable
from attn_export.parts.value_ranges.integer_ranges import IntegerFacts, IntegerResult
from attn_export.parts.value_ranges.range_report import plain
from attn_export.report.html import render_page
from attn_export.report.tables import Column, Table, shown
from attn_export.report.terminal import as_text, print_table, say

_FORMAT = "attn-export-integer-range/1"
_WORST = 20
_COLUMNS = ("value", "max", "max / rms", "outliers", "widest channel", "SQNR of each choice, dB")
_NUMBERS = _COLUMNS[1:5]


def print_to(result: IntegerResult, console: Console) -> None:
    """Print what is hardest to quantise."""
    columns = tuple(Column(name, right=name in _NUMBERS) for name in _COLUMNS)
    rows = tuple(tuple(_cells(facts)) for facts in result.facts[:_WORST])
    print_table(Table(columns, rows), console)
    if len(result.facts) > _WORST:
        say(f"… and {len(result.facts) - _WORST} more; --json FILE has all", console)
    for note in result.notes:
        say(f"note: {as_text(note)}", console)


def to_json(result: IntegerResult) -> str:
    """Return the facts as JSON text, with a newline at the end."""
    content = {
        "format": _FORMAT, "graph": result.graph, "dtype": result.dtype,
        "values": [plain(facts) for facts in result.facts], "notes": list(result.notes),
    }  # fmt: skip
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def to_html(result: IntegerResult) -> str:
    """Return the facts as a page."""
    return render_page(
        "integers.html.j2", Path(__file__).with_name("page"), result=result, columns=_COLUMNS,
        rows=list(map(_cells, result.facts)),
    )  # fmt: skip


def _cells(facts: IntegerFacts) -> list[str]:
    choices = [f"{choice} {shown(decibels, '.1f')}" for choice, decibels in facts.sqnr.items()]
    if facts.clipped is not None:
        choices.append(f"{facts.clipped:.2%} clipped by the graph's scale")
    return [
        printable(f"{facts.value} ({facts.kind} of {facts.node})", 70), f"{facts.largest:.4g}",
        f"{facts.spread:.3g}", f"{facts.outliers:.3%}", f"{facts.channels:.3g}",
        ", ".join(choices),
    ]  # fmt: skip
