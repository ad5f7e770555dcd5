"""`attn-export compare`: compare a graph of any origin with a module or another graph."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from attn_export.bundle.manifest import dimensions, failed_folder, staging
from attn_export.commands.compared_graph import (
    match_names,
    read_compared,
    reduce_bundle,
    write_bundle,
)
from attn_export.commands.explain_failures import explain_failures
from attn_export.commands.fixed_graphs import fixed_graphs
from attn_export.commands.judge_graphs import axes_of, caches_of, judge_graphs
from attn_export.commands.options import (
    BUDGET,
    SEARCH_MORE,
    check_folders,
    fix_input_option,
    limit_own_memory,
    model_option,
    module_option,
    option,
    pairs,
    ranges,
    run_options,
    with_help,
)
from attn_export.commands.output import Output, output_options
from attn_export.errors import AttnExportError, ExportError, GraphError, UsageError, printable
from attn_export.explain.explanation import LONG, SECONDS
from attn_export.graph import Graph
from attn_export.graph.load import load_proto
from attn_export.optional_parts import model_hook
from attn_export.results import Report, TensorNames
from attn_export.runtimes.pool import Pool
from attn_export.runtimes.run_options import RunOptions
from attn_export.schema import TensorSignature
from attn_export.spec import AttentionSpec
from attn_export.system_info import check_installed, environment
from attn_export.temp_folders import scratch

if TYPE_CHECKING:
    import onnx

    from attn_export.explain.eager_values import ValueReference
    from attn_export.export.subject import Subject
    from attn_export.reference.reference import Reference
    from attn_export.reference.tolerance import BaseOracle
    from attn_export.results import Golden, LayerError

_EXAMPLES = (
    "compare --model Llama-3.2-1B --graphs exported",
    "compare --module mine.py:subject --graph exported.onnx",
)
OTHER = "reference.onnx"
"""The file name of the reference in the bundle of a comparison of two graphs."""

Signatures = Mapping[str, TensorSignature]


@with_help("Judge", *_EXAMPLES)
@option("graphs", nargs=-1, metavar="[A.onnx B.onnx]", type=Path)
@module_option
@option("--graph", type=Path, metavar="FILE.onnx", help="The ONNX file of --module.")
@model_option
@option(
    "--adapter", type=Path, metavar="FOLDER",
    help="A LoRA adapter of --model, as peft saves it, merged into its weights.",
)  # fmt: skip
@option(
    "--graphs", "exported", type=Path, metavar="FOLDER",
    help="The graphs that another exporter made of --model, or of the model of --module.",
)  # fmt: skip
@option("--layout", metavar="NAME", help="The exporter of --graphs.  [default: as recognised]")
@option(
    "--name", "names", multiple=True, metavar="NAME=OTHER", callback=pairs,
    help="An input or output of the module (or of A) that the graph calls OTHER.",
)  # fmt: skip
@option(
    "--range", "ranges", multiple=True, metavar="NAME=LOW:HIGH", callback=ranges,
    help="The least and the largest value of an integer input of A.",
)  # fmt: skip
@option(
    "--relation", "relations", multiple=True, metavar="AXIS=SUM", callback=pairs,
    help="An axis of A that equals another, or a sum: total_len=past_len+query_len.",
)  # fmt: skip
@option(
    "--inputs", multiple=True, metavar="FILE|PATH.py:FUNCTION",
    help="Inputs of your own as cases, too: FILE.npz by name; of --model also prompts, as ids in "
    "FILE.json or text in FILE.txt.",
)  # fmt: skip
@fix_input_option
@run_options(BUDGET, SEARCH_MORE)
@option(
    "-o", "--output", type=Path, metavar="DIR", help="Write the graph and its cases as a bundle."
)
@output_options
def compare_command(
    graphs: tuple[Path, ...],
    module: str | None,
    graph: Path | None,
    model: Path | None,
    adapter: Path | None,
    exported: Path | None,
    layout: str | None,
    fixed: dict[str, str],
    run: RunOptions,
    output: Path | None,
    destinations: Output,
    **options: Any,
) -> int:
    """Compare any ONNX graph with a module, another graph, or a whole model.

    The reference is the float64 run of --module, of A.onnx, or of --model as transformers runs it.
    Inputs and outputs are matched by name, else by position.
    """
    from attn_export.export.user_module import load_subject

    if exported is not None:
        if (model is None) == (module is None) or graph or graphs or fixed:
            raise UsageError("--graphs FOLDER is for --model FOLDER, or for --module alone")
        check_folders(model=model, adapter=adapter)
        if not exported.exists():
            raise UsageError(f"cannot read {exported}: no such file")
        limit_own_memory()
        given = {"layout": layout, "adapter": adapter, "output": output}
        given |= {name: options[name] for name in ("names", "inputs")}
        with destinations.job(exported.absolute().name, run) as run:
            report = compare_models(model or load_subject(str(module)), exported, run, **given)
        return destinations.render(report, output)
    if model is not None or layout is not None or adapter is not None:
        raise UsageError(
            "--model, --adapter and --layout need --graphs FOLDER, the graphs to judge"
        )
    has_module = module is not None and graph is not None and not graphs
    if not has_module and (module is not None or graph is not None or len(graphs) != 2):
        raise UsageError(
            "compare takes --module PATH.py:FUNCTION --graph FILE.onnx, or two files A.onnx B.onnx"
        )
    limit_own_memory()
    with fixed_graphs([graph] if graph else graphs, fixed) as (*others, judged):
        reference = functools.partial(load_subject, module) if module else others[0]
        with destinations.job(judged.stem, run) as run:
            if module and run.budgets:
                given = {name: options[name] for name in ("names", "inputs")}
                report = compare_quantised(reference, judged, run, output=output, **given)
                return destinations.render(report, output)
            report = compare(reference, judged, run, output=output, **options)
        bundle = output if output is None or report.passed else failed_folder(output)
        return destinations.render(report, bundle)


def compare_models(
    model: Any, graphs: Path | str, run: RunOptions | None = None, **options: Any
) -> Report:
    """Judge graphs of a whole model: see the part that does it."""
    judged: Report = model_hook("compare_models")(compare, model, graphs, run, **options)
    return judged


def compare_quantised(load: Any, graph: Path, run: RunOptions, **options: Any) -> Report:
    """Judge a quantised graph of a module by budgets: see the part that does it."""
    of_part = model_hook("compare_quantised", ("torch",))
    judged: Report = of_part(compare, load, graph, run, **options)
    return judged


def compare(
    reference: Subject | AttentionSpec | Path | str | Callable[[], Subject | Reference],
    graph: Path | str,
    run: RunOptions | None = None,
    *,
    names: Mapping[str, str] | None = None,
    ranges: Mapping[str, tuple[int, int]] | None = None,
    relations: Mapping[str, str] | None = None,
    inputs: Sequence[Any] = (),
    output: Path | str | None = None,
    reproduction: Path | None = None,
) -> Report:
    """Run a graph in runtimes, and judge the outputs by a module or another graph.

    `names`: `{name in the reference: name in the graph}`, of inputs and outputs. Others are matched
    by equal names, and the remaining ones by position.
    `ranges`: `{input of the reference: (smallest, largest)}`, inclusive, of integer inputs, if the
    reference is a graph. Default: as `graph/ranges` reads them from it.
    `inputs`: Files or functions with inputs of the user's own, which are cases, too.

    Returns:
        The report. The bundle is in `output` if the report passed, else in `OUTPUT.failed`.
    """
    from attn_export.reference.reference import read_reference

    run, path = RunOptions.of(run), Path(graph)
    check_installed("torch")
    read = functools.partial(read_reference, reference, ranges or {}, relations or {})
    with _blamed_on_graph(reference), _bundle_folder(output) as (folder, publish):
        compared = read_compared(path, run.limits)
        report, complete, reduce = judge_compared(folder, compared, run, read, names or {}, inputs)
        if output is not None or not (report.passed or report.explanations):
            try:
                right = complete()
            except AttnExportError as error:
                if output is not None:
                    raise
                notes = (*report.notes, f"not explained: {error}")
                report = dataclasses.replace(report, notes=notes)
            else:
                if not report.explanations:
                    report = explain_failures(
                        report, folder, folder / path.name, run=run, reference=right,
                        reproduction=reproduction,
                        seconds=SECONDS if right.cause is None else LONG,
                    )  # fmt: skip
                if output is not None:
                    report = reduce_bundle(folder, report, reduce)
        return dataclasses.replace(report, model=publish(report) or path)


@contextlib.contextmanager
def _blamed_on_graph(reference: Any) -> Iterator[None]:
    """Let what a case cannot show be an error of a graph if the reference is one."""
    try:
        yield
    except ExportError as error:
        if isinstance(reference, str | Path):
            raise GraphError(str(error)) from error
        raise


@contextlib.contextmanager
def _bundle_folder(output: Path | str | None) -> Iterator[tuple[Path, Any]]:
    """Yield the folder to write to, and a function that publishes it and returns its final path.

    Without `output` the folder is temporary, and the function returns None.
    """
    if output is None:
        with scratch() as folder:
            yield folder, lambda _: None
        return
    with staging(Path(output)) as stage:
        yield stage.folder, lambda report: stage.publish(failed=not report.passed)


def judge_compared(
    folder: Path,
    compared: Graph[onnx.ModelProto],
    run: RunOptions,
    read: Callable[[], Reference],
    given: Mapping[str, str],
    inputs: Sequence[Any] = (),
) -> tuple[Report, Callable[[], ValueReference], Callable[[Path], tuple[str, ...]]]:
    """Run all cases, and judge them by the reference, which is read while the runtimes start.

    `given`: The names in the graph by those of the reference, as the user states them.
    `inputs`: The sources of the user's own inputs.

    Returns:
        The report, a function that completes the bundle for `explain`, and one that reduces its
        golden vectors to those that are stored, and returns notes.
    """
    with Pool(run, [compared.file]) as pool:
        run.progress.phase("importing torch")
        reference = read()
        if run.budgets and not reference.is_float_model:
            raise UsageError(
                f"a budget of {run.budgets[0]}, which is for --module or --model; leave it out"
            )
        names = match_names(compared, reference, given)
        pool.add([compared.file])
        from attn_export.graph.requirements import least_eps, precision_notes

        oracle = reference.oracle(least_eps(compared.model))
        judged = judge_graphs(
            folder, compared.path.parent.absolute(), pool, reference, oracle, names=names,
            inputs=inputs,
        )  # fmt: skip
    axes, first = axes_of(reference, names), judged.goldens[0]
    taken, given_back = (
        {name: TensorSignature(array.dtype.name, axes[name]) for name, array in arrays.items()}
        for arrays in (first.case.inputs, first.expected)
    )
    about = *reference.notes, *filter(None, [names.note()]), *precision_notes(compared.model)
    report = Report(
        printable(compared.path.stem), judged.runs, judged.verdicts, environment(),
        (*about, *judged.notes), compared.path, dimensions=dimensions({**taken, **given_back}),
        quality=judged.quality,
    )  # fmt: skip
    layers, wrong = _layers(compared.path, report, judged.goldens, oracle, names)
    report = dataclasses.replace(report, explanations=wrong, layers=layers)
    ends = taken, given_back
    complete = functools.partial(_complete, folder, compared, reference, names, ends, report)
    return report, complete, reference.reduce or oracle.reduce


def _layers(
    path: Path, report: Report, goldens: Sequence[Golden], oracle: BaseOracle, names: TensorNames
) -> tuple[tuple[LayerError, ...], tuple[str, ...]]:
    """Return the error of each layer of a graph, and a sentence if it fails, as far as known."""
    failed = {verdict.case for verdict in report.verdicts if verdict.status == "failed"}
    if not failed and report.quality is not None:
        return (), ()  # layers that lose what a budget allows are not wrong
    cases = [golden.case for golden in goldens if golden.case.name in failed or not failed]
    case = min(cases, key=lambda case: len(case.ignored_rows))
    errors, text = oracle.layers(path, case, names)
    return tuple(errors), (f"{path.name}: {text}",) if text and failed else ()


def _complete(
    folder: Path,
    compared: Graph[onnx.ModelProto],
    reference: Reference,
    names: TensorNames,
    ends: tuple[Signatures, Signatures],
    report: Report,
) -> ValueReference:
    """Complete the bundle, and return the source of correct values for `explain`."""
    from attn_export.explain.eager_values import ValueReference

    graphs = [compared]
    if reference.path is not None and not names.note() and compared.path.name != OTHER:
        # A graph of the same names shows `explain` the first wrong value.
        file = replace(compared.file, name=OTHER)
        graphs = [Graph(load_proto(reference.path), file, reference.path), compared]
    write_bundle(folder, graphs, ends, report, caches_of(reference, names))

    def steps(inputs: Mapping[str, Any]) -> Any:
        # Copies, because torch requires writable arrays.
        named = {name: inputs[other].copy() for name, other in names.inputs.items()}
        return reference.oracle(0.0).steps(named)

    how = reference.cause, reference.is_float_model
    return ValueReference(reference.whose, steps, *how)
