"""A fingerprint in the terminal: 80 columns, plain where it is piped."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from attn_export.fingerprint.findings import Finding, Fingerprint, Row
from attn_export.fingerprint.probe_graphs import PORTABLE
from attn_export.report.markup import as_text

MARKS = {"onnx": "*", "pytorch": "+"}
WIDTHS = (19, 26, 17, 15)
"""Of the columns: with one space after each, 81, of which the last is not printed."""

LONGEST = 320
"""Characters of a note; --json FILE has all."""

LEGEND = (
    "* not as ONNX; + not as PyTorch, which is asked for scaled_dot_product_attention. "
    "(In brackets) ONNX says nothing, and its evaluator does this."
)
IN_PORTABLE = "portable: in operators of opset 18, where Attention does not run or is not as ONNX."
ONLY_PORTABLE = "It has no Attention: it was given portable operators of opset 18."


def print_probe(found: Fingerprint, console: Console) -> None:
    """Print the table, its notes and the legend of its marks."""
    versions = found.environment.get("versions", {})
    assert isinstance(versions, dict)
    notes: dict[str, int] = {}
    heads = (
        "probe", f"{found.runtime} {found.version}", f"ONNX {versions.get('onnx', '')}",
        f"PyTorch {versions.get('torch', '')}".split("+")[0],
    )  # fmt: skip
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for head, width in zip(heads, WIDTHS, strict=True):
        table.add_column(as_text(head.strip()), width=width, overflow="fold")
    for row in found.rows:
        style = "yellow" if row.differs else ""
        cells = (row.probe, _here(row, notes), _onnx(row), _pytorch(row, notes))
        table.add_row(*(f"[{style}]{as_text(c)}[/]" if style else as_text(c) for c in cells))
    console.print(table, highlight=False)
    for note, number in notes.items():
        console.print(f"{number}) {as_text(note)}", highlight=False)
    console.print(LEGEND, highlight=False)
    if any(len(row.here) > 1 for row in found.rows):
        console.print(IN_PORTABLE, highlight=False)
    elif {each.form for row in found.rows for each in row.here} <= {PORTABLE, ""}:
        console.print(ONLY_PORTABLE, highlight=False)


def _here(row: Row, notes: dict[str, int]) -> str:
    marks = "".join(mark for name, mark in MARKS.items() if name in row.differs)
    lines = []
    for each in row.here:
        form = f"{each.form}: " if each.form == PORTABLE and len(row.here) > 1 else ""
        mark = f" {marks}" if marks and each is row.effective else ""
        lines.append(form + _told(each, row.says, notes) + mark)
    return "\n".join(lines)


def _told(each: Finding, says: str, notes: dict[str, int]) -> str:
    """Return the reading, with a note number if its detail goes beyond the ONNX reading."""
    if not each.detail or each.reading == says:
        return each.reading
    note = f"{each.reading}: {each.detail}"
    note = note if len(note) <= LONGEST else f"{note[: LONGEST - 2]} …"
    return f"{each.reading} {notes.setdefault(note, len(notes) + 1)})"


def _onnx(row: Row) -> str:
    found = row.evaluator
    if found is None:
        return row.says or "-"
    if not row.says:
        return f"({found.reading})"
    return row.says if found.reading == row.says else f"{row.says} (evaluator: {found.reading})"


def _pytorch(row: Row, notes: dict[str, int]) -> str:
    found = row.pytorch
    return found.reading if found.outcome == "not run" else _told(found, row.says, notes)
