"""Page docs/results/peers.md: results of `scripts/bench_peers` and its goals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from attn_export.parts.benchmarks.bench_report import in_ms, three_digits
from attn_export.parts.benchmarks.measurements import BenchReport, WorkloadResult
from attn_export.parts.benchmarks.peers import PEERS
from attn_export.report.tables import UNMEASURED, in_mib, markdown_table
from measuring.goals import MEMORY, ROOF, Goal, Workload

OURS = "ours"
DIALECT_LIMIT = 0.05

Seconds = Mapping[str, float]


def peers_page(report: BenchReport, workloads: Sequence[Workload], dialect: Seconds) -> str:
    """Return the page as Markdown.

    Args:
        report: The report, with a result of the same name for each workload.
        workloads: The workloads with their goals.
        dialect: Median seconds of ``"lower"`` and of ``"torch.onnx.export"``; empty if not run.
    """
    lines = [
        "# Against the peers",
        "",
        f"{report.threads} threads, float32, H 16, D 64; medians of {report.rounds} interleaved "
        "rounds; every figure is in [peers.json](peers.json). What the columns mean: "
        "[performance.md](../performance.md).",
    ]
    results = {result.name: result for result in report.workloads}
    run = [(workload, results[workload.name]) for workload in workloads if workload.name in results]
    for title, of_layer in (("Attention alone", False), ("The whole layer, E 1024", True)):
        part = [(r, c) for r, c in run if r.of_layer == of_layer]
        if part:
            lines += ["", f"## {title}", "", *_times(part), "", *_goals(part)]
    lines += ["", "## Another dialect, once exported", "", *_dialect(dialect)]
    return "\n".join([*lines, *_not_run(run)]) + "\n"


def unmet(report: BenchReport, workloads: Sequence[Workload], dialect: Seconds) -> list[str]:
    """Return a line for each goal of attention alone that was missed or not measured.

    Args:
        report: The report, with a result of the same name for each workload.
        workloads: The workloads with their goals.
        dialect: Median seconds of ``"lower"`` and of ``"torch.onnx.export"``; empty if not run.
    """
    results = {result.name: result for result in report.workloads}
    lines = [
        f"{workload.name}, {goal.against}: {goal.figure(results[workload.name]):.3g}, {goal.text}"
        for workload in workloads
        for goal in workload.goals
        if workload.name in results
        and not workload.of_layer
        and not goal.met(results[workload.name])
    ]
    if dialect and _dialect_ratio(dialect) > DIALECT_LIMIT:
        lines.append(f"another dialect: {_dialect_ratio(dialect):.3g}, ≤ {DIALECT_LIMIT}")
    return lines


def _times(part: Sequence[tuple[Workload, WorkloadResult]]) -> list[str]:
    peers = [
        row.name for row in PEERS if any(m.name == row.name for _, c in part for m in c.measured)
    ]
    head = ["median ms", OURS, *peers, "GFLOP/s", "GB/s", "of roof", "MiB"]
    rows = []
    for workload, result in part:
        ours = result.named(OURS)
        figures = [UNMEASURED] * 4
        if ours is not None:
            figures = [
                three_digits(ours.flops_per_second / 1e9),
                three_digits(ours.bytes_per_second / 1e9),
                three_digits(result.fraction(ours)),
                in_mib(ours.growth),
            ]
        names = [in_ms(result.named(name)) for name in peers]
        rows.append([workload.name, in_ms(ours), *names, *figures])
    return markdown_table(head, rows)


def _goals(part: Sequence[tuple[Workload, WorkloadResult]]) -> list[str]:
    head = ["workload", "against", OURS, "theirs", "ratio", "goal", "met"]
    rows = (
        [workload.name, *_goal_cells(goal, result)]
        for workload, result in part
        for goal in workload.goals
    )
    return markdown_table(head, rows)


def _goal_cells(goal: Goal, result: WorkloadResult) -> list[str]:
    figure, ours = goal.figure(result), result.named(OURS)
    met = "not measured" if math.isnan(figure) else "yes" if goal.met(result) else "**no**"
    name, mine, theirs = goal.against, f"{in_ms(ours)} ms", ""
    if goal.against == MEMORY:
        return [name, f"{figure:.0f} MiB", UNMEASURED, UNMEASURED, goal.text, met]
    if goal.against == ROOF:
        rate = math.nan if ours is None else ours.flops_per_second / 1e9
        mine, theirs = (f"{three_digits(x)} GFLOP/s" for x in (rate, result.flops_roof / 1e9))
    else:
        peer = goal.peer(result)
        name = goal.against if peer is None else peer.name
        theirs = f"{in_ms(peer)} ms"
    return [name, mine, theirs, three_digits(figure), goal.text, met]


def _dialect(dialect: Seconds) -> list[str]:
    if not dialect:
        return ["Not measured."]
    lower, export = dialect["lower"], dialect["torch.onnx.export"]
    ratio = _dialect_ratio(dialect)
    head = ["`lower()`", "`torch.onnx.export`", "ratio", "goal", "met"]
    met = "yes" if ratio <= DIALECT_LIMIT else "**no**"
    cells = [f"{lower * 1e3:.1f} ms", f"{export * 1e3:.0f} ms", three_digits(ratio),
             f"≤ {DIALECT_LIMIT}", met]  # fmt: skip
    return markdown_table(head, [cells])


def _dialect_ratio(dialect: Seconds) -> float:
    return dialect["lower"] / dialect["torch.onnx.export"]


def _not_run(part: Sequence[tuple[Workload, WorkloadResult]]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for workload, result in part:
        for m in result.measured:
            if not m.ran:
                reasons.setdefault(f"{m.name} {m.outcome}: {m.reason}", []).append(workload.name)
    if not reasons:
        return []
    lines = [f"- {reason} ({'; '.join(names)})" for reason, names in reasons.items()]
    return ["", "## Not run", "", *lines]
