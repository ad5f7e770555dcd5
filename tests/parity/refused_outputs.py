"""Outputs that the judge refuses, of a computation in the place of a bundle's graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from attn_export.bundle import GOLDEN
from attn_export.parity.golden import case_folders, read_golden, read_inputs
from attn_export.parity.judge import judge
from attn_export.results import Arrays, StoredCase


def refused_outputs(
    folder: Path,
    run: Callable[[Arrays], Arrays],
    chosen: Callable[[Sequence[StoredCase]], Iterable[StoredCase]],
) -> int:
    """Return the number of outputs that the judge refuses.

    Args:
        folder: The bundle.
        run: Returns outputs by name; they are cast to the types of the graph's.
        chosen: Chooses from the cases of the bundle.
    """
    names, cases = case_folders(folder / GOLDEN)
    goldens = {golden.case.name: golden for golden in read_golden(folder / GOLDEN)}
    found = 0
    for case in chosen(cases):
        golden = goldens[case.name]
        outputs = {
            name: array.astype(golden.expected[name].dtype)
            for name, array in run(read_inputs(case, names)).items()
        }
        verdicts = judge("planted", "model.onnx", golden, outputs)
        found += sum(verdict.status != "passed" for verdict in verdicts)
    return found
