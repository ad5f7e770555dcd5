"""`attn-export compare --model FOLDER --graphs FOLDER`: a whole model and its exported graphs.

`judge` is `compare` of the command, which judges one graph.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_export.bundle.manifest import failed_folder
from attn_export.errors import GraphError, UsageError, counted
from attn_export.parts.whole_models.build.model import (
    built_options,
    built_reference,
    subject_of_model,
)
from attn_export.parts.whole_models.export_layouts import (
    BUILT,
    LAYOUTS,
    Entry,
    ExportedModel,
    read_export,
)
from attn_export.parts.whole_models.integer_checkpoint import integers_of
from attn_export.parts.whole_models.integer_weights import (
    quantised_operators,
    rounded_block,
    rounds_inputs,
    strict_judgement,
)
from attn_export.parts.whole_models.loaded_model import (
    in_dtype,
    left_out_beside,
    left_out_note,
    load_model,
)
from attn_export.parts.whole_models.lora_adapter import merge_adapter
from attn_export.parts.whole_models.model_oracle import ModelOracle
from attn_export.parts.whole_models.model_reference import is_half, reference_of
from attn_export.parts.whole_models.own_inputs import OwnInputs, own_notes, read_own
from attn_export.parts.whole_models.unit_weights import LARGE
from attn_export.parts.whole_models.weight_losses import WeightLosses, products_of
from attn_export.quality import OF_LOGITS, Budget, Quality, is_logits
from attn_export.reference.reference import Reference
from attn_export.reference.stored_evidence import MOST_BYTES, reduce_evidence, reduce_if_large
from attn_export.results import CHANGED, Detail, Report
from attn_export.runtimes.protocol import size_beside
from attn_export.runtimes.run_options import RunOptions
from attn_export.temp_folders import use_disk

Judge = Callable[..., Report]

_NOT_PROMISED = {
    "batch": "batches", "left": "padding on the left", "right": "padding on the right",
    "chunk": "several tokens after a past", "chunks": "several tokens after a past in a batch",
    "ragged": "pasts of unequal length",
}  # fmt: skip
"""Promises in words."""


def compare_models(
    judge: Judge,
    model: Any,
    graphs: Path | str,
    run: RunOptions | None = None,
    *,
    layout: str | None = None,
    names: Mapping[str, str] | None = None,
    inputs: Sequence[Any] = (),
    adapter: Path | str | None = None,
    output: Path | str | None = None,
) -> Report:
    """Judge the graphs of an exported model by the model as transformers runs it.

    `model`: The folder of a checkpoint, or a model of transformers.
    `graphs`: The folder of the graphs, or one graph.
    `layout`: One of `LAYOUTS`; by default as recognised.
    `names`: `{name that a layout has: name in the graphs}` where they differ.
    `inputs`: Files with inputs of the user's own, functions or values, which are cases, too.
    `adapter`: The folder of a LoRA adapter, which is merged into the weights of the checkpoint.

    Returns:
        One report on all graphs. With `output`, each has a bundle in a folder of its name there.
    """
    run = RunOptions.of(run)
    folder = Path(model) if isinstance(model, str | Path) else None
    exported = read_export(Path(graphs), layout, names)
    is_built = exported.layout is LAYOUTS[BUILT]
    if max(size_beside(entry.path) for entry in exported.entries) > 4 * LARGE:
        use_disk()  # before the folders of runs and of the bundle are made
    has_integers = any(quantised_operators(entry.path) for entry in exported.entries)
    read = functools.partial(read_own, inputs, folder=folder)
    of_build: dict[str, Any] = {"text_only": True, "is_captured": False}
    of_build |= built_options(exported.entries[0]) if is_built else {}
    if is_built and not has_integers:
        if run.budgets:
            why = f"a budget of {run.budgets[0]}: {graphs} is not quantised; leave it out"
            raise UsageError(why)
        subject = functools.cache(lambda: subject_of_model(model, **of_build, adapter=adapter))
        return _compare_built(judge, subject, Path(graphs), exported, run, output, read)
    _refuse_unmeasured(exported, run.budgets)
    run.progress.phase("reading the checkpoint")
    own, notes = load_model(model, is_changed=adapter is not None or has_integers)
    if is_built:
        make = functools.partial(_reference_of_built, of_build, read)
    else:
        given = read(exported.entries, own)
        notes = *notes, *own_notes(given)
        make = functools.partial(reference_of, promises=exported.layout.promises, own=given)
    reports, phases = dict[str, Report](), list[str]()
    budgets = {entry.phase: run.budgets or _budgets_of(entry) for entry in exported.entries}
    most_bytes = MOST_BYTES // (len(budgets) + sum(map(bool, budgets.values())))
    reference = functools.partial(
        make, reduce=functools.partial(reduce_evidence, most_bytes=most_bytes)
    )
    types = {entry.phase: _type_of(entry) for entry in exported.entries}
    models = {
        dtype: in_dtype(own, (), dtype, f"judged as {dtype}, the type of the graphs")
        for dtype in dict.fromkeys(types.values())
    }
    if adapter is not None:
        # In the type of the graphs, as who loads the base in it and merges then.
        notes = *notes, merge_adapter(adapter, model, own, *(one for one, _ in models.values()))
    notes = *notes, *dict.fromkeys(note for _, told in models.values() for note in told)
    for entry in exported.entries:
        one = dataclasses.replace(run, budgets=budgets[entry.phase])
        found, told = _judge_entry(
            judge, models[types[entry.phase]][0], own, entry, reference, one, output, most_bytes
        )
        reports |= found
        phases += told
    joined = Report.joined(Path(graphs).absolute().name, reports)
    left_out = left_out_note(left_out_beside(folder, adapter) if folder is not None else {})
    notes = *left_out, *_layout_notes(exported), *phases, *notes, *joined.notes
    name = Path(model).absolute().name if isinstance(model, (str, Path)) else type(model).__name__
    about = {"checkpoint": name, **joined.dimensions}
    return dataclasses.replace(joined, notes=notes, dimensions=about)


def _judge_entry(
    judge: Judge, loaded: Any, own: Any, entry: Entry, reference: Callable[..., Reference],
    run: RunOptions, output: Path | str | None, most_bytes: int,
) -> tuple[dict[str, Report], list[str]]:  # fmt: skip
    """Return the reports on a graph by the names of their bundles, and notes.

    `loaded`: The model `own` in the type of the graph.
    """
    place = Path(output) / entry.phase if output is not None else None
    strict, told, changed = _compare_strictly(
        judge, loaded, entry, reference, run, place, of_integers=integers_of(own) is not None
    )
    reports = {} if strict is None else {entry.phase: strict}
    phases = [*([] if strict is None else [_phase_note(entry, strict)]), *told]
    if run.budgets:
        # Replayed on all rows, where these are few, so that the figures are the same.
        read = functools.cache(functools.partial(
            reference, loaded, entry, of_float=own, budgets=run.budgets,
            reduce=functools.partial(reduce_if_large, most_bytes=most_bytes),
        ))  # fmt: skip
        name = f"{entry.phase}-budget"
        report = _compare(judge, read, entry.path, run, place and place.with_name(name))
        if changed is not None and report.quality is not None:
            losses = _losses(read(), changed, entry)
            report = dataclasses.replace(report, quality=losses.beside(report.quality))
        # Where both are there, they have the same notes.
        notes_on = report.notes if strict is None else ()
        if not report.passed and (text := _where_it_leaves(read(), entry.path)):
            why = f"{entry.path.name}, distance from the float model: {text}"
            report = dataclasses.replace(report, explanations=(*report.explanations, why))
        reports[name] = dataclasses.replace(report, notes=notes_on)
    return reports, phases


def _where_it_leaves(reference: Reference, path: Path) -> str:
    """Return why a graph leaves the float model in the base case, or where; "" if not known."""
    from attn_export.explain.distant_values import where_it_leaves
    from attn_export.explain.integer_faults import integer_fault
    from attn_export.float64.evaluate import Evaluation

    base = reference.plan().cases[0]
    inputs = {name: array.copy() for name, array in base.inputs.items()}
    try:
        graph = Evaluation.load(path)
        values = graph.values(inputs)
    except GraphError:
        return ""
    steps = reference.oracle(0.0).steps(inputs)
    return integer_fault(graph, values, steps) or where_it_leaves(graph, values, steps)


_MEASURED = 2
"""The number of cases in which the losses of weights are measured."""


def _losses(reference: Reference, changed: Any, entry: Entry) -> Quality:
    """Return where the distance of a graph from the float model comes from.

    `reference`: That by which the budget is judged.
    `changed`: The model with the integers of the graph.
    """
    oracle: Any = reference.oracle(0.0)
    block = rounded_block(entry.path)
    products = products_of(oracle.precise.model, changed.double(), block)
    cases = [case.inputs for case in reference.plan().cases[:_MEASURED]]
    losses = WeightLosses(oracle.precise.model, oracle.reference, products, cases)
    return losses.split(Quality((), oracle.budgets), rounds_inputs=block > 0)


_VARIANTS = {
    "fp16": 50, **dict.fromkeys(("int8", "uint8", "q8", "quantized"), 20),
    **dict.fromkeys(("q4", "q4f16", "bnb4"), 6),
}  # fmt: skip
"""The least SQNR in dB of variants of a graph, by the last part of their names."""


def _budgets_of(entry: Entry) -> tuple[Budget, ...]:
    """Return the budget of a variant such as ``model_q4.onnx``; of other graphs, none."""
    _, _, variant = entry.path.stem.rpartition("_")
    return (Budget("sqnr", _VARIANTS[variant]),) if variant in _VARIANTS else ()


def _type_of(entry: Entry) -> str:
    """Return the floating type of a graph's outputs."""
    types = (end.dtype for end in entry.outputs.values())
    return next((dtype for dtype in types if "float" in dtype), "float32")


def _reference_of_built(
    of_build: Mapping[str, Any], read: Callable[..., OwnInputs], model: Any, _: Entry, *,
    reduce: Callable[[Path], tuple[str, ...]], of_float: Any = None,
    budgets: tuple[Budget, ...] = (), is_float_model: bool = False,
) -> Reference:  # fmt: skip
    """Return the reference of a graph of our own with integers, as `reference_of` does of others.

    `of_build`: The options that the graph was built with.
    """
    subject: Any = subject_of_model(model, **of_build)
    reference = built_reference(subject, reduce, read)
    if budgets:
        exact: Any = subject_of_model(of_float, **of_build)
        exact, judged = (each.own_oracle().subject for each in (exact, subject))
        oracle = functools.cache(
            functools.partial(ModelOracle, judged, module=exact.module, budgets=budgets)
        )
        reference = dataclasses.replace(reference, oracle=oracle)
    return dataclasses.replace(reference, is_float_model=is_float_model or bool(budgets))


def _compare_built(
    judge: Judge, subject: Callable[[], Any], folder: Path, exported: ExportedModel,
    run: RunOptions, output: Path | str | None, read: Callable[..., OwnInputs],
) -> Report:  # fmt: skip
    """Judge graphs of our own, which take tokens by the lengths of pasts and have no masks.

    `read`: Reads the user's own inputs of graphs.
    """
    entries = exported.entries
    reduce = functools.partial(reduce_if_large, most_bytes=MOST_BYTES // len(entries))
    reports = {
        entry.phase: _compare(
            judge, lambda: built_reference(subject(), reduce, read), entry.path, run,
            Path(output) / entry.phase if output else None,
        )
        for entry in entries
    }  # fmt: skip
    joined = Report.joined(folder.absolute().name, reports)
    ran = {run.runtime for run in joined.runs if run.outcome == "ran"}
    runs = tuple(  # of dialects of one graph: a runtime must run one of them
        dataclasses.replace(
            x, required=x.required and (x.outcome != "not run" or x.runtime not in ran)
        )
        for x in joined.runs
    )
    return dataclasses.replace(joined, runs=runs, notes=(*_layout_notes(exported), *joined.notes))


def _refuse_unmeasured(exported: ExportedModel, budgets: Sequence[Budget]) -> None:
    names = [name for entry in exported.entries for name in entry.outputs]
    for budget in budgets:
        if budget.measure in OF_LOGITS and not any(map(is_logits, names)):
            raise UsageError(
                f"a budget of {budget}, and nothing to measure it on: no output is called logits; "
                "leave it out"
            )


def _compare(
    judge: Judge,
    read: Callable[[], Reference],
    graph: Path,
    run: RunOptions,
    output: Path | None,
) -> Report:
    report = judge(read, graph, run, output=output)
    if output and report.passed:
        # `verify` would replay that of an earlier export, too.
        shutil.rmtree(failed_folder(output), ignore_errors=True)
    return report


def _compare_strictly(
    judge: Judge, model: Any, entry: Entry, reference: Callable[..., Reference], run: RunOptions,
    output: Path | None, *, of_integers: bool,
) -> tuple[Report | None, Sequence[str], Any]:  # fmt: skip
    """Judge a graph by the usual rule; one that is quantised by the model of its own integers.

    `of_integers`: Whether the model has the integers of its checkpoint, which graphs must have too.

    Returns:
        The report; None if a budget must do, as notes say. The model with the graph's integers, if
        they are other weights than the model has.
    """
    operators = quantised_operators(entry.path)
    if run.budgets and not operators and _type_of(entry) == "float32" and is_half(entry.path):
        told = [f"{entry.phase}: computes in float16, so judged by the budget alone"]
        return None, told, None
    plain = dataclasses.replace(run, budgets=())
    if not operators or (of_integers and not rounds_inputs(entry.path)):
        read = functools.partial(reference, model, entry)
        return _compare(judge, read, entry.path, plain, output), (), None
    # How kernels round in a graph of ours, `verify` of its bundle judges.
    if not run.budgets and not (of_integers and entry.producer == BUILT):
        read = functools.partial(reference, model, entry, is_float_model=True)
        report = _compare(judge, read, entry.path, plain, output)
        advice = (
            "its kernels may round inputs of products (accuracy_level 4), as the model does not; "
            "--budget sqnr>=20 judges that, and the rest in a copy of the graph with level 1"
            if of_integers
            else f"the graph is quantised ({', '.join(operators)}), which the float model is not; "
            "--budget sqnr>=20 judges its distance, and the rest by the graph's own integers"
        )
        why = () if report.passed else (advice,)
        return dataclasses.replace(report, explanations=why), (), None
    run.progress.phase("reading the integers of the graph")
    with strict_judgement(model, entry.path, of_integers=of_integers) as (changed, path, note):
        told = [f"{entry.phase}: {note}"]
        if changed is None:
            return None, told, None
        read = functools.partial(reference, changed, entry)
        report = _compare(judge, read, path, plain, output)
        report = dataclasses.replace(report, model=entry.path)
        return report, told, None if of_integers else changed


def _layout_notes(exported: ExportedModel) -> tuple[str, ...]:
    """Return notes on the layout, and on what it does not promise."""
    layers = {end.layer for entry in exported.entries for end in entry.having("present")}
    files = ", ".join(entry.path.name for entry in exported.entries)
    of = f"; {counted(len(layers), 'layer')}" if layers else ""
    # In graphs of ours, lengths of pasts take the place of masks.
    promised = _NOT_PROMISED if exported.layout is LAYOUTS[BUILT] else exported.layout.promises
    missing = [text for name, text in _NOT_PROMISED.items() if name not in promised]
    notes: list[str] = [Detail(f"layout: {exported.layout.title} ({files}){of}")]
    if missing:
        notes.append(f"not supported by this layout, so not judged: {', '.join(missing)}")
    return tuple(notes)


def _phase_note(entry: Entry, report: Report) -> str:
    """Return how many cases of a graph passed, and the kinds of cases that did not."""
    failed = {v.case for v in report.failures}
    cases = {v.case for v in report.verdicts}
    worst = max((v.worst for v in report.verdicts if v.worst is not None), default=0.0)
    kinds = dict.fromkeys(
        re.sub(rf"^{CHANGED}.*", "changed inputs", re.sub(r"_[0-9].*", "", case))
        for case in sorted(failed)
    )
    text = f"{entry.phase}: {len(cases) - len(failed)} of {counted(len(cases), 'case')} passed, "
    wrong = f"; wrong in {', '.join(kinds)}" if kinds else ""
    return Detail(f"{text}worst {worst:.2g} of the tolerance{wrong}")
