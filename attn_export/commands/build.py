"""`attn-export build`: export a subject, check the graphs, run them, and write the bundle."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from attn_export.bundle.manifest import GOLDEN, SPEC, bundles_in, dimensions, failed_folder, staging
from attn_export.commands import bundle_graphs
from attn_export.commands.build_input import EXAMPLES, GROUPS, SHORT, Buildable, input_options
from attn_export.commands.bundle_graphs import ALL
from attn_export.commands.judge_graphs import judge_graphs
from attn_export.commands.options import (
    BUDGET,
    option,
    removed_option,
    run_options,
    with_help,
    with_options,
)
from attn_export.commands.output import Output, output_options
from attn_export.dialect_names import MODEL, STANDARD, WEIGHTS, check_dialects
from attn_export.errors import UsageError, printable
from attn_export.quality import Budget
from attn_export.report.html import write_report
from attn_export.report.progress import options_of_call
from attn_export.results import CHANGED, Report
from attn_export.runtimes.pool import Pool
from attn_export.runtimes.run_options import Gate, RunKeywords, RunOptions
from attn_export.schema import GraphFile
from attn_export.spec import AttentionSpec
from attn_export.system_info import check_installed, environment
from attn_export.temp_folders import scratch

if TYPE_CHECKING:
    import click

    from attn_export.export.subject import Subject

WIDE = "in float32"
"""The name in the report of the graph of a float16 or bfloat16 subject in float32."""


def _refuse_moved(_: object, moved: click.Parameter, value: bool | None) -> None:
    """Refuse an option whose name is that of a command on a bundle."""
    if value is not None:
        flag, command = (moved.opts if value else moved.secondary_opts)[0], moved.opts[0][2:]
        raise UsageError(f"leave out {flag}; after the build, run attn-export {command} BUNDLE")


_MOVED = [
    option(
        "--dry-run/--no-dry-run", default=None, hidden=True, expose_value=False,
        callback=_refuse_moved,
    ),
    removed_option("--evidence", "report.json has what it stated", is_flag=True),
    removed_option("--tune", "build --dialect ort writes the kernels", is_flag=True),
]  # fmt: skip


@with_help("Build and ship", *EXAMPLES, groups=GROUPS, short=SHORT)
@input_options
@option(
    "--dialect", "dialects", multiple=True, metavar="NAME",
    help="standard, portable, ort or cuda; all: each that can express the layer.  [default: all]",
)  # fmt: skip
@run_options(BUDGET)
@option("-o", "--output", type=Path, help="The bundle's folder.  [default: models/<name>]")
@with_options(*_MOVED)
@output_options
def build_command(
    output: Path | None,
    destinations: Output,
    name: str,
    subject: Buildable,
    run: RunOptions,
    dialects: tuple[str, ...],
    seed: int,
) -> int:
    """Build a bundle: export, check, run everywhere, judge.

    The layer comes from SPEC.toml, a config.json, --variant or dimensions alone, or from your file
    (--module), or is a whole model (--model). Options change fields of the spec.
    """
    name = printable(output.absolute().name) if output else name
    output = output or Path("models") / name
    with destinations.job(name, run) as run:
        report = build(subject, output, run, name=name, dialects=dialects or (ALL,), seed=seed)
        bundle = output if report.passed else failed_folder(output)
        if not report.passed and not bundles_in(bundle):
            from attn_export.commands.explain_failures import explain_failures

            report = explain_failures(report, bundle, run=run)
    return destinations.render(report, bundle)


def build(
    subject: Buildable,
    output: Path | str | None = None,
    run: RunOptions | None = None,
    *,
    name: str = "attention",
    dialects: Sequence[str] = (ALL,),
    seed: int = 0,
    **keywords: Unpack[RunKeywords],
) -> Report:
    """Export a subject, check and run its graphs, judge the outputs, and write the bundle.

    Args:
        subject: A subject, a function that returns it, or a spec, whose module gets seeded weights.
        output: The bundle's folder. Default: `models/NAME`.
        run: The keywords as one value.
        name: The name of the bundle in the report.
        dialects: The dialects of the graphs, or ``"all"`` for those that fit.
        seed: The seed for the weights of a spec's module.
        **keywords: How graphs are run and judged, as in `RunKeywords`.

    Returns:
        The report. The bundle is in `output` if the report passed, else in `OUTPUT.failed`.

    Raises:
        UsageError: If a name or budget is unknown, torch is missing or `output` cannot be written.
        ExportError: If the module cannot be exported as it is.
        GraphError: If a check refuses a graph.
    """
    if name != printable(name):
        raise UsageError(
            f"the name {printable(name, 80)} must be one printable line; choose another"
        )
    dialects, place = check_dialects(dialects, ALL), Path(output or Path("models") / name)
    check_installed("torch")
    with options_of_call(run, keywords) as run, staging(place) as stage:
        report = _build_in(stage.folder, subject, name, dialects, seed, run)
        folder = stage.publish(failed=not report.passed)
    last = [*bundles_in(folder).values(), folder][0]  # the decoder, if there are two
    return dataclasses.replace(report, model=last / MODEL)


def _build_in(
    folder: Path, source: Buildable, name: str, dialects: Sequence[str], seed: int, run: RunOptions
) -> Report:
    """Write the bundle to a folder, and return the report."""
    # The runtimes' processes import their SDKs while this one imports torch.
    with Pool(run, bundle_graphs.first_graphs(dialects)) as pool:
        run.progress.phase("importing torch")
        from attn_export.export.subject import Subject

        subject: Subject
        if isinstance(source, AttentionSpec):
            subject = Subject.from_spec(source, seed=seed)
        else:
            subject = source() if callable(source) else source
        if subject.encoder is None:
            return _build_subject(folder, subject, name, dialects, pool)
    reports = dict[str, Report]()
    for part, each in (("encoder", subject.encoder), ("decoder", subject)):
        (folder / part).mkdir()
        with Pool(run, bundle_graphs.first_graphs(dialects)) as pool:
            reports[part] = _build_subject(folder / part, each, f"{name} {part}", dialects, pool)
    return Report.joined(name, reports)


def _build_subject(
    folder: Path, subject: Subject, name: str, dialects: Sequence[str], pool: Pool
) -> Report:
    """Write the bundle of one subject to a folder, and return the report."""
    from attn_export.commands.golden_vectors import budgets_of

    budgets = budgets_of(subject, pool.run.budgets)
    if subject.fit is not None:
        subject = subject.fit(budgets, pool.run.progress)
    wide = _judge_in_float32(subject, pool.run)
    report, content = _judge(folder, subject, name, dialects, budgets, pool)
    report = dataclasses.replace(
        report, runs=(*(wide.runs if wide else ()), *report.runs),
        verdicts=(*(wide.verdicts if wide else ()), *report.verdicts),
    )  # fmt: skip
    _write(folder, subject, report, content)
    return report


def _judge_in_float32(subject: Subject, run: RunOptions) -> Report | None:
    """Judge a subject of narrower types in float32 too: rounding could hide a wrong scale."""
    if not subject.narrow_dtypes():
        return None
    from attn_export.export.export import in_float32

    run = dataclasses.replace(run, gate=Gate())
    with scratch() as folder, Pool(run, [GraphFile(MODEL)]) as pool:
        report, *_ = _judge(folder, in_float32(subject), WIDE, (STANDARD,), (), pool)
    return dataclasses.replace(
        report,
        runs=tuple(
            dataclasses.replace(ran, graph=WIDE) for ran in report.runs if ran.outcome != "not run"
        ),
        verdicts=tuple(dataclasses.replace(v, graph=WIDE) for v in report.verdicts),
    )


def _judge(
    folder: Path, subject: Subject, name: str, dialects: Sequence[str],
    budgets: Sequence[Budget], pool: Pool,
) -> tuple[Report, dict[str, Any]]:  # fmt: skip
    """Export and check the graphs of a subject, run all cases, and judge the outputs.

    Returns:
        The report, and the content of the manifest.
    """
    pool.run.progress.phase("exporting")
    from attn_export.commands.golden_vectors import overflow_notes
    from attn_export.export.export import export
    from attn_export.reference.reference import of_subject

    exported = export(subject)
    of_graph = *subject.notes, *exported.notes

    pool.run.progress.phase("checking the graphs")
    graphs, left_out = bundle_graphs.lower_all(
        exported, dialects, rounds_inputs=subject.rounds_inputs
    )
    bundle_graphs.save_checked(graphs, subject.expected(), folder)
    if subject.maps_weights:
        from attn_export.export.mapped_weights import map_weights

        map_weights(subject.module, [graph.model for graph in graphs], folder / WEIGHTS)
        del exported
        gc.collect()
    pool.add(graph.file for graph in graphs)
    reference = of_subject(subject)
    oracle = reference.oracle(0.0)
    judged = judge_graphs(folder, folder, pool, reference, oracle, budgets=budgets)
    goldens, runs, verdicts = judged.goldens, judged.runs, judged.verdicts
    notes = *of_graph, *judged.notes, *left_out
    refuted = bundle_graphs.remove_refuted(folder, graphs, verdicts, dialects)
    if refuted:
        notes = *notes, *refuted.values()
        graphs = [graph for graph in graphs if graph.file.name not in refuted]
        runs = tuple(ran for ran in runs if ran.graph not in refuted)
        verdicts = tuple(verdict for verdict in verdicts if verdict.graph not in refuted)
    narrow = subject.narrow_dtypes().values()
    if "float16" in narrow:
        notes = *notes, *overflow_notes(folder / MODEL, judged.planned, notes)
    if "bfloat16" in narrow:
        notes = *notes, *bundle_graphs.bfloat16_notes(graphs)
    dtypes = {name: array.dtype.name for name, array in goldens[0].expected.items()}
    content = bundle_graphs.manifest_of(name, subject, graphs, dtypes)
    changed = {golden.case.name.removeprefix(CHANGED) for golden in goldens}
    unchanged = [name for name in content["inputs"] if name not in changed]
    content |= {"unchanged": unchanged} if unchanged else {}
    spec = subject.files.get(SPEC, b"").decode()
    sizes = dimensions({**content["inputs"], **content["outputs"]}, spec)
    report = Report(
        name, runs, verdicts, environment(), notes, dimensions=sizes, quality=judged.quality
    )
    if report.passed:
        report = dataclasses.replace(report, notes=(*notes, *oracle.reduce(folder / GOLDEN)))
    return report, content


def _write(folder: Path, subject: Subject, report: Report, content: dict[str, Any]) -> None:
    """Write the files of the bundle other than the graphs and the golden vectors."""
    for name, data in subject.files.items():
        (folder / name).write_bytes(data)
    write_report(folder, report, content)
