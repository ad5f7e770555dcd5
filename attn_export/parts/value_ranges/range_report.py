"""Ranges of values in the terminal, as JSON and as a page."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from attn_export.errors import counted, printable
from attn_export.measures import Measures
from attn_export.parts.value_ranges.float_formats import FORMATS, FloatFormat, RangeFacts
from attn_export.parts.value_ranges.range_analysis import Finding
from attn_export.parts.value_ranges.range_result import Fix, RangeResult
from attn_export.report.data import finite
from attn_export.report.html import render_page
from attn_export.report.tables import Column, Styled, Table
from attn_export.report.terminal import as_text, print_table, say

_FORMAT = "attn-export-range/1"
_WORST = 20
_SHOWN_IN_PAGE = 4000
_LOWEST, _HIGHEST = -40, 40
"""The exponents of 2 at the ends of a bar."""


# -- text ----------------------------------------------------------------------------------------


def print_to(result: RangeResult, console: Console) -> None:
    """Print the worst values, what they do to the outputs, and the fix."""
    rows = [tuple(_row(result, facts)) for facts in result.worst(_WORST)]
    if rows:
        columns = (Column("value"), Column("magnitude"), Column("effect"))
        print_table(Table(columns, tuple(rows)), console)
    say(as_text(_summary(result)), console)
    if result.fix:
        for line in _fix_lines(result.fix, result):
            say(as_text(line), console)
    for note in result.notes:
        say(f"note: {as_text(note)}", console)


def _summary(result: RangeResult) -> str:
    """Return in a sentence whether the graph fits the format."""
    analysis = result.analysis
    name, sets = analysis.format.name, counted(len(analysis.expected), "set")
    error, best = _percent(analysis.error), _percent(analysis.best)
    if analysis.fits:
        return f"fits {name} in {sets} of inputs: error {error}, ordinary rounding {best}"
    count = counted(len(analysis.findings), "value")
    whose = f"caused by {count}" if analysis.findings else "caused by no single value"
    return (
        f"does not fit {name}, in {len(analysis.bad)} of {sets} of inputs: error {error}, ordinary "
        f"rounding {best}; {whose}"
    )


def _fix_lines(fix: Fix, result: RangeResult) -> Iterator[str]:
    """Yield what the fix is, and how it was judged."""
    share = f"{len(fix.nodes) / fix.count:.1%} of all"
    nodes = f"{counted(len(fix.nodes), 'node')} in float32 ({share}, {fix.time:.1%} of the time)"
    if not fix.path:
        yield f"not mended: with {nodes} outputs are still wrong by {_percent(fix.error)}"
        return
    clipped = f"; limit {', '.join(fix.clipped)} to the largest number" if fix.clipped else ""
    ratio = f", {result.ratio:.2g} times ordinary rounding" if result.ratio is not None else ""
    yield f"keep {nodes}, {fix.weight_bytes} bytes of weights more{clipped}"
    if fix.nodes:
        yield f"kept: {', '.join(fix.nodes)}"
    if not fix.is_least:
        yield "fewer may do: the search ended before each was left out for a trial"
    yield f"then: error {_percent(fix.error)}{ratio}"
    yield f"written: {fix.path}, judged: {fix.passed}/{fix.judged}; ort-cpu {fix.beside}"


def _row(result: RangeResult, facts: RangeFacts) -> Iterator[str | Styled]:
    format_ = result.analysis.format
    label = facts.node or facts.name
    yield printable(f"{label} ({facts.operator})", 60)
    yield _magnitude(facts, format_)
    finding = next((f for f in result.analysis.tried if f.facts.name == facts.name), None)
    text = _effect(finding, result)
    yield Styled(text, "red") if finding and finding.matters else text


def _magnitude(facts: RangeFacts, format_: FloatFormat) -> str:
    """Return what is beyond the limits, as text."""
    if facts.overflow:
        times = facts.largest / format_.largest
        return f"max {facts.largest:,.6g}, {times:.3g} times the largest"
    if not facts.subnormal:
        return f"max {facts.largest:,.6g}"
    flushed = f", {_share(facts.flushed)} become 0" if facts.flushed else ""
    return f"{_share(facts.subnormal)} of values below {format_.smallest:.2g}{flushed}"


def _effect(finding: Finding | None, result: RangeResult) -> str:
    """Return what a value does to the outputs, as text."""
    if finding is None:
        if result.analysis.fits:
            return f"no effect on outputs (all together {_percent(result.analysis.error)})"
        return "not tried alone"
    wrong = _percent(finding.effect)
    if not finding.matters:
        return f"no effect on outputs ({wrong})"
    passed_on = "" if finding.made else "passed on: "
    if finding.kind == "rounding" and finding.facts.coarse:
        limit = round(2 / result.analysis.format.eps)
        return f"whole numbers above {limit:,} become others: outputs wrong by {wrong}"
    if finding.kind == "rounding":
        return f"ordinary rounding alone: outputs wrong by {wrong}"
    if finding.absorbed:
        return f"{passed_on}inf, absorbed: outputs are finite and wrong by {wrong}"
    if finding.kind == "underflow":
        return f"{passed_on}too small: outputs wrong by {wrong}"
    nan = f", then NaN from {printable(finding.nan_from, 60)}" if finding.nan_from else ""
    return f"{passed_on}inf{nan}"


def _share(part: float) -> str:
    return f"{100 * part:.2g} %"


def _percent(error: Measures) -> str:
    return _share(error.whole) if math.isfinite(error.whole) else "inf or NaN"


# -- JSON ----------------------------------------------------------------------------------------


def to_json(result: RangeResult) -> str:
    """Return the result as JSON text, with a newline at the end."""
    analysis = result.analysis
    content = {
        "format": _FORMAT,
        "graph": result.graph,
        "dtype": analysis.format.name,
        "fits": analysis.fits,
        "error": plain(analysis.error),
        "best": plain(analysis.best),
        "sets": len(analysis.expected),
        "failed_sets": list(analysis.bad),
        "findings": [_finding(finding) for finding in analysis.findings],
        "tried": [_finding(finding) for finding in analysis.tried],
        "values": [
            {**plain(facts), "margin_bits": finite(facts.margin(analysis.format))}
            for facts in analysis.values.values()
        ],
        "fix": plain(result.fix) if result.fix else None,
        "notes": list(result.notes),
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _finding(finding: Finding) -> dict[str, Any]:
    facts = finding.facts
    return {
        "value": facts.name, "node": facts.node, "operator": facts.operator, "kind": finding.kind,
        "matters": finding.matters, "made": finding.made, "absorbed": finding.absorbed,
        "effect": plain(finding.effect), "nan_from": finding.nan_from,
    }  # fmt: skip


def plain(value: Any) -> Any:
    """Return dataclasses as mappings, and numbers that JSON lacks as None."""
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return list(value) if isinstance(value, (list, tuple)) else value


# -- page ----------------------------------------------------------------------------------------


def to_html(result: RangeResult) -> str:
    """Return the result as a page: a bar of exponents for each value, in the order of the graph."""
    analysis = result.analysis
    order = sorted(analysis.values.values(), key=lambda facts: facts.index)
    blamed = {finding.facts.name: finding for finding in analysis.tried}
    if len(order) > _SHOWN_IN_PAGE:
        order = sorted(result.worst(_SHOWN_IN_PAGE), key=lambda facts: facts.index)
    return render_page(
        "range.html.j2", Path(__file__).with_name("page"),
        result=result, format=analysis.format, summary=_summary(result),
        fix=list(_fix_lines(result.fix, result)) if result.fix else [],
        worst=[(_anchor(f), list(map(_text, _row(result, f)))) for f in result.worst(_WORST)],
        limits=_bounds(FORMATS["float16"]),
        values=[_bar(facts, result, blamed) for facts in order],
        left_out=len(analysis.values) - len(order),
    )  # fmt: skip


def _bar(
    facts: RangeFacts, result: RangeResult, tried: Mapping[str, Finding]
) -> dict[str, object]:  # fmt: skip
    finding = tried.get(facts.name)
    low, high = (math.log2(x) if 0 < x < math.inf else 0.0 for x in (facts.smallest, facts.largest))
    state = "lost" if finding and finding.matters else "near" if facts.loss else "inside"
    return {
        "anchor": _anchor(facts), "name": printable(facts.node or facts.name, 120),
        "value": printable(facts.name, 120), "operator": facts.operator,
        "left": _place(low), "right": _place(high), "state": state,
        "largest": f"{facts.largest:.4g}", "smallest": f"{facts.smallest:.2g}",
        "effect": _effect(finding, result) if finding or facts.loss else "",
    }  # fmt: skip


def _place(exponent: float) -> float:
    share = (exponent - _LOWEST) / (_HIGHEST - _LOWEST)
    return round(100 * min(max(share, 0.0), 1.0), 2)


def _bounds(format_: FloatFormat) -> tuple[float, float]:
    return _place(math.log2(format_.smallest)), _place(math.log2(format_.largest))


def _anchor(facts: RangeFacts) -> str:
    return f"v{facts.index}-{''.join(c if c.isalnum() else '-' for c in facts.name[:80])}"


def _text(cell: str | Styled) -> str:
    return cell.text if isinstance(cell, Styled) else cell
