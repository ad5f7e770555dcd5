"""Command `range`: which values of a graph leave float16, what that does, and what mends it."""

from __future__ import annotations

from pathlib import Path

from attn_export.commands.options import (
    BUDGET,
    STDOUT,
    check_folders,
    file_option,
    fix_input_option,
    json_option,
    limit_own_memory,
    model_option,
    module_option,
    option,
    quiet_option,
    with_help,
)
from attn_export.commands.output import echo, write_file
from attn_export.errors import UsageError, printable

_FORMATS = ("float16", "bfloat16")
_MISMATCH = 6


@with_help(
    "Find causes",
    "range model.onnx",
    "range model.onnx --fix model.float16.onnx",
    "range --model tiny-llama --dtype bfloat16",
)  # fmt: skip
@option("path", metavar="[MODEL.onnx|BUNDLE]", required=False, type=Path)
@option("--dtype", choices=_FORMATS, default="float16", show_default=True, help="The format.")
@option(
    "--inputs", multiple=True, metavar="FILE.npz|PATH.py:FUNCTION",
    help="Inputs by name, or a function that returns them.  [default: stored or random ones]",
)  # fmt: skip
@module_option
@model_option
@fix_input_option
@option("--fix", type=Path, metavar="OUT.onnx", help="Write a graph that is right in the format.")
@BUDGET
@option(
    "--limit", "limits", multiple=True, metavar="MEASURE<=N",
    help="Exit with 6 beyond this: findings<=0, error<=2 (times ordinary rounding), "
    "kept<=3 (nodes), margin>=1 (bits).",
)  # fmt: skip
@json_option("Write facts on every value; - for stdout.")
@file_option("--html", "html_file", "Write a page with a bar of exponents for each value.")
@quiet_option
def range_command(
    path: Path | None, dtype: str, inputs: tuple[str, ...], module: str | None,
    model: Path | None, fixed: dict[str, str], fix: Path | None, budgets: tuple[str, ...],
    limits: tuple[str, ...], json_file: str | None, html_file: str | None, quiet: bool,
) -> int:  # fmt: skip
    """Show which values of a graph leave float16, and what this does to its outputs.

    Each node is computed in float64 and rounded. A value is named if rounding it alone changes the
    outputs. With --fix, as few nodes as possible stay in float32.
    """
    check_folders(model=model)
    from attn_export.commands.fixed_graphs import fixed_graphs
    from attn_export.parts.value_ranges import range_report as report
    from attn_export.parts.value_ranges.range_flow import graph_of, ranges_of
    from attn_export.parts.value_ranges.range_result import RangeLimit
    from attn_export.quality import Budget
    from attn_export.report.progress import progress

    wanted, given = [RangeLimit.parse(text) for text in limits], [Budget.parse(x) for x in budgets]
    if fix is not None and fix.suffix != ".onnx":
        raise UsageError(f"--fix {printable(fix)} is no .onnx file; write OUT.onnx")
    limit_own_memory()
    with (
        progress(quiet=quiet) as bar, graph_of(path, module, model, fix) as (file, sets),
        fixed_graphs([file], fixed) as (graph,),
    ):  # fmt: skip
        result = ranges_of(graph, sets, inputs, dtype, fix, given, bar)
    exceeded = [text for text in (limit.exceeded(result.measured) for limit in wanted) if text]
    if json_file:
        write_file(json_file, report.to_json(result))
    if html_file:
        write_file(html_file, report.to_html(result))
    if json_file != STDOUT and not quiet:
        from rich.console import Console

        report.print_to(result, Console())
    for text in exceeded:
        echo(f"limit exceeded: {text}", err=True)
    fails = (fix is not None or given) and not result.holds
    return _MISMATCH if exceeded or fails else 0
