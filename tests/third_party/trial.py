"""One module of others, built, compared once more, and given to the bare exporter."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

import onnx
import torch
from agreement import disagreement

from attn_export import Subject, build
from attn_export.errors import AttnExportError
from attn_export.export.export import of_tensors
from attn_export.temp_folders import scratch


@dataclasses.dataclass(frozen=True)
class Tried:
    """Outcome of one module.

    Attributes:
        outcome: "passed", "refused", "failed", "wrong" or "crashed".
        said: The reason, on one line.
        softmax: Whether its graph holds attention or a softmax; None where there is no graph.
        ort: Whether there is a graph in the ort dialect.
        exporter: Whether the bare exporter's graph agrees; None if it was not run.
        seconds: The time of the build.
    """

    outcome: str
    said: str
    softmax: bool | None
    ort: bool
    exporter: bool | None
    seconds: float


def tried(subject: Subject, *, exporter: bool, bundle: Path | None = None) -> Tried:
    """Build a subject in all dialects and compare its graph once more; a bundle that passes stays.

    `bundle`: Where; nowhere by default.
    """
    start, outcome, said, softmax, form = time.monotonic(), "passed", "", None, False
    bare = with_exporter(subject) if exporter else None
    start = time.monotonic()
    with scratch() as folder:
        built = bundle or folder / "b"
        try:
            with quiet():
                report = build(subject, built, runtimes=["ort-cpu"])
        except AttnExportError as error:
            return Tried("refused", str(error), None, False, bare, time.monotonic() - start)
        except Exception as error:
            said = f"{type(error).__name__}: {error} {traceback.format_exc()[-300:]!r}"
            return Tried("crashed", said, None, False, bare, time.monotonic() - start)
        bundle = built if report.passed else built.with_name(f"{built.name}.failed")
        graphs = json.loads((bundle / "manifest.json").read_text())["graphs"]
        form = "model.ort.onnx" in graphs
        softmax = holds_softmax(bundle / "model.onnx")
        if not report.passed:
            bad = [v for v in report.verdicts if v.status != "passed"]
            refusals = [run.reason for run in report.runs if run.outcome != "ran"]
            outcome = "failed"
            said = f"{bad[0].graph} {bad[0].case}: {bad[0].message}" if bad else str(refusals[:1])
        else:
            said = disagreement(subject, bundle / "model.onnx")
            outcome = "wrong" if said else "passed"
            if softmax and not form:
                said = next((note for note in report.notes if "ort dialect" in note), said)
    return Tried(outcome, said, softmax, form, bare, time.monotonic() - start)


def holds_softmax(path: Path) -> bool:
    nodes = onnx.load(path, load_external_data=False).graph.node
    return any(node.op_type in ("Softmax", "Attention") for node in nodes)


def with_exporter(subject: Subject) -> bool:
    """Return whether the bare exporter's graph agrees with the module."""
    with scratch() as folder:
        try:
            # The exporter, too, is given `forward` with named tensors: ours takes **inputs.
            with quiet(), of_tensors(subject) as (arguments, shapes):
                torch.onnx.export(
                    subject.module, (), folder / "model.onnx",
                    kwargs=arguments, dynamo=True, verbose=False,
                    input_names=list(subject.inputs), output_names=list(subject.outputs),
                    dynamic_shapes=shapes,
                )  # fmt: skip
            return not disagreement(subject, folder / "model.onnx")
        except Exception:
            return False


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what libraries print."""
    logging.disable(logging.WARNING)
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)
