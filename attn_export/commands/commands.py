"""Commands `check`, `lower` and `runtimes`."""

from __future__ import annotations

from pathlib import Path

import click

from attn_export.commands.options import (
    PATH,
    fix_input_option,
)
from attn_export.errors import PARAGRAPH, GraphError, UsageError, printable

# -- `attn-export check` and `attn-export lower`: commands on any ONNX file ---------------------


@click.command("check")
@click.argument("model", metavar="MODEL.onnx", type=PATH)
@fix_input_option
def check_command(model: Path, fixed: dict[str, str]) -> int:
    """Check any ONNX file; beside a manifest.json, also against its entry.

    In other files, what the ONNX standard allows is only a warning. Exit code 4 if a file
    violates the standard, or its entry.
    """
    from attn_export.commands.check import check, grouped
    from attn_export.commands.fixed_graphs import fixed_graphs
    from attn_export.graph.checks import CHECKS

    with fixed_graphs([model], fixed) as (graph,):
        findings = check(graph)
    for finding, count in grouped(findings):
        level = "warning: " if finding.is_warning else ""
        more = f" (and {count - 1} more like it)" if count > 1 else ""
        click.echo(printable(f"{model}: {level}{finding.check}: {finding.message}{more}"))
    if not all(finding.is_warning for finding in findings):
        return GraphError.exit_code
    passed = len(CHECKS) - len({finding.check for finding in findings})
    click.echo(printable(f"{model}: {passed} checks passed"))
    return 0


@click.command("lower")
@click.argument("model", metavar="MODEL.onnx", type=PATH)
@click.option("--dialect", required=True, metavar="NAME", help="standard, portable, ort.")
@click.option("--output", required=True, type=PATH, metavar="OUT.onnx", help="The file to write.")
@fix_input_option
def lower_command(model: Path, dialect: str, output: Path, fixed: dict[str, str]) -> int:
    """Rewrite the Attention nodes of any ONNX file, and attention that is written out.

    standard: ai.onnx Attention, opset 23 or 24. portable: opset 18, without Attention, for
    runtimes that have no such operator. ort: the fastest forms in ONNX Runtime; with a KV cache,
    a graph for one query a step goes to OUT.decode.onnx.
    """
    from attn_export.commands.fixed_graphs import fixed_graphs
    from attn_export.commands.lower import lower_file

    if fixed and output.exists() and model.exists() and output.samefile(model):
        raise UsageError(f"{output} is the file to lower; choose another --output")
    with fixed_graphs([model], fixed) as (graph,):
        lowered = lower_file(graph, output, dialect)
    if lowered.note:
        click.echo(printable(f"{model}: {lowered.note}"))
    for path, counts in lowered.operators.items():
        text = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        click.echo(printable(f"{path}: {dialect}: {text}", PARAGRAPH))
    return 0


# -- `attn-export runtimes` ---------------------------------------------------------------------


@click.command("runtimes")
def runtimes_command() -> int:
    """List the runtimes: version, device and dialects, or the reason why one cannot run here."""
    from attn_export.dialect_names import DIALECTS
    from attn_export.runtimes.catalogue import all_runtimes, runtimes_of_parts

    for runtime in all_runtimes():
        reason = runtime.unavailable()
        runs = " ".join(name for name in DIALECTS if name in runtime.dialects)
        state = f"unavailable: {reason}" if reason else f"{runtime.device}: {runs}"
        click.echo(f"{runtime.name:<15} {runtime.version() or '-':<10} {state}")
    for runtime, about in runtimes_of_parts():
        reason = runtime.unavailable()
        state = f"unavailable: {reason}" if reason else about
        click.echo(f"{runtime.name:<23} {runtime.version() or '-':<10} {state}")
    return 0
