"""What graphs are judged by: a layer, a module, a whole model or a graph, and its float64 run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.cases.draw import Interface
from attn_export.errors import UsageError
from attn_export.spec import AttentionSpec

if TYPE_CHECKING:
    from attn_export.cases.plan import Plan
    from attn_export.export.subject import Subject
    from attn_export.truth.allowed import TruthSource

Notes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Reference:
    """What graphs are judged by.

    Attributes:
        whose: The description in messages, such as ``"the module"``.
        dtypes: The dtype of each output, by name.
        plan: A function that returns the cases.
        oracle: A function that returns the source of the truth. Its argument is the least eps of
            the dtypes in the graphs to judge; 0 for graphs of the reference's own types.
        has_narrow_dtypes: Whether the reference has types narrower than float32.
        path: The path of a graph; None for a module.
        cause: See `ValueReference.cause`.
        reduce: Reduces the golden vectors of a comparison, if not as `oracle` does.
        undeclared: The outputs whose declared shapes are no promise, by their names in the graph.
        is_float_model: Whether it is the float model of a quantised graph: budgets limit its
            distance.
    """

    whose: str
    interface: Interface
    dtypes: Mapping[str, str]
    plan: Callable[[], Plan]
    oracle: Callable[[float], TruthSource]
    notes: Notes
    has_narrow_dtypes: bool
    path: Path | None = None
    cause: Any = None
    reduce: Callable[[Path], Notes] | None = None
    undeclared: Collection[str] = ()
    is_float_model: bool = False


def of_module(module: Any) -> Reference:
    """Return the reference for a subject, or for the layer of a spec."""
    from attn_export.export.subject import Subject

    subject = Subject.from_spec(module) if isinstance(module, AttentionSpec) else module
    if not isinstance(subject, Subject):
        raise UsageError(
            "compare takes a Subject, an AttentionSpec or an ONNX file; got "
            f"{type(module).__name__}"
        )
    return of_subject(subject)


def of_subject(subject: Subject, interface: Interface | None = None) -> Reference:
    """Return the reference for a subject.

    `interface`: That from which cases are planned; by default that of the subject.
    """
    from attn_export.export.subject_checks import output_dtypes
    from attn_export.truth.oracle import Oracle

    interface = interface or subject.interface()
    return Reference(
        "the module", interface,
        output_dtypes(lambda: subject.call(subject.module, subject.inputs)),
        functools.partial(subject.plan, interface),
        subject.oracle or functools.partial(Oracle, subject), subject.notes,
        bool(subject.narrow_dtypes()),
    )  # fmt: skip
