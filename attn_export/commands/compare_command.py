"""`attn-export compare` and `explain`: compare a graph with its truth, and explain differences."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import click

from attn_export.bundle.manifest import failed_folder
from attn_export.commands.options import (
    PATH,
    STDOUT,
    fix_input_option,
    json_option,
    limit_own_memory,
    module_option,
    pairs,
    runtime_options,
)
from attn_export.commands.output import Output, output_options, write_file
from attn_export.errors import PARAGRAPH, ParityError, RuntimeFailure, UsageError, printable


@click.command("compare")
@click.argument("graphs", nargs=-1, metavar="[A.onnx B.onnx]", type=PATH)
@module_option
@click.option(
    "--graph", type=PATH, metavar="FILE.onnx",
    help="The ONNX file to compare with --module.",
)  # fmt: skip
@click.option(
    "--name", "names", multiple=True, metavar="NAME=OTHER", callback=pairs,
    help="An input or output of the module (or of A) that the graph calls OTHER.",
)  # fmt: skip
@click.option(
    "--range", "ranges", multiple=True, metavar="NAME=LOW:HIGH",
    help="The least and the largest value of an integer input of A.",
)  # fmt: skip
@click.option(
    "--relation", "relations", multiple=True, metavar="AXIS=SUM", callback=pairs,
    help="An axis of A that equals another, or a sum: total_len=past_len+query_len.",
)  # fmt: skip
@fix_input_option
@runtime_options
@click.option(
    "--output", type=PATH, metavar="DIR",
    help="Write the graph, the cases and the truth as a bundle.",
)  # fmt: skip
@output_options
def compare_command(
    graphs: tuple[Path, ...],
    module: str | None,
    graph: Path | None,
    ranges: tuple[str, ...],
    fixed: dict[str, str],
    output: Path | None,
    destinations: Output,
    **options: Any,
) -> int:
    """Compare any ONNX graph with a module, or with another graph.

    Either --module and --graph, or two files: the float64 run of the module, or of A.onnx, is the
    truth. Inputs and outputs are matched by name, else by position.
    """
    from attn_export.commands.compare import compare
    from attn_export.commands.fixed_graphs import fixed_graphs
    from attn_export.export.user_module import load_subject

    _check_sources(graphs, module, graph)
    limits = dict(_range(text) for text in ranges)
    limit_own_memory()
    with fixed_graphs([graph] if graph else graphs, fixed) as (*others, judged):
        reference = functools.partial(load_subject, module) if module else others[0]
        with destinations.job(judged.stem) as bar:
            report = compare(
                reference, judged, ranges=limits, output=output, progress=bar, **options
            )
        bundle = output if output is None or report.passed else failed_folder(output)
        return destinations.render(report, bundle)


def _check_sources(graphs: tuple[Path, ...], module: str | None, graph: Path | None) -> None:
    """Raise UsageError unless the options name a module and a graph, or two graphs."""
    has_module = module is not None and graph is not None and not graphs
    has_two_graphs = module is None and graph is None and len(graphs) == 2
    if not (has_module or has_two_graphs):
        raise UsageError(
            "compare takes --module PATH.py:FUNCTION --graph FILE.onnx, or two files A.onnx B.onnx"
        )


def _range(text: str) -> tuple[str, tuple[int, int]]:
    name, _, span = text.partition("=")
    low, _, high = span.partition(":")
    try:
        limits = int(low), int(high)
    except ValueError:
        limits = None
    if not name or limits is None or limits[0] > limits[1]:
        raise UsageError(f"--range is NAME=LOW:HIGH, two whole numbers; got {text!r}")
    return name, limits


# -- `attn-export explain` ----------------------------------------------------------------------


@click.command("explain")
@click.argument("bundle", required=False, type=PATH)
@click.option("--runtime", "runtime_name", required=True, metavar="NAME", help="The runtime.")
@click.option(
    "--module", metavar="PATH.py:FUNCTION",
    help="The module that --graph is compared with, in place of a bundle.",
)  # fmt: skip
@click.option("--case", metavar="NAME", help="The only case to look at.  [default: all]")
@click.option("--graph", type=PATH, help="Explain this ONNX file, not the bundle's.")
@fix_input_option
@click.option(
    "--option", "options", multiple=True, metavar="KEY=VALUE", callback=pairs,
    help="An option of the runtime, as your program sets it. May be repeated.",
)  # fmt: skip
@click.option(
    "--output", type=PATH, metavar="DIR",
    help="The folder to write, which reproduces the fault.  [default: BUNDLE.explained, or "
    "FILE.onnx.explained]",
)  # fmt: skip
@click.option(
    "--seconds", type=click.FloatRange(min=1), default=45.0, show_default=True,
    help="The time after which no further experiment starts.",
)  # fmt: skip
@json_option("Write the explanation as JSON; - for stdout, without other output.")
@click.option("--quiet", is_flag=True, help="Print only the cause, in one sentence.")
def explain_command(
    bundle: Path | None,
    runtime_name: str,
    module: str | None,
    graph: Path | None,
    fixed: dict[str, str],
    output: Path | None,
    json_file: str | None,
    quiet: bool,
    **further: Any,
) -> int:
    """Explain why a runtime's outputs differ, and write a folder that reproduces it.

    Takes a BUNDLE, or --graph FILE.onnx with --module PATH.py:FUNCTION.

    Runs the failing cases in other ways, evaluates the graph in float64, tries known mistakes, and
    finds the first wrong node. Exit code 0 if all cases pass, 6 if one fails, 5 if the
    runtime could not run.
    """
    from rich.console import Console

    from attn_export.commands.explain import explain
    from attn_export.commands.fixed_graphs import fixed_graphs
    from attn_export.explain.reproduce import to_json
    from attn_export.report.progress import progress
    from attn_export.report.result_terminal import print_explanation

    limit_own_memory()
    path = _explained_path(bundle, module, graph)
    arguments: dict[str, Any] = {
        **further,
        "output": output or path.with_name(f"{path.name}.explained"),
    }  # fmt: skip
    with fixed_graphs([graph] if graph else [], fixed) as copies, progress(quiet=quiet) as bar:
        if bundle is not None:
            (judged,) = copies or (None,)
            explanation = explain(bundle, runtime_name, graph=judged, progress=bar, **arguments)
        else:
            from attn_export.commands.compare import explain_graph
            from attn_export.export.user_module import load_subject

            load = functools.partial(load_subject, str(module))
            explanation = explain_graph(load, copies[0], runtime_name, progress=bar, **arguments)
    if json_file:
        write_file(json_file, to_json(explanation))
    if json_file != STDOUT:
        if quiet:
            click.echo(printable(explanation.sentence, PARAGRAPH))
        else:
            print_explanation(explanation, Console())
    codes = {"none": 0, "did not run": RuntimeFailure.exit_code}
    return codes.get(explanation.fault, ParityError.exit_code)


def _explained_path(bundle: Path | None, module: str | None, graph: Path | None) -> Path:
    """Return the path of the bundle, or of the graph that is compared with a module."""
    path = bundle if module is None else graph
    if path is None or (bundle is not None and module is not None):
        raise UsageError(
            "explain takes a BUNDLE, or --module PATH.py:FUNCTION with --graph FILE.onnx"
        )
    return path.absolute()
