"""Count of the outputs that the judge refuses if a computation replaces a bundle's graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from onnx.reference import ReferenceEvaluator

from attn_export.bundle.golden import read_golden, read_inputs, stored_cases
from attn_export.bundle.manifest import GOLDEN
from attn_export.judge.judge import judge
from attn_export.results import Arrays, Golden, StoredCase


def refused_outputs(
    folder: Path,
    run: Callable[[Arrays], Arrays],
    chosen: Callable[[Sequence[StoredCase]], Iterable[StoredCase]],
) -> int:
    """Return the number of refused outputs of the first case of which any is refused."""
    names, cases = stored_cases(folder / GOLDEN)
    for case in chosen(cases):
        golden = goldens_of(folder)[case.name]
        outputs = {
            name: array.astype(golden.expected[name].dtype)
            for name, array in run(read_inputs(case, names)).items()
        }
        verdicts = judge("planted", "model.onnx", golden, outputs)
        refused = sum(verdict.status != "passed" for verdict in verdicts)
        if refused:
            return refused
    return 0


def run_in_float64(evaluator: ReferenceEvaluator) -> Callable[[Arrays], Arrays]:
    """Return what runs a graph whose floating types were widened."""
    names = evaluator.output_names

    def run(inputs: Arrays) -> Arrays:
        wide = {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in inputs.items()}
        return dict(zip(names, evaluator.run(names, wide), strict=True))

    return run


@functools.lru_cache(maxsize=2)
def goldens_of(folder: Path) -> dict[str, Golden]:
    """Return the truth of the cases of a bundle, by name, which is read once for its tests."""
    return {golden.case.name: golden for golden in read_golden(folder / GOLDEN)}
