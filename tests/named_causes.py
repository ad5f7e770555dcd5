"""Search for the known fault that explains wrong outputs, without runtimes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy_attention
import onnx
import onnx_ir as ir
from causes import CAUSES
from fault_specs import SPECS
from faults import FAULTS as ATTENTION_FAULTS

from attn_export.bundle.golden import read_golden, read_inputs, stored_cases
from attn_export.bundle.manifest import GOLDEN
from attn_export.explain.comparison import Evidence
from attn_export.explain.match import matches
from attn_export.export.export import export
from attn_export.export.subject import Subject
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.measures import element_errors
from attn_export.results import Arrays

CONTENTS = ("outliers", "large_logits", "sharp", "lowest_float")
"""The first case of each of these contents is always used."""
LARGEST = 20_000
"""The largest number of elements of a case that is used."""


def first_cause(folder: Path, right: onnx.ModelProto, wrong: onnx.ModelProto) -> str:
    """Return the kind of the fault that accounts best for a wrong graph; "" for none."""
    theirs = Evaluation(wrong)
    return first_cause_of(folder, right, lambda inputs: theirs.outputs_of(theirs.values(inputs)))


def first_cause_of(
    folder: Path, right: onnx.ModelProto, run: Callable[[Arrays], Mapping[str, np.ndarray]]
) -> str:
    """Return the kind of the fault that accounts best for wrong outputs; "" for none."""
    names, stored = stored_cases(folder / GOLDEN)
    goldens = list(read_golden(folder / GOLDEN))
    expected = {golden.case.name: golden.expected for golden in goldens}
    finite = {golden.case.name for golden in goldens if not golden.case.ignored_rows}
    small = sorted(
        (case for case in stored if case.kind != "decode" and case.name in finite),
        key=lambda case: math.prod(max(size, 1) for size in case.sizes.values()),
    )
    first = (next((c for c in stored if c.name.startswith(name)), None) for name in CONTENTS)
    mine, seen = Evaluation(right), []
    for case in (small[len(small) // 2], *small[:: max(len(small) // 8, 1)], *filter(None, first)):
        inputs = read_inputs(case, names)
        if sum(array.size for array in inputs.values()) <= LARGEST:
            kinds, wrong = expected[case.name], run(inputs)
            actual = {name: array.astype(kinds[name].dtype) for name, array in wrong.items()}
            seen.append((mine.values(inputs), actual))
    return next(iter(causes_of(mine, seen)), "")


def causes_of(evaluation: Evaluation, seen: Iterable[tuple[Values, Arrays]]) -> list[str]:
    """Return the kinds of the faults that account for wrong outputs, the best first.

    `seen`: All values of the right graph in some cases, and the wrong outputs.
    """
    evidence = [Evidence(values, evaluation.outputs_of(values), actual) for values, actual in seen]
    evidence.sort(key=lambda each: not differs(each))  # one that fails comes first
    return [match.fault.kind for match in matches(evaluation, evidence)]


def differs(evidence: Evidence) -> bool:
    return any(
        element_errors(evidence.actual[name].astype(np.float64), right).max(initial=0)
        > 1e-4 * max(np.abs(right[np.isfinite(right)]).max(initial=0), 1.0)
        for name, right in evidence.right.items()
    )


# -- faults of attention in numpy ----------------------------------------------------------------

FAULTS = {fault.name: fault for fault in ATTENTION_FAULTS if fault.name in CAUSES}
SPEC_OF = {
    name: next(spec for spec in SPECS if fault.applies(SPECS[spec]))
    for name, fault in FAULTS.items()
}
"""Faults whose cause is known, by name, and the first spec to which each applies."""


def causes_of_fault(name: str) -> list[str]:
    """Return the kinds of the faults that account for attention in numpy with a fault."""
    evaluation, parameters, cases = _evaluated(SPEC_OF[name])
    spec, at = SPECS[SPEC_OF[name]], FAULTS[name].at
    seen = ((v, numpy_attention.run(spec, parameters, inputs, at)) for inputs, v in cases)
    return causes_of(evaluation, seen)


@functools.lru_cache(maxsize=1)
def _evaluated(spec: str) -> tuple[Evaluation, Arrays, list[tuple[Arrays, Values]]]:
    """Return the graph of a spec, its weights, and inputs and all values of some cases."""
    subject = Subject.from_spec(SPECS[spec])
    evaluation = Evaluation(ir.to_proto(export(subject).model))
    small = [
        case for case in subject.plan().cases
        if not case.ignored_rows and sum(array.size for array in case.inputs.values()) <= LARGEST
    ]  # fmt: skip
    small.sort(key=lambda case: case.sizes["query_len"])
    several = [c for c in small if c.sizes["batch"] > 1 and 2 < c.sizes["query_len"] < 40]
    names = (*CONTENTS, "fully_masked", "causal")
    others = [case for name in names for case in [c for c in small[::-1] if name in c.name][:2]]
    parameters = {name: tensor.numpy() for name, tensor in subject.module.state_dict().items()}
    chosen = [case.inputs for case in (*several[::6][:5], *others)]
    return evaluation, parameters, [(inputs, evaluation.values(inputs)) for inputs in chosen]
