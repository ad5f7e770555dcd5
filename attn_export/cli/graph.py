"""`attn-export check` and `attn-export lower`: commands on any ONNX file."""

from __future__ import annotations

from pathlib import Path

import click

from attn_export.errors import PARAGRAPH, GraphError, printable


@click.command("check")
@click.argument("model", metavar="MODEL.onnx", type=click.Path(path_type=Path))
def check_command(model: Path) -> int:
    """Check any ONNX file; beside a manifest.json, against its entry."""
    from attn_export.graph.checks import CHECKS
    from attn_export.jobs.check import check

    findings = check(model)
    for finding in findings:
        click.echo(printable(f"{model}: {finding.check}: {finding.message}"))
    if findings:
        return GraphError.exit_code
    click.echo(printable(f"{model}: {len(CHECKS)} checks passed"))
    return 0


@click.command("lower")
@click.argument("model", metavar="MODEL.onnx", type=click.Path(path_type=Path))
@click.option("--dialect", required=True, metavar="NAME", help="standard, portable, ort.")
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="OUT.onnx",
    help="The file to write.",
)
def lower_command(model: Path, dialect: str, output: Path) -> int:
    """Rewrite the Attention nodes of any ONNX file.

    standard: ai.onnx Attention, opset 23 or 24. portable: opset 18, without Attention, for
    runtimes that have no such operator. ort: the fastest forms in ONNX Runtime; with a KV cache,
    a graph for one query a step goes to OUT.decode.onnx.
    """
    from attn_export.jobs.lower import lower_file

    for path, found in lower_file(model, output, dialect).items():
        counts = ", ".join(f"{count} {name}" for name, count in sorted(found.items()))
        click.echo(printable(f"{path}: {dialect}: {counts}", PARAGRAPH))
    return 0
