"""`attn-export explain`: find the cause of wrong outputs by evaluation and experiments."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.bundle.golden import stored_cases
from attn_export.bundle.manifest import GOLDEN, read_bundle
from attn_export.commands.fixed_graphs import fixed_graphs
from attn_export.commands.options import (
    STDOUT,
    fix_input_option,
    json_option,
    limit_own_memory,
    option,
    pairs,
)
from attn_export.commands.output import echo, write_file
from attn_export.errors import (
    PARAGRAPH,
    ParityError,
    RuntimeFailure,
    UsageError,
    counted,
    printable,
)
from attn_export.explain.explanation import Explanation
from attn_export.results import WHOLE_DECODE
from attn_export.runtimes.protocol import Options, Runtime, known_limit
from attn_export.runtimes.run_options import RunOptions
from attn_export.schema import Manifest

if TYPE_CHECKING:
    from attn_export.explain.eager_values import ValueReference
    from attn_export.explain.graph_run import GraphRunner

SECONDS = 45.0
"""The default time after which no further mistake, experiment or smaller case is tried."""

RULE = "by the judge's rule alone: --atol, --rtol and baselines are not applied"
DECODES = "whole decodes were not looked at: verify runs them"


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
    "--output", type=Path, metavar="DIR",
    help="The folder to write, which reproduces the fault.  [default: BUNDLE.explained, or "
    "FILE.onnx.explained]",
)  # fmt: skip
@option(
    "--seconds", type=float, least=1, default=SECONDS, show_default=True,
    help="The time after which no further experiment starts.",
)  # fmt: skip
@json_option("Write the explanation as JSON; - for stdout, without other output.")
@option("--quiet", is_flag=True, help="Print only the cause, in one sentence.")
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

    from attn_export.commands.compare import explain_graph
    from attn_export.explain.reproduce import to_json
    from attn_export.export.user_module import load_subject
    from attn_export.report.progress import progress
    from attn_export.report.result_terminal import print_explanation

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
            found = explain_graph(load, copies[0], run, output=place, **further)
    if json_file:
        write_file(json_file, to_json(found))
    if json_file != STDOUT:
        if quiet:
            echo(printable(found.sentence, PARAGRAPH))
        else:
            print_explanation(found, Console())
    codes = {"none": 0, "did not run": RuntimeFailure.exit_code}
    return codes.get(found.fault, ParityError.exit_code)


def explain(
    bundle: Path | str,
    run: RunOptions,
    *,
    graph: Path | str | None = None,
    case: str | None = None,
    options: Options | None = None,
    output: Path | str | None = None,
    seconds: float = SECONDS,
    reference: ValueReference | None = None,
) -> Explanation:
    """Return an explanation for the first graph of a bundle with which a runtime fails cases."""
    from attn_export.commands.failing_run import Deadline, FailingRun
    from attn_export.explain.causes import quality_sentences
    from attn_export.explain.eager_values import ValueReference
    from attn_export.explain.graph_run import golden_cases
    from attn_export.explain.reproduce import check_folder

    if math.isnan(seconds):
        raise UsageError("seconds must be a number; got nan")
    target = _available_runtime(run, options or {})
    folder, replacement = Path(bundle), Path(graph) if graph else None
    if output is not None:
        check_folder(Path(output))
    manifest = read_bundle(folder)
    cases = golden_cases(folder, case, keeps_non_finite=target.keeps_non_finite)
    make_runners = functools.partial(_runners, folder, manifest, run, options or {})
    runners, bundled = list(make_runners(replacement)), list(make_runners(None))
    run.progress.phase(f"running {counted(len(cases), 'case')} in {target.name}")
    deadline, found, runs = Deadline(seconds), None, {}
    place = Path(output) if output else None
    reasons: list[str] = []
    for runner in runners:
        name = runner.graph_file.name
        if reason := known_limit(target, runner.graph_file, [r.graph_file for r in runners]):
            reasons.append(reason)
            continue
        trial = runs[name] = runner.trial(cases)
        if not trial.all_passed:
            failing = FailingRun(
                runner, trial, manifest, cases, bundled, reference or ValueReference(),
                run.progress, deadline,
            )  # fmt: skip
            found = failing.explanation(place)
            break
    if found is None:
        ran = sum(len(trial.passed) for trial in runs.values())
        if not ran:
            raise RuntimeFailure(f"{target.name} runs no graph here: {'; '.join(reasons)}")
        kinds = {stored.kind for stored in stored_cases(folder / GOLDEN)[1]}
        notes = (RULE, *((DECODES,) if WHOLE_DECODE in kinds else ()), *reasons)
        found = Explanation(
            target.name, ", ".join(runs), runners[0].options, "none", cases=ran, notes=notes
        )
    distance = quality_sentences(folder, runs)
    return dataclasses.replace(found, seconds=deadline.elapsed(), distance=distance)


def _available_runtime(run: RunOptions, options: Options) -> Runtime:
    if len(run.runtimes) != 1:
        raise UsageError("explain looks at one runtime at a time; name it")
    (target,) = run.runtimes
    if options and not target.counter_options:
        raise UsageError(f"{target.name} takes no options")
    reason = target.unavailable()
    if reason:
        raise RuntimeFailure(f"{target.name} cannot run here: {reason}")
    return target


def _runners(
    folder: Path,
    manifest: Manifest,
    run: RunOptions,
    options: Options,
    graph: Path | None,
) -> Iterator[GraphRunner]:
    from attn_export.explain.graph_run import GraphRunner, graph_files_to_examine
    from attn_export.graph.load import load_proto

    if graph is not None:
        load_proto(graph)  # raises an error if it cannot be read
    parent = (graph.parent if graph else folder).absolute()
    for file in graph_files_to_examine(manifest, graph):
        yield GraphRunner(parent / file.name, file, run.runtimes[0], options, run.limits)
