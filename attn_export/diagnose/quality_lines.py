"""Sentences that split the distance of a quantised bundle from the float model into its parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from attn_export.bundle import GOLDEN
from attn_export.diagnose.graph_run import GraphRun
from attn_export.parity.golden import read_golden
from attn_export.parity.quality_vectors import distance, is_plain, read_quality
from attn_export.quality import Quality


def quality_lines(folder: Path, runs: Mapping[str, GraphRun]) -> tuple[str, ...]:
    """Return sentences on the distance from the float model; none if the bundle has no figures.

    Args:
        folder: The folder of the bundle.
        runs: The results of the graphs that ran, by name.

    Raises:
        BundleError: If a file of the bundle does not fit.
    """
    goldens = read_golden(folder / GOLDEN)
    quality = read_quality(folder / GOLDEN, goldens, ())
    if quality is None or not quality.outputs:
        return ()
    return tuple(_lines(quality, runs))


def _lines(quality: Quality, runs: Mapping[str, GraphRun]) -> Iterator[str]:
    first = quality.outputs[0]
    kernels = [f"{_kernel(run, first.part)} in {graph}" for graph, run in runs.items()]
    alone = ", ".join(kernels)
    yield f"{first.part}: {first.sqnr:.1f} dB after quantising; of the kernel alone {alone}"
    for split in quality.splits:
        yield split.sentence


def _kernel(run: GraphRun, output: str) -> str:
    """Return the SQNR of a runtime's output against the truth of the quantised model, as text."""
    pairs = (
        (case.golden.expected[output], run.ran.outputs[case.name][output])
        for case in (*run.passed, *run.failed)
        if is_plain(case.golden.case) and output in run.ran.outputs.get(case.name, {})
    )
    sqnr = distance(output, pairs).sqnr
    return f"{sqnr:.1f} dB" if math.isfinite(sqnr) else "no error"
