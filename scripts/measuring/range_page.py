"""The page on planted overflows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

Outcomes = Sequence[Any]


def range_page(outcomes: Outcomes, old: str) -> tuple[str, bool]:
    """Return the page, and whether the goals are met.

    `old`: The page as it is, of which the part on peers stays.
    """
    plants = [x for x in outcomes if x.blame]
    fits = [x for x in outcomes if not x.blame]
    absorbed = [x for x in plants if x.absorbed]
    kept, nodes = sum(x.kept for x in plants), sum(x.nodes for x in plants)
    needed = [sum(x.needed[i] for x in plants) for i in (0, 1)]
    rows: list[tuple[str, str, str, bool]] = [
        _count("the node is among the findings", plants, lambda x: x.named, 38),
        _count("it is the first of them", plants, lambda x: x.first, 0),
        _count("absorbed, found as such", absorbed, lambda x: x.as_absorbed, 6),
        _count("graphs that fit and get a finding", fits, lambda x: not x.named, -1),
        _count("mended, as the command judges", plants, lambda x: x.fixed, 36),
        _count("mended, as the script judges", plants, lambda x: x.fixed_own, 36),
        ("nodes kept in float32", f"{kept} of {nodes}, {kept / max(nodes, 1):.1%}", "≤ 5 %",
         kept <= 0.05 * nodes),
        _count("graphs that keep at most 5 %", plants, lambda x: x.kept <= 0.05 * x.nodes, 0),
        ("nodes left out, after which it fails", f"{needed[0]} of {needed[1]}", "", True),
        _time("without `--fix`", [x.analysis_s / x.run_s for x in outcomes], 5),
        _time("with `--fix`", [x.fix_s / x.run_s for x in plants], 25),
    ]  # fmt: skip
    kinds = sorted({x.kind for x in plants})
    by_kind = [
        [kind, len(of), *(sum(getattr(x, n) for x in of) for n in _COUNTED),
         f"{median(x.kept for x in of):g} of {median(x.nodes for x in of):g}"]
        for kind in kinds for of in [[x for x in plants if x.kind == kind]]
    ]  # fmt: skip
    missed = [
        [x.model, x.kind, x.what, ", ".join(f"`{n}`" for n in x.blame[:2]),
         ", ".join(x.findings)[:160] or "none", _missing(x)]
        for x in outcomes if _missing(x)
    ]  # fmt: skip
    lines = [
        "# Planted overflows and underflows", "",
        f"{len(plants)} plants in {len({x.model for x in plants})} models, "
        "exported by transformers with written-out attention, random weights and 128 channels, and "
        f"{len(fits)} graphs that fit float16: unplanted ones, and ones with plants too small. An "
        "evaluation of the script's own (the operators of `onnx.reference` in float64, each result "
        "rounded) says what leaves float16 first, which graphs fit, and whether a mended graph is "
        "right: outputs wrong by at most 2 %, and 10 % in a row. Plants leave float64 finite, and "
        "are drawn again until float16 fails.", "",
        *_table(["", "found", "goal"], [row[:3] for row in rows]), "",
        "Times are those of the command in process, reading included, as multiples of one float64 "
        "run of the same graph (median of 3).", "",
        *_table(["kind", "plants", "named", "first", "absorbed", "found so", "mended (command)",
                 "mended (script)", "kept (median)"], by_kind), "",
        "## Misses", "",
        *_table(["model", "kind", "plant", "right", "findings", "missed"], missed), "",
    ]  # fmt: skip
    peers = old.find("## Peers")
    return "\n".join(lines) + (f"\n{old[peers:]}" if peers >= 0 else ""), all(r[3] for r in rows)


_COUNTED = ("named", "first", "absorbed", "as_absorbed", "fixed", "fixed_own")


def _missing(x: Any) -> str:
    if not x.blame:
        return "" if x.named else "blamed"
    lacks = {
        "named": not x.named, "absorbed": x.absorbed and not x.as_absorbed,
        "mended (command)": not x.fixed, "mended (script)": not x.fixed_own,
    }  # fmt: skip
    return ", ".join(name for name, is_missing in lacks.items() if is_missing)


def _count(
    name: str, of: Outcomes, test: Callable[[Any], bool], least: int
) -> tuple[str, str, str, bool]:
    """Return a row; a goal of -1 is none of them, and 0 is no goal."""
    count = sum(map(test, of))
    goal = {-1: "0", 0: ""}.get(least, f"≥ {least}")
    return (
        name,
        f"{count} of {len(of)}",
        goal,
        count == 0 if least < 0 else count >= min(least, len(of)),
    )


def _time(name: str, times: Sequence[float], most: float) -> tuple[str, str, str, bool]:
    middle = median(times) if times else 0.0
    found = f"times {middle:.1f} (median), {max(times, default=0):.1f} (most)"
    return f"time {name}", found, f"≤ {most:g}", middle <= most


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    return [
        f"| {' | '.join(heads)} |", "|" + "---|" * len(heads),
        *(f"| {' | '.join(str(x).replace('|', '/') for x in row)} |" for row in rows),
    ]  # fmt: skip
