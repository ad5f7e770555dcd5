"""Results of a sweep as a static page: a table of layers and runtimes.

The page loads nothing from other servers. Its script only filters; it is readable without.
"""

from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attn_export.code_templates import shell
from attn_export.dialect_names import CUDA, ORT, PORTABLE, STANDARD
from attn_export.errors import SpecError, UsageError
from attn_export.output_folder import replacement_of
from attn_export.parts.sweeps.release import release_of
from attn_export.parts.sweeps.releases import defects
from attn_export.parts.sweeps.store import COLUMNS, Row
from attn_export.parts.sweeps.sweep_plan import short_fields
from attn_export.report.html import render_page
from attn_export.spec import AttentionSpec
from attn_export.untrusted_files import parse_json

PAGE: Final = "index.html"
TEMPLATES: Final = Path(__file__).with_name("page")

_MUCH_WORSE: Final = 3.0
"""Factor from which a cell that passed is yellow: its error, divided by the least error of a
runtime that passed with the same layer and dialect."""

GREEN, YELLOW, RED, GREY = "green", "yellow", "red", "grey"
_COLOURS: Final[Mapping[str, str]] = {
    "passed": GREEN, "failed": RED, "crashed": RED, "error": RED, "timed out": RED, "seen": GREY,
}  # fmt: skip
"""Colour of each verdict. Verdicts that are missing here are grey."""
_SIGNS: Final = {GREEN: "✓", YELLOW: "~", RED: "✗", GREY: "-"}


@dataclasses.dataclass(frozen=True)
class _SiteCell:
    """A cell of the page's table, with the HTML id of its details and commands that repeat it."""

    row: Row
    anchor: str
    colour: str
    remark: str
    reproduction: str

    @property
    def sign(self) -> str:
        """The sign of its colour, for readers who cannot see colours."""
        return _SIGNS[self.colour]


@dataclasses.dataclass(frozen=True)
class _SiteLine:
    """A row of the page's table: a layer in one dialect, with the cell of each runtime if any."""

    title: str
    dialect: str
    cells: Mapping[str, _SiteCell | None]


def write_site(rows: Sequence[Row], output: Path, title: str, facts: Sequence[str]) -> None:
    """Write the site."""
    if not rows:
        raise UsageError("the store has no cells; run the sweep first")
    with replacement_of(output, "site") as folder:
        for name, text in site_files(rows, title, facts).items():
            (folder / name).write_text(text, encoding="utf-8")


def site_files(rows: Sequence[Row], title: str, facts: Sequence[str]) -> dict[str, str]:
    """Return the texts of the site's files by name."""
    return {
        PAGE: _page(rows, title, facts),
        "cells.json": json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n",
        "cells.csv": to_csv(rows),
    }


def to_csv(rows: Sequence[Row]) -> str:
    """Return the cells as CSV, with an apostrophe before texts that spreadsheets would compute."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([_escape_formula(value) for value in dataclasses.astuple(row)])
    return stream.getvalue()


def _escape_formula(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in set("=+-@\t\r") else value


def _page(rows: Sequence[Row], title: str, facts: Sequence[str]) -> str:
    script = (TEMPLATES / "site.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    runtimes = sorted({row.runtime for row in rows}, key=release_of)
    newest = {release_of(name)[0]: name for name in runtimes}
    lines = _lines(rows, runtimes)
    return render_page(
        "site.html.j2", TEMPLATES, title=title, facts=facts, runtimes=runtimes, lines=lines,
        script=script, digest=digest,
        cells=[cell for line in lines for cell in line.cells.values() if cell is not None],
        forms=[_best_dialect(name, lines) for name in runtimes],
        older={*runtimes} - {*newest.values()}, anchor_of=anchor_of,
        defects=defects(rows, lambda row: _COLOURS.get(row.verdict) == RED),
        verdicts=sorted({row.verdict for row in rows}), signs=_SIGNS,
    )  # fmt: skip


def _lines(rows: Sequence[Row], runtimes: Sequence[str]) -> list[_SiteLine]:
    """Return the rows of the table, sorted by the title of the layer."""
    titles = _titles(rows)
    grouped: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row.source, row.dialect), []).append(row)
    lines = []
    for (source, dialect), group in sorted(grouped.items(), key=lambda item: titles[item[0][0]]):
        least = min(
            (row.worst for row in group if row.verdict == "passed" and row.worst), default=None
        )
        cells = {row.runtime: _cell(row, least) for row in group}
        lines.append(
            _SiteLine(titles[source], dialect, {name: cells.get(name) for name in runtimes})
        )
    return lines


def _titles(rows: Sequence[Row]) -> dict[str, str]:
    """Return the title of each layer: its values of the fields in which the layers differ."""
    fields = {row.source: _fields(row) for row in rows}
    specs = [values for values in fields.values() if values]
    differing = [
        name for name in (specs[0] if specs else {})
        if len({json.dumps(values.get(name)) for values in specs}) > 1
    ]  # fmt: skip
    names = {row.source: row.name for row in rows}
    titles = {}
    for source, values in fields.items():
        texts = [f"{name} {values[name]}" for name in differing if name in values]
        titles[source] = ", ".join(texts) or names[source]
    return titles


def _fields(row: Row) -> dict[str, Any]:
    """Return all fields of a layer's spec, or {} for a bundle or a module."""
    try:
        values = parse_json(row.spec)
        return AttentionSpec.from_dict(values).to_dict() if isinstance(values, dict) else {}
    except (ValueError, SpecError):
        return {}


def _cell(row: Row, least: float | None) -> _SiteCell:
    colour, remark = _COLOURS.get(row.verdict, GREY), ""
    if colour == GREEN and least and row.worst and row.worst > _MUCH_WORSE * least:
        colour = YELLOW
        remark = f"its error is {row.worst / least:.1f} times that of the best runtime"
    return _SiteCell(row, anchor_of(row), colour, remark, _reproduction(row))


def anchor_of(row: Row) -> str:
    """Return the HTML id of the details of a cell, for links."""
    return f"c-{hashlib.sha256(row.id.encode()).hexdigest()[:12]}"


def _reproduction(row: Row) -> str:
    """Return commands that repeat a cell, or "" for a bundle or a module."""
    values = _fields(row)
    if not values:
        return ""
    spec = "".join(
        f"{name} = {json.dumps(value)}\n"  # these values have the same text in TOML and JSON
        for name, value in short_fields(values).items()
    )
    architecture = row.runtime.partition("dry-run@")[2]
    build = f"attn-export build layer.toml --dialect {shell(row.dialect)} --output layer"
    last = (
        f"attn-export dry-run layer --arch {shell(architecture)}" if architecture
        else f"attn-export verify layer --runtime {shell(row.runtime)}"
    )  # fmt: skip
    return f"cat > layer.toml <<'END'\n{spec}END\n{build}\n{last}\n"


def _best_dialect(runtime: str, lines: Sequence[_SiteLine]) -> dict[str, Any]:
    """Return values for the template on the dialect in which a runtime passes most cells.

    Of several, it is the one that is made to be fastest there; "" if no cell passed. Their errors
    differ by rounding only.
    """
    on_cuda = runtime.startswith(("ort-cuda", "dry-run"))
    fastest = (CUDA, STANDARD, ORT, PORTABLE) if on_cuda else (ORT, STANDARD, PORTABLE, CUDA)
    figures = []
    for dialect in dict.fromkeys(line.dialect for line in lines):
        cells = [line.cells[runtime] for line in lines if line.dialect == dialect]
        rows = [cell.row for cell in cells if cell is not None]
        passed = [row for row in rows if row.verdict == "passed"]
        worst = max((row.worst or 0.0 for row in passed), default=0.0)
        place = fastest.index(dialect) if dialect in fastest else len(fastest)
        figures.append((len(passed), -place, dialect, len(rows), worst))
    passed_count, _, dialect, count, worst = max(figures)
    return {
        "runtime": runtime, "dialect": dialect if passed_count else "", "passed": passed_count,
        "count": count, "worst": worst,
    }  # fmt: skip
