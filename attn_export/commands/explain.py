"""`attn-export explain`: find the cause of wrong outputs by evaluation and experiments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.commands.compare import judge_compared
from attn_export.commands.compared_graph import read_compared
from attn_export.commands.fixed_graphs import fixed_graphs
from attn_export.commands.options import (
    STDOUT,
    fix_input_option,
    json_option,
    limit_own_memory,
    option,
    pairs,
    with_help,
)
from attn_export.commands.output import echo, write_file
from attn_export.errors import PARAGRAPH, ParityError, RuntimeFailure, UsageError, printable
from attn_export.runtimes.run_options import RunOptions
from attn_export.system_info import check_installed
from attn_export.temp_folders import scratch

if TYPE_CHECKING:
    from attn_export.explain.explanation import Explanation
    from attn_export.export.subject import Subject


@with_help(
    "Find causes",
    "explain models/mqa --runtime openvino",
    "explain --graph exported.onnx --module mine.py:subject --runtime ort-cpu",
)  # fmt: skip
@option("bundle", required=False, type=Path)
@option("--runtime", "runtime_name", required=True, metavar="NAME", help="The runtime.")
@option(
    "--module", metavar="PATH.py:FUNCTION",
    help="The module that --graph is compared with, in place of a bundle.",
)  # fmt: skip
@option("--case", metavar="NAME", help="The only case to look at.  [default: all]")
@option("--graph", type=Path, help="Explain this ONNX file, not the bundle's.")
@fix_input_option
@option(
    "--option", "options", multiple=True, metavar="KEY=VALUE", callback=pairs,
    help="An option of the runtime, as your program sets it. May be repeated.",
)  # fmt: skip
@option(
    "-o", "--output", type=Path, metavar="DIR",
    help="The folder to write, which reproduces the fault.  [default: BUNDLE.explained, or "
    "FILE.onnx.explained]",
)  # fmt: skip
@option(
    "--seconds", type=float, least=1, default=45.0, show_default=True,
    help="The work after which nothing further is tried, in seconds of an idle core.",
)  # fmt: skip
@json_option("Write the explanation as JSON; - for stdout, without other output.")
@option("-q", "--quiet", is_flag=True, help="Print only the cause, in one sentence.")
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

    Runs the failing cases in other ways, evaluates the graph in float64, tries known faults, and
    finds the first wrong node. Exit code 0 if all cases pass, 6 if one fails, 5 if the
    runtime could not run.
    """
    from rich.console import Console

    from attn_export.commands.explain_bundle import explain
    from attn_export.explain.reproduce import to_json
    from attn_export.export.user_module import load_subject
    from attn_export.report.progress import progress
    from attn_export.report.terminal import print_explanation

    path = bundle if module is None else graph
    if path is None or (bundle is not None and module is not None):
        raise UsageError(
            "explain takes a BUNDLE, or --module PATH.py:FUNCTION with --graph FILE.onnx"
        )
    limit_own_memory()
    place = output or path.absolute().with_name(f"{path.absolute().name}.explained")
    with fixed_graphs([graph] if graph else [], fixed) as copies, progress(quiet=quiet) as bar:
        run = RunOptions.of(runtimes=[runtime_name], progress=bar)
        if bundle is not None:
            (judged,) = copies or (None,)
            found = explain(bundle, run, graph=judged, output=place, **further)
        else:
            load = functools.partial(load_subject, str(module))
            found = _explain_graph(load, copies[0], run, output=place, **further)
    if json_file:
        write_file(json_file, to_json(found))
    if json_file != STDOUT:
        if quiet:
            echo(printable(found.sentence, PARAGRAPH))
        else:
            print_explanation(found, Console())
    codes = {"none": 0, "did not run": RuntimeFailure.exit_code}
    return codes.get(found.fault, ParityError.exit_code)


def _explain_graph(
    module: Callable[[], Subject], graph: Path, run: RunOptions, **options: Any
) -> Explanation:
    """Explain why a runtime's outputs for a graph differ from a module's; see `explain`."""
    from attn_export.commands.explain_bundle import explain
    from attn_export.reference.reference import read_reference

    check_installed("torch")
    compared = read_compared(graph, run.limits)
    with scratch() as folder:
        read = functools.partial(read_reference, module, {}, {})
        _, complete, _ = judge_compared(folder, compared, run, read, {})
        return explain(folder, run, graph=folder / graph.name, reference=complete(), **options)
