"""`attn-export compare`: a graph of any origin against a module or another graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attn_export.cli.options import limit_own_memory, runtime_options
from attn_export.cli.output import Output, output_options
from attn_export.errors import UsageError


@click.command("compare")
@click.argument("graphs", nargs=-1, metavar="[A.onnx B.onnx]", type=click.Path(path_type=Path))
@click.option(
    "--module", metavar="PATH.py:FUNCTION", help="A function that returns a Subject of your own."
)
@click.option(
    "--graph", type=click.Path(path_type=Path), metavar="FILE.onnx",
    help="The graph to judge by --module.",
)  # fmt: skip
@click.option(
    "--name", "names", multiple=True, metavar="NAME=OTHER",
    help="An input or output of the module (or of A) that the graph calls OTHER.",
)  # fmt: skip
@click.option(
    "--range", "ranges", multiple=True, metavar="NAME=LOW:HIGH",
    help="The values of an integer input of A.",
)  # fmt: skip
@runtime_options
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="DIR",
    help="Write the graph, the cases and the truth as a bundle.",
)  # fmt: skip
@output_options
def compare_command(
    graphs: tuple[Path, ...],
    module: str | None,
    graph: Path | None,
    names: tuple[str, ...],
    ranges: tuple[str, ...],
    output: Path | None,
    json_file: str | None,
    junit_file: str | None,
    html_file: str | None,
    quiet: bool,
    **options: Any,
) -> int:
    """Judge a graph that anyone made: by a module, or by another graph.

    Either --module and --graph, or two files: the float64 run of the module, or of A.onnx, is the
    truth. Inputs and outputs are matched by name, else by position.
    """
    from attn_export.jobs.compare import compare
    from attn_export.report.progress import progress

    wanted = Output(json_file, junit_file, html_file, quiet)
    wanted.check()
    _check_sources(graphs, module, graph)
    pairs = dict(_pair("--name", text) for text in names)
    limits = dict(_range(text) for text in ranges)
    limit_own_memory()
    judged = graph or graphs[1]
    with wanted.refusals(judged.stem), progress(quiet=quiet) as bar:
        reference: Any = graphs[0] if graphs else None
        if module is not None:
            bar.phase("importing torch")
            from attn_export.user_module import load_subject

            reference = load_subject(module)
        report = compare(
            reference, judged, names=pairs, ranges=limits, output=output,
            progress=bar, **options,
        )  # fmt: skip
    place = output
    if output is not None and not report.passed:
        place = output.with_name(output.name + ".failed")
    return wanted.render(report, place)


def _check_sources(graphs: tuple[Path, ...], module: str | None, graph: Path | None) -> None:
    """Refuse anything but a module and a graph, or two graphs.

    Raises:
        UsageError: If something else is given.
    """
    of_module = module is not None and graph is not None and not graphs
    of_graphs = module is None and graph is None and len(graphs) == 2
    if not (of_module or of_graphs):
        raise UsageError(
            "compare takes --module PATH.py:FUNCTION --graph FILE.onnx, or two files A.onnx B.onnx"
        )


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, other = text.partition("=")
    if not (name and equals and other):
        raise UsageError(f"{option} is NAME=OTHER; got {text!r}")
    return name, other


def _range(text: str) -> tuple[str, tuple[int, int]]:
    name, span = _pair("--range", text) if "=" in text else ("", "")
    low, colon, high = span.partition(":")
    try:
        found = int(low), int(high)
    except ValueError:
        colon = ""
        found = 0, 0
    if not name or not colon or found[0] > found[1]:
        raise UsageError(f"--range is NAME=LOW:HIGH, two whole numbers; got {text!r}")
    return name, found
