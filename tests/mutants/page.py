"""Results of the mutants, as a page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from mutants.trial import Tried

ROWS = {
    "a": "decode graphs, hidden scores, softmax",
    "b": "rows that see nothing",
    "c": "sizes, with inputs up to twice the golden ones",
    "c2": "sizes that may be beyond the golden ones",
    "c3": "one size alone",
    "d": "sizes beyond blocks",
    "e": "values",
    "e2": "values beyond what the golden inputs hold",
    "f": "what is not finite stays in its row",
    "g": "small numbers flushed to 0",
    "h": "rounded to fewer bits",
    "i": "small factors",
    "j": "usual faults",
}
GOALS = {"a": 1.0, "b": 1.0, "f": 1.0, "g": 1.0, "h": 1.0, "e2": 0.95, "c2": 0.0, "c3": 0.0}
USUAL_GOAL = 0.99
MOST_SHOWN = 120


def summary(results: Sequence[Tried]) -> tuple[str, bool]:
    """Return a table by row and kind, and whether the goals are met."""
    lines = [
        "| | kind | mutants | refused | faults | caught | share | caught, not seen |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    met = True
    for row, about in ROWS.items():
        of_row = [tried for tried in results if tried.row == row]
        if not of_row:
            continue
        lines.append(_line(f"**{row}**", f"**{about}**", of_row))
        met = met and _share(of_row) >= GOALS.get(row, USUAL_GOAL)
        kinds: dict[str, list[Tried]] = defaultdict(list)
        for tried in of_row:
            kinds[tried.kind].append(tried)
        lines += [_line("", kind, kinds[kind]) for kind in sorted(kinds)] if len(kinds) > 1 else []
    lines.append(_line("", "**all with a goal**", [t for t in results if GOALS.get(t.row, 1)]))
    return "\n".join(lines), met


def _line(row: str, kind: str, results: Sequence[Tried]) -> str:
    refused = sum(1 for tried in results if tried.fate == "refused")
    faults = [tried for tried in results if tried.is_fault]
    caught = sum(1 for tried in faults if tried.fate == "caught")
    beside = sum(1 for tried in results if tried.fate == "caught" and not tried.is_fault)
    share = f"{_share(results):.1%}" if faults else "-"
    return (
        f"| {row} | {kind} | {len(results)} | {refused} | {len(faults)} | {caught} | {share} "
        f"| {beside} |"
    )


def _caught(results: Sequence[Tried]) -> str:
    faults = [tried for tried in results if tried.is_fault]
    return f"{sum(1 for tried in faults if tried.fate == 'caught'):,} of {len(faults):,}"


def _share(results: Sequence[Tried]) -> float:
    faults = [tried for tried in results if tried.is_fault]
    return sum(1 for tried in faults if tried.fate == "caught") / len(faults) if faults else 1.0


def page(results: Sequence[Tried]) -> str:
    """Return docs/results/mutants.md."""
    table, _ = summary(results)
    missed = [tried for tried in results if tried.fate == "missed" and tried.is_fault]
    shown = [
        f"- ({tried.row}) {tried.what}; {tried.bundle}/{tried.graph}; seen in `{tried.seen}`"
        for tried in missed[:MOST_SHOWN]
    ]
    unknown = [tried for tried in results if tried.fate == "missed" and tried.is_unknown]
    more = len(missed) - len(shown)
    return "\n".join([
        "# Mutants",
        "",
        "Faults are planted into the graphs of small bundles, in every dialect. A "
        "mutant is a fault where its outputs in float64 are further from the reference than the "
        "tolerance, on inputs of its own: other numbers, sizes up to twice those of the test "
        "cases, louder values. It is caught where a test case fails in ONNX Runtime on the "
        "CPU. Mutants that ONNX Runtime refuses, or that crash it, are counted apart. The last "
        "column has those that are caught though the inputs of their own show nothing.",
        "",
        f"{len(results)} mutants.",
        "",
        table,
        "",
        f"{_caught(results)} faults are caught. The last row leaves out c2 and c3, which have no "
        "goal: their sizes may be larger than those of any golden vector, or a single size.",
        "",
        f"## Missed: {len(missed)}",
        "",
        *(shown or ["None."]),
        *([f"- and {more} more"] if more > 0 else []),
        *(["", f"{len(unknown)} more passed, and float64 could not evaluate them."]
          if unknown else []),
        "",
    ])  # fmt: skip
