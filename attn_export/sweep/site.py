"""A sweep's results as a static page: which runtime computes which attention right.

The page needs nothing from elsewhere, and works without scripts; the script filters.
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

from attn_export.errors import OutputError, SpecError, UsageError
from attn_export.output_folder import replaceable, take_place, write_list
from attn_export.report.html import TEMPLATES, render_page
from attn_export.runtimes.release import release_of
from attn_export.spec import AttentionSpec
from attn_export.sweep.releases import defects
from attn_export.sweep.store import COLUMNS, Row
from attn_export.sweep.sweep_plan import short_fields
from attn_export.temp_folders import folder_beside

PAGE: Final = "index.html"

MUCH_WORSE: Final = 3.0
"""A cell that passes is marked where its error is more than this many times the least one of the
same layer and dialect."""

GREEN, YELLOW, RED, GREY = "green", "yellow", "red", "grey"
COLOURS: Final[Mapping[str, str]] = {
    "passed": GREEN, "failed": RED, "crashed": RED, "error": RED, "timed out": RED, "seen": GREY,
}  # fmt: skip
"""The colour of each verdict; others are grey."""
SIGNS: Final = {GREEN: "✓", YELLOW: "~", RED: "✗", GREY: "-"}


@dataclasses.dataclass(frozen=True)
class SiteCell:
    """A cell of the page.

    Attributes:
        row: The result.
        anchor: The id of its details, which links can name.
        colour: One of `GREEN`, `YELLOW`, `RED` and `GREY`.
        remark: What differs, of a yellow cell.
        reproduction: Commands that repeat it.
    """

    row: Row
    anchor: str
    colour: str
    remark: str
    reproduction: str

    @property
    def sign(self) -> str:
        """The sign of its colour, for those who do not see it."""
        return SIGNS[self.colour]


@dataclasses.dataclass(frozen=True)
class SiteLine:
    """A row of the page: a layer in one dialect.

    Attributes:
        title: The fields in which the layers differ.
        dialect: The dialect.
        cells: By runtime; a runtime without one has None.
    """

    title: str
    dialect: str
    cells: Mapping[str, SiteCell | None]


def write_site(rows: Sequence[Row], output: Path, title: str, facts: Sequence[str]) -> None:
    """Write the site.

    Args:
        rows: The cells of a store.
        output: Its folder: new, empty, or a site in which nothing was changed.
        title: The title of the page.
        facts: Lines below it, such as versions and the date.

    Raises:
        UsageError: If there are no cells.
        OutputError: If `output` cannot be written, or holds something else.
    """
    if not rows:
        raise UsageError("the store has no cells; run the sweep first")
    try:
        target = replaceable(output, "site")
        target.parent.mkdir(parents=True, exist_ok=True)
        with folder_beside(target) as folder:
            for name, text in site_files(rows, title, facts).items():
                (folder / name).write_text(text, encoding="utf-8")
            write_list(folder, "site")
            take_place(folder, replaceable(output, "site"))
    except OSError as error:
        raise OutputError(f"cannot write {output}: {error.strerror or error}") from error


def site_files(rows: Sequence[Row], title: str, facts: Sequence[str]) -> dict[str, str]:
    """Return the files of the site, by name.

    Args:
        rows: The cells of a store.
        title: The title of the page.
        facts: Lines below it, such as versions and the date.
    """
    return {
        PAGE: _page(rows, title, facts),
        "cells.json": json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n",
        "cells.csv": to_csv(rows),
    }


def to_csv(rows: Sequence[Row]) -> str:
    """Return the cells as CSV; texts that a spreadsheet would compute begin with an apostrophe."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([_harmless(value) for value in dataclasses.astuple(row)])
    return stream.getvalue()


def _harmless(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in set("=+-@\t\r") else value


def _page(rows: Sequence[Row], title: str, facts: Sequence[str]) -> str:
    script = (TEMPLATES / "site.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    runtimes = sorted({row.runtime for row in rows}, key=release_of)
    newest = {release_of(name)[0]: name for name in runtimes}
    lines = _lines(rows, runtimes)
    return render_page(
        "site.html.j2", title=title, facts=facts, runtimes=runtimes, lines=lines,
        script=script, digest=digest,
        cells=[cell for line in lines for cell in line.cells.values() if cell is not None],
        forms=[_recommended(name, lines) for name in runtimes],
        older={*runtimes} - {*newest.values()}, anchor_of=anchor_of,
        defects=defects(rows, lambda row: COLOURS.get(row.verdict) == RED),
        verdicts=sorted({row.verdict for row in rows}), signs=SIGNS,
    )  # fmt: skip


def _lines(rows: Sequence[Row], runtimes: Sequence[str]) -> list[SiteLine]:
    """Return the rows of the page, by layer and dialect."""
    titles = _titles(rows)
    grouped: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row.source, row.dialect), []).append(row)
    lines = []
    for (source, dialect), found in sorted(grouped.items(), key=lambda item: titles[item[0][0]]):
        least = min(
            (row.worst for row in found if row.verdict == "passed" and row.worst), default=None
        )
        cells = {row.runtime: _cell(row, least) for row in found}
        lines.append(
            SiteLine(titles[source], dialect, {name: cells.get(name) for name in runtimes})
        )
    return lines


def _titles(rows: Sequence[Row]) -> dict[str, str]:
    """Return the name of each layer: the fields in which layers differ, with their values."""
    fields = {row.source: _fields(row) for row in rows}
    specs = [values for values in fields.values() if values]
    differing = [
        name for name in (specs[0] if specs else {})
        if len({json.dumps(values.get(name)) for values in specs}) > 1
    ]  # fmt: skip
    names = {row.source: row.name for row in rows}
    found = {}
    for source, values in fields.items():
        said = [f"{name} {values[name]}" for name in differing if values and name in values]
        found[source] = ", ".join(said) or names[source]
    return found


def _fields(row: Row) -> dict[str, Any]:
    """Return all fields of a spec; of a bundle or a module none."""
    try:
        values = json.loads(row.spec)
        return AttentionSpec.from_dict(values).to_dict() if isinstance(values, dict) else {}
    except (ValueError, SpecError):
        return {}


def _cell(row: Row, least: float | None) -> SiteCell:
    colour, remark = COLOURS.get(row.verdict, GREY), ""
    if colour == GREEN and least and row.worst and row.worst > MUCH_WORSE * least:
        colour = YELLOW
        remark = f"its error is {row.worst / least:.1f} times that of the best runtime"
    return SiteCell(row, anchor_of(row), colour, remark, _reproduction(row))


def anchor_of(row: Row) -> str:
    """Return the id of the details of a cell, which links can name."""
    return f"c-{hashlib.sha256(row.id.encode()).hexdigest()[:12]}"


def _reproduction(row: Row) -> str:
    """Return commands that repeat a cell; "" for a layer that is no spec."""
    values = _fields(row)
    if not values:
        return ""
    spec = "".join(
        f"{name} = {json.dumps(value)}\n"  # one text in TOML and JSON
        for name, value in short_fields(values).items()
    )
    seen = row.runtime.partition("dry-run@")[2]
    build = f"attn-export build layer.toml --dialect {row.dialect} --output layer"
    last = (
        f"attn-export dry-run layer --arch {seen}" if seen
        else f"attn-export verify layer --runtime {row.runtime}"
    )  # fmt: skip
    return f"cat > layer.toml <<'END'\n{spec}END\n{build}\n{last}\n"


def _recommended(runtime: str, lines: Sequence[SiteLine]) -> dict[str, Any]:
    """Return the dialect in which a runtime passes most cells, the one with the least error first.

    Args:
        runtime: The runtime.
        lines: The rows of the page.
    """
    figures = []
    for dialect in dict.fromkeys(line.dialect for line in lines):
        found = [line.cells[runtime] for line in lines if line.dialect == dialect]
        there = [cell.row for cell in found if cell is not None]
        passed = [row for row in there if row.verdict == "passed"]
        worst = max((row.worst or 0.0 for row in passed), default=0.0)
        figures.append((len(passed), -worst, dialect, len(there)))
    passed_count, worst, dialect, count = max(figures)
    return {
        "runtime": runtime, "dialect": dialect if passed_count else "", "passed": passed_count,
        "count": count, "worst": -worst,
    }  # fmt: skip
