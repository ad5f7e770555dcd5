"""`attn-export compare --model FOLDER --graphs FOLDER`: a whole model and its exported graphs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from attn_export.bundle.manifest import failed_folder
from attn_export.commands.compare import compare
from attn_export.errors import UsageError, counted
from attn_export.parts.whole_models.export_layouts import Entry, ExportedModel, read_export
from attn_export.parts.whole_models.model_checkpoint import read_checkpoint
from attn_export.parts.whole_models.model_reference import reference_of
from attn_export.parts.whole_models.stored_evidence import MOST_BYTES, reduce_evidence
from attn_export.results import CHANGED, Report
from attn_export.runtimes.run_options import RunOptions

_NOT_PROMISED = {
    "batch": "batches", "left": "padding on the left", "right": "padding on the right",
    "chunk": "several tokens after a past", "chunks": "several tokens after a past in a batch",
    "ragged": "pasts of unequal length",
}  # fmt: skip
"""Promises in words."""


def compare_models(
    model: Any,
    graphs: Path | str,
    run: RunOptions | None = None,
    *,
    layout: str | None = None,
    names: Mapping[str, str] | None = None,
    output: Path | str | None = None,
) -> Report:
    """Judge the graphs of an exported model by the model as transformers runs it.

    `model`: The folder of a checkpoint, or a model of transformers.
    `graphs`: The folder of the graphs, or one graph.
    `layout`: One of `LAYOUTS`; by default as recognised.
    `names`: `{name that a layout has: name in the graphs}` where they differ.

    Returns:
        One report on all graphs. With `output`, each has a bundle in a folder of its name there.
    """
    run = RunOptions.of(run)
    exported = read_export(Path(graphs), layout, names)
    run.progress.phase("reading the checkpoint")
    loaded, notes = _load(model)
    loaded, notes = _in_type_of(exported, loaded, notes)
    reports = {}
    reduce = functools.partial(reduce_evidence, most_bytes=MOST_BYTES // len(exported.entries))
    for entry in exported.entries:
        read = functools.partial(
            reference_of, loaded, entry, exported.layout.promises, reduce=reduce
        )
        place = Path(output) / entry.phase if output is not None else None
        report = reports[entry.phase] = compare(read, entry.path, run, output=place)
        if place and report.passed:
            # `verify` would replay that of an earlier export, too.
            shutil.rmtree(failed_folder(place), ignore_errors=True)
    joined = Report.joined(Path(graphs).absolute().name, reports)
    phases = map(_phase_note, exported.entries, reports.values())
    return dataclasses.replace(
        joined, notes=(*_layout_notes(exported), *phases, *notes, *joined.notes)
    )


def _load(model: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the model of a checkpoint or of the user, and notes on it."""
    from transformers import PreTrainedModel

    if isinstance(model, str | Path):
        checkpoint = read_checkpoint(Path(model))
        return checkpoint.load(), checkpoint.notes
    model = getattr(model, "module", model)  # of a Subject
    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"graphs of a whole model are compared with a model of transformers; got "
            f"{type(model).__name__}"
        )
    model.set_experts_implementation("eager")  # the others have no float64
    model.train(mode=False)
    return model, ()


def _in_type_of(
    exported: ExportedModel, model: Any, notes: tuple[str, ...]
) -> tuple[Any, tuple[str, ...]]:
    """Return the model in the floating type of the graphs, and notes."""
    ends = (end for entry in exported.entries for end in entry.outputs.values())
    dtype = next((end.dtype for end in ends if "float" in end.dtype), "float32")
    own = str(model.dtype).removeprefix("torch.")
    if dtype == own:
        return model, notes
    changed = copy.deepcopy(model)  # the user's model must stay as it is
    # Not buffers: transformers keeps the frequencies of rotary angles in float32.
    for parameter in changed.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    return changed, (*notes, f"the model is {own}, and judged as {dtype}, the type of the graphs")


def _layout_notes(exported: ExportedModel) -> tuple[str, ...]:
    """Return notes on the layout, and on what it does not promise."""
    layers = {end.layer for entry in exported.entries for end in entry.having("present")}
    files = ", ".join(entry.path.name for entry in exported.entries)
    of = f"; {counted(len(layers), 'layer')}" if layers else ""
    missing = [text for name, text in _NOT_PROMISED.items() if name not in exported.layout.promises]
    notes = [f"layout: {exported.layout.title} ({files}){of}"]
    if missing:
        notes.append(f"not supported by this layout, so not judged: {', '.join(missing)}")
    return tuple(notes)


def _phase_note(entry: Entry, report: Report) -> str:
    """Return how many cases of a graph passed, and the kinds of cases that did not."""
    failed = {v.case for v in report.verdicts if v.status != "passed"}
    cases = {v.case for v in report.verdicts}
    worst = max((v.worst for v in report.verdicts if v.worst is not None), default=0.0)
    kinds = dict.fromkeys(
        re.sub(rf"^{CHANGED}.*", "changed inputs", re.sub(r"_[0-9].*", "", case))
        for case in sorted(failed)
    )
    text = f"{entry.phase}: {len(cases) - len(failed)} of {counted(len(cases), 'case')} passed, "
    return f"{text}worst {worst:.2g} of the error allowed" + (
        f"; wrong in {', '.join(kinds)}" if kinds else ""
    )
