"""The page on planted faults."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from planted.judging import CASES, LEAST_CONFIG, LEAST_GRAPH, Drawn

GOALS = {"caught": 0.99, "layer": 0.95, "cause": 0.85}
"""The least share of the faults."""


def faults_page(drawn: Sequence[Drawn], none: Sequence[str]) -> tuple[str, bool]:
    """Return the page, and whether the goals are met.

    `none`: The kinds for which no place was found.
    """
    count = len(drawn) or 1
    shares = {name: sum(getattr(x, name) for x in drawn) / count for name in GOALS}
    met = all(shares[name] >= goal for name, goal in GOALS.items())
    kinds: dict[str, list[Drawn]] = defaultdict(list)
    for one in drawn:
        kinds[one.kind].append(one)
    rows = [
        f"| {kind} | {len(of)} | " + " | ".join(str(sum(getattr(x, n) for x in of)) for n in GOALS)
        + " |" for kind, of in sorted(kinds.items())
    ]  # fmt: skip
    missed = [
        f"| {one.kind} | {one.graph} | {_cell(one.what, 140)} | {one.size:.1e} | "
        + ", ".join(n for n in GOALS if not getattr(one, n)) + f" | {_cell(one.report, 260)} |"
        for one in drawn if not one.cause or not one.layer
    ]  # fmt: skip
    goals = [
        f"| {name} | {sum(getattr(x, name) for x in drawn)} of {len(drawn)}, "
        f"{shares[name]:.1%} | ≥ {goal:.0%} |" for name, goal in GOALS.items()
    ]  # fmt: skip
    lines = [
        "# Planted faults in whole models", "",
        f"{len(drawn)} faults of {len(kinds)} kinds in {len({x.graph for x in drawn})} graphs. The "
        "kinds and the draw know nothing of the tables of faults; the accepted words were fixed "
        f"before this seed. A fault moves an output by {LEAST_CONFIG:g} in "
        f"float64 (configs) or {LEAST_GRAPH:g} in float32 (graphs) and more; others were drawn "
        f"again. Judged in {CASES} cases and with each input changed, in ort-cpu.", "",
        "| | of the faults | goal |", "|---|---|---|", *goals, "",
        "Layer: the explanation has the layer, the node or, for a config, the field. Cause: the "
        "first explanation names the field, the node, the weight or the kind.", "",
        "| kind | drawn | caught | layer | cause |", "|---|---|---|---|---|", *rows, "",
        "## Misses", "", "| kind | graph | change | size | missed | explanation |",
        "|---|---|---|---|---|---|", *missed, "",
        f"No place, or no fault in any graph: {', '.join(dict.fromkeys(none)) or 'none'}.", "",
    ]  # fmt: skip
    return "\n".join(lines), met


def _cell(text: str, most: int) -> str:
    text = text.replace("|", "\\|").replace("\n", " ")
    return text if len(text) <= most else text[:most] + " …"
