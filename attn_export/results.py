"""Data classes of cases, graphs, verdicts and reports, which all parts of the package share."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from attn_export.error_maps import ErrorMap
from attn_export.errors import AttnExportError, ParityError, RuntimeFailure, counted, printable
from attn_export.quality import Budget, Quality
from attn_export.schema import GraphFile, Text, Tolerance

if TYPE_CHECKING:
    import numpy as np


@dataclasses.dataclass(frozen=True)
class Signature:
    """The digital signature of a bundle.

    Attributes:
        state: ``"not checked"`` if every file is signed, but the user requires no signer.
        signer: A key or an identity, which is only a claim unless the state is ``"verified"``.
    """

    state: Literal["unsigned", "not checked", "verified"]
    signer: str = ""

    def __str__(self) -> str:
        """Return the state and the signer on one line."""
        if self.state == "not checked":
            return f"signature not checked ({self.signer}); --trust checks it"
        return self.state if self.state == "unsigned" else f"signed by {self.signer}"

    @classmethod
    def joined(cls, signatures: Sequence[Signature | None]) -> Signature | None:
        """Return what holds for all bundles: one without a signature makes the whole unsigned."""
        known = [each for each in signatures if each is not None and each.state != "unsigned"]
        if len(known) < len(signatures):
            return cls("unsigned") if any(signatures) else None
        state = min((each.state for each in known), key=("not checked", "verified").index)
        return cls(state, ", ".join(dict.fromkeys(each.signer for each in known)))


BundleCheck = Callable[[], Signature | None]
"""A function that returns the signature of a bundle."""

Arrays = Mapping[str, "np.ndarray"]

Status = Literal["passed", "failed", "unusable", "error", "not run"]
"""The status of a verdict. ``unusable``: not compared, because the tolerance exceeds its
limit, ties decide the output, or eager is not finite. ``error``: there is no output."""

WHOLE_DECODE, BASE, CHANGED = "decode", "base", "changed_"
"""The kind of whole decodes; the name of the base case; and the prefix of the names of cases that
change one input of the base case."""

Outcome = Literal["ran", "refused", "crashed", "hung", "out of memory", "not run"]
"""The outcome of a graph in a runtime. ``refused``: the runtime reported that it cannot run it."""

MOST_LINES = 20
"""The largest number of lines of a report as text."""


@dataclasses.dataclass(frozen=True)
class LayerError:
    """The error of one layer of a graph, in float64, on the input that it has in the reference.

    Attributes:
        graph: The name of the graph.
        name: ``"layer 3"``, ``"the embeddings"`` or ``"what follows the layers"``.
        value: The value of the graph that the layer gives.
        error: The relative L2 error of it; NaN counts as infinite.
        right: The largest error of a layer that is right: weights in float32 may be sums of others,
            as of a norm's weight and 1, and tables of a float16 graph are rounded.
    """

    graph: str
    name: str
    value: str
    error: float
    right: float = 1e-6

    @property
    def is_wrong(self) -> bool:
        """Whether it is more than rounding of weights."""
        return not self.error <= self.right


@dataclasses.dataclass(frozen=True)
class Case:
    """One named set of inputs.

    Attributes:
        name: The name, unique within a bundle.
        kind: ``"shape"`` (random inputs), ``"probe"`` (made to show a fault) or `WHOLE_DECODE`.
        sizes: The size of every dynamic axis.
        inputs: The inputs by name, in the order of the graph's inputs.
        about: The purpose of the case, in a few words.
        may_overflow: Whether inputs may have to be scaled down because the module overflows.
        contents: The names of the changes of random inputs.
        ignored_rows: Indices of batch elements with NaN or Inf, or with padding. They are not
            compared, except in rows that `Golden.determined` names.
        judged_rows: Those rows, by output, if they are known before the reference is.
    """

    name: str
    kind: str
    sizes: Mapping[str, int]
    inputs: Arrays
    about: str
    may_overflow: bool = False
    contents: tuple[str, ...] = ()
    ignored_rows: tuple[int, ...] = ()
    judged_rows: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StoredCase:
    """A case whose inputs are stored in a folder; see `Case`."""

    name: str
    folder: Path
    sizes: Mapping[str, int]
    kind: str


@dataclasses.dataclass(frozen=True)
class Golden:
    """A case with its reference outputs.

    Attributes:
        case: The case.
        expected: The float64 reference, rounded to the outputs' dtypes.
        eager: The outputs of the module itself.
        tolerance: The tolerance by output; None for integers and bools, which must be equal.
        uncompared: The reasons that outputs are not compared, such as infinities or ties.
        tied: For outputs with ties, a boolean mask of the elements that ties decide. Not stored.
        determined: The rows of `ignored_rows` that are compared nonetheless, by output: their
            numbers, counted through all axes but the last.
        budgets: The limits that alone judge the sizes of errors, over all cases; () for the rule.
        rounded: The tolerance of graphs that round inputs of products to 8 bits, by output.
        floats: The outputs of the model before its weights were rounded, if it is measured here.
        rounds_inputs: Whether `tolerance` is `rounded`, which has no limit.
    """

    case: Case
    expected: Arrays
    eager: Arrays
    tolerance: Mapping[str, Tolerance | None]
    uncompared: Mapping[str, str]
    tied: Arrays = dataclasses.field(default_factory=dict)
    determined: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    budgets: tuple[Budget, ...] = ()
    rounded: Mapping[str, Tolerance | None] = dataclasses.field(default_factory=dict)
    floats: Arrays = dataclasses.field(default_factory=dict)
    rounds_inputs: bool = False

    def of_graph(self, file: GraphFile) -> Golden:
        """Return the case as it judges a graph."""
        if not file.exact or self.rounds_inputs:
            return self
        tolerance = self.rounded or dict.fromkeys(self.tolerance)
        return dataclasses.replace(self, tolerance=tolerance, rounds_inputs=True)


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """Names in a graph by the names in a reference: a module or another graph.

    Attributes:
        inputs: The names of all inputs, in the order of the reference.
        outputs: The names of all outputs, in the order of the reference.
    """

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]

    @staticmethod
    def same(inputs: Iterable[str], outputs: Iterable[str]) -> TensorNames:
        """Return the names of a graph that has those of the reference."""
        return TensorNames({name: name for name in inputs}, {name: name for name in outputs})

    def case(self, case: Case) -> Case:
        """Rename the inputs of a case to the graph's names."""
        changed = case.name.removeprefix(CHANGED)
        is_change = case.name.startswith(CHANGED) and changed in self.inputs
        return dataclasses.replace(
            case,
            name=f"{CHANGED}{self.inputs[changed]}" if is_change else case.name,
            inputs={self.inputs[name]: array for name, array in case.inputs.items()},
        )

    def golden(self, golden: Golden) -> Golden:
        """Rename the inputs and outputs of a golden vector to the graph's names."""
        renamed: dict[str, Any] = {
            field: {self.outputs[name]: of for name, of in getattr(golden, field).items()}
            for field in (
                "expected",
                "eager",
                "tolerance",
                "uncompared",
                "tied",
                "determined",
                "rounded",
            )
        }
        return dataclasses.replace(golden, case=self.case(golden.case), **renamed)

    def note(self) -> str:
        """Return a note on the names that differ; "" if none does."""
        pairs = (*self.inputs.items(), *self.outputs.items())
        other = [f"{name} is {theirs}" for name, theirs in pairs if name != theirs]
        return f"in the graph, {', '.join(other)}" if other else ""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The judgement of one output of one case, from one graph in one runtime.

    Attributes:
        message: The reason that the output did not pass; else empty.
        whole: The relative L2 error against the reference; None if it was not measured.
        row: The largest relative L2 error of a slice along the last axis.
        worst: The larger of both, each divided by the tolerance. NaN for a wrong NaN, and
            infinite for a wrong infinity, or if a value that must be 0 is not.
        max_abs: The largest absolute difference from eager, over finite elements.
        max_rel: The largest difference from eager relative to eager, over elements that are not 0.
    """

    runtime: Text
    graph: Text
    case: Text
    output: Text
    status: Status
    message: str = ""
    whole: float | None = None
    row: float | None = None
    worst: float | None = None
    max_abs: float | None = None
    max_rel: float | None = None


@dataclasses.dataclass(frozen=True)
class RuntimeRun:
    """The result of one graph in one runtime.

    Attributes:
        reason: The reason that the outcome is not ``"ran"``; else empty.
        required: Whether the report fails unless the outcome is ``"ran"``.
        facts: Facts that the runtime reported: version, device, threads, limits.
        maps: The locations of the errors of the worst verdict, and those in the attention weights
            of its case, if another output has them; empty if nothing was measured.
        seconds: The time of each case that ran, including reading inputs and writing outputs.
    """

    runtime: str
    graph: str
    outcome: Outcome
    reason: str
    required: bool
    facts: Mapping[str, object]
    maps: tuple[ErrorMap, ...] = ()
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Detail(str):
    """A note that the terminal shows with ``--verbose`` alone."""

    __slots__ = ()


def _writer(module: str, function: str) -> Callable[[Report], str]:
    """Return a function that writes reports. It belongs to a later stage, and is imported late."""
    found: Callable[[Report], str] = getattr(
        import_module(f"attn_export.report.{module}"), function
    )
    return found


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """The result of a job: all verdicts, the environment, and an exit code.

    ``print(report)`` shows a line for each run; a notebook shows the page of `to_html`.

    Attributes:
        notes: Notes for the reader, the most important half-sentence of each first.
        model: The path of the graph, for links.
        explanations: The causes of failures, with a sentence for each explained runtime.
        dimensions: The dtype and shape of each input and output, and the spec or the checkpoint.
        error: The error that ended the job before there were verdicts, or because of which they do
            not count.
        quality: The distance of a quantised model from the float model.
        signature: The digital signature of a verified bundle.
        reproduction: The folder whose `reproduce.py` repeats a failure, if one was written.
        layers: The error of each layer of graphs of whole models.
    """

    name: str
    runs: tuple[RuntimeRun, ...]
    verdicts: tuple[Verdict, ...]
    environment: Mapping[str, object]
    notes: tuple[str, ...]
    model: Path | None = None
    explanations: tuple[str, ...] = ()
    dimensions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    error: AttnExportError | None = None
    quality: Quality | None = None
    signature: Signature | None = None
    reproduction: Path | None = None
    layers: tuple[LayerError, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 passed, 5 a required runtime did not run to its end, 6 wrong outputs; or `error`'s."""
        if self.error is not None:
            return self.error.exit_code
        statuses = {verdict.status for verdict in self.verdicts}
        if (self.quality and self.quality.missed) or statuses & {"failed", "unusable"}:
            return ParityError.exit_code
        missing = any(run.required and run.outcome != "ran" for run in self.runs)
        missing |= "error" in statuses or "passed" not in statuses
        return RuntimeFailure.exit_code if missing else 0

    @property
    def passed(self) -> bool:
        """True if the exit code is 0."""
        return self.exit_code == 0

    @property
    def failures(self) -> tuple[Verdict, ...]:
        """The verdicts that did not pass."""
        return tuple(verdict for verdict in self.verdicts if verdict.status != "passed")

    @classmethod
    def joined(cls, name: str, reports: Mapping[str, Self]) -> Self:
        """Return one report of several, whose names stand before their graphs and sentences."""
        of_all, replace = [(f"{part}/", r) for part, r in reports.items()], dataclasses.replace
        return replace(
            of_all[0][1], name=name,
            runs=tuple(replace(x, graph=part + x.graph) for part, r in of_all for x in r.runs),
            verdicts=tuple(replace(x, graph=at + x.graph) for at, r in of_all for x in r.verdicts),
            notes=tuple(dict.fromkeys(
                type(note)(f"{part}: {note}") for part, r in reports.items() for note in r.notes
            )),
            explanations=tuple(part + cause for part, r in of_all for cause in r.explanations),
            dimensions={part + end: of for part, r in of_all for end, of in r.dimensions.items()},
            error=next((r.error for _, r in of_all if r.error is not None), None),
            quality=Quality.joined({part: r.quality for part, r in of_all if r.quality}),
            signature=Signature.joined([r.signature for _, r in of_all]),
            reproduction=next((r.reproduction for _, r in of_all if r.reproduction), None),
            layers=tuple(replace(x, graph=part + x.graph) for part, r in of_all for x in r.layers),
        )  # fmt: skip

    def raise_if_failed(self) -> None:
        """Raise the error of the exit code unless the report has passed.

        Raises:
            AttnExportError: `error` if there is one, a `ParityError`, or a `RuntimeFailure`.
        """
        if not self.passed:
            error = ParityError if self.exit_code == ParityError.exit_code else RuntimeFailure
            raise self.error or error("; ".join(str(self).splitlines()))

    def to_html(self) -> str:
        """Return the report as a page of HTML that needs no other file."""
        return _writer("html", "to_html")(self)

    def to_json(self) -> str:
        """Return the report as JSON, in the form of `report.json`."""
        return _writer("data", "to_json")(self)

    def to_markdown(self) -> str:
        """Return the verdict, the table of runs, and failures, as markdown."""
        return _writer("ci", "to_markdown")(self)

    def _repr_html_(self) -> str:
        """Return the page in a frame, for notebooks."""
        # Its styles stay its own, and it can run nothing in the notebook.
        page = html.escape(self.to_html())
        style = "width: 100%; height: 40rem; border: 0"
        return f'<iframe sandbox="allow-scripts" srcdoc="{page}" style="{style}"></iframe>'

    def __repr__(self) -> str:
        """Return the name, the state, and the numbers of verdicts and failures, on one line."""
        counts = f"{counted(len(self.verdicts), 'verdict')}, {len(self.failures)} not passed"
        state = "passed" if self.passed else f"failed (exit {self.exit_code})"
        return f"<Report {printable(self.name)}: {state}, {counts}>"

    def __str__(self) -> str:
        """Return the state, the causes, and a line for each run, in at most `MOST_LINES` lines."""
        state = "passed" if self.passed else f"failed (exit {self.exit_code})"
        lines = [f"{self.name}: {state}", *(f"why: {cause}" for cause in self.explanations)]
        lines += [str(self.error)] if self.error is not None else []
        lines += self.quality.missed if self.quality else ()
        for run in [r for r in self.runs if r.required or r.outcome != "not run"] or self.runs:
            of_run = [v for v in self.verdicts if (v.runtime, v.graph) == (run.runtime, run.graph)]
            wrong = {v.case for v in of_run if v.status != "passed"}
            result = f"{len(wrong)} of {counted(len({v.case for v in of_run}), 'case')} failed"
            result = result if run.outcome == "ran" else f"{run.outcome}: {run.reason}"
            lines.append(f"{run.runtime}, {run.graph}: {result}")
        more = len(lines) - MOST_LINES
        return "\n".join(lines if more <= 0 else [*lines[: MOST_LINES - 1], f"… {more + 1} more"])
