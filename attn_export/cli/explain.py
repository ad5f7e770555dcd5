"""`attn-export explain`."""

from __future__ import annotations

from pathlib import Path

import click

from attn_export.cli.output import STDOUT, check_folders, write_file
from attn_export.errors import PARAGRAPH, ParityError, RuntimeFailure, UsageError, printable


@click.command("explain")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--runtime", "runtime_name", required=True, metavar="NAME", help="Which fails.")
@click.option("--case", metavar="NAME", help="The only case to look at.  [all]")
@click.option(
    "--graph", type=click.Path(path_type=Path), help="Explain this ONNX file, not the bundle's."
)
@click.option(
    "--option", "options", multiple=True, metavar="KEY=VALUE",
    help="Of the engine, as your program sets it; may be given again.",
)  # fmt: skip
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="DIR",
    help="The folder that reproduces it.  [<bundle>.explained]",
)  # fmt: skip
@click.option(
    "--seconds", type=click.FloatRange(min=1), default=45.0, show_default=True,
    help="After which no further experiment is begun.",
)  # fmt: skip
@click.option(
    "--json", "json_file", metavar="FILE", help="Write it as JSON too; - for stdout, alone."
)
@click.option("--quiet", is_flag=True, help="No progress, and the sentence alone.")
def explain_command(
    bundle: Path,
    runtime_name: str,
    case: str | None,
    graph: Path | None,
    options: tuple[str, ...],
    output: Path | None,
    seconds: float,
    json_file: str | None,
    quiet: bool,
) -> int:
    """Say why a runtime gives other numbers, and write a folder that reproduces it.

    Runs the failing cases in other ways, evaluates the graph in float64, tries known mistakes, and
    finds the first wrong node. Exit code 0 if nothing fails, 6 if something does, 5 if no numbers
    came out.
    """
    from rich.console import Console

    from attn_export.explain.reproduce import to_json
    from attn_export.jobs.explain import explain
    from attn_export.report.explanation_terminal import print_explanation
    from attn_export.report.progress import progress

    check_folders(json_file)
    output = output or bundle.absolute().with_name(bundle.absolute().name + ".explained")
    with progress(quiet=quiet) as bar:
        found = explain(
            bundle, runtime_name, case=case, graph=graph, options=_pairs(options), output=output,
            seconds=seconds, progress=bar,
        )  # fmt: skip
    if json_file:
        write_file(json_file, to_json(found))
    if json_file != STDOUT:
        if quiet:
            click.echo(printable(found.sentence, PARAGRAPH))
        else:
            print_explanation(found, Console())
    codes = {"none": 0, "did not run": RuntimeFailure.exit_code}
    return codes.get(found.fault, ParityError.exit_code)


def _pairs(options: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not key or not equals:
            raise UsageError(f"--option is KEY=VALUE; got {option!r}")
        pairs[key] = value
    return pairs
