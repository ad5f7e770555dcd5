"""Search for the known fault that explains a wrong graph, without runtimes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx

from attn_export.bundle.golden import read_golden, read_inputs, stored_cases
from attn_export.bundle.manifest import GOLDEN
from attn_export.explain.faults.fault import Evidence
from attn_export.explain.match import matches
from attn_export.float64.evaluate import Evaluation
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
    mine, found = Evaluation(right), []
    for case in (small[len(small) // 2], *small[:: max(len(small) // 8, 1)], *filter(None, first)):
        inputs = read_inputs(case, names)
        if sum(array.size for array in inputs.values()) > LARGEST:
            continue
        values, kinds = mine.values(inputs), expected[case.name]
        actual = {name: array.astype(kinds[name].dtype) for name, array in run(inputs).items()}
        found.append(Evidence(values, mine.outputs_of(values), actual))
    found.sort(key=lambda evidence: not differs(evidence))  # one that fails comes first
    named = matches(mine, found)
    return named[0].kind if named else ""


def differs(evidence: Evidence) -> bool:
    return any(
        np.abs(evidence.actual[name].astype(np.float64) - right).max(initial=0)
        > 1e-5 * max(np.abs(right).max(initial=0), 1.0)
        for name, right in evidence.right.items()
    )
