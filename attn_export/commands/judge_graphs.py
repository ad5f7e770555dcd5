"""The one way in which graphs are judged: cases, their reference, outputs, verdicts."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.bundle.manifest import GOLDEN
from attn_export.errors import UsageError, one_line
from attn_export.results import BASE, Case, Detail, Golden, RuntimeRun, TensorNames, Verdict
from attn_export.runtimes.pool import Pool
from attn_export.system_info import processor

if TYPE_CHECKING:
    from attn_export.interface import Shape
    from attn_export.quality import Budget, Quality
    from attn_export.reference.reference import Reference
    from attn_export.reference.tolerance import BaseOracle


@dataclasses.dataclass(frozen=True)
class Judged:
    """The cases with their reference, what the runtimes made of them, and notes for the report.

    Attributes:
        planned: The cases before some were left out, if they were planned here.
    """

    goldens: Sequence[Golden]
    runs: tuple[RuntimeRun, ...]
    verdicts: tuple[Verdict, ...]
    quality: Quality | None
    notes: tuple[str, ...]
    planned: Sequence[Case] = ()


def judge_graphs(
    folder: Path,
    graphs: Path,
    pool: Pool,
    reference: Reference,
    oracle: BaseOracle,
    *,
    names: TensorNames | None = None,
    inputs: Sequence[Any] = (),
    budgets: Sequence[Budget] = (),
) -> Judged:
    """Run the graphs of a pool on all cases of a reference, and judge the outputs by it.

    The reference is computed while the runtimes run. `folder/golden` gets cases and reference.

    `graphs`: The folder of the graphs.
    `names`: The names in the graphs, if they are not those of the reference.
    `inputs`: The sources of the user's own inputs.
    `budgets`: The limits of the distance of a quantised reference from its float model.
    """
    from attn_export.commands.golden_vectors import golden_vectors
    from attn_export.interface import BATCH

    pool.run.progress.phase("choosing the cases")
    interface, plan = reference.interface, reference.plan()
    names = names or TensorNames.same(interface.inputs, interface.output_shapes)
    axes = axes_of(reference, names)
    base = next(case for case in plan.cases if case.name == BASE)
    cases, left_out = oracle.computable(plan.cases)
    own = _own_cases(reference, oracle, names, inputs)
    plan = dataclasses.replace(plan, cases=(*cases, *own))
    start = functools.partial(
        pool.start, graphs, list(names.inputs.values()), axes, caches=caches_of(reference, names)
    )
    goldens, notes = golden_vectors(
        folder / GOLDEN, plan, oracle, start, pool.run.progress,
        has_narrow_dtypes=reference.has_narrow_dtypes, names=names,
    )  # fmt: skip
    told = oracle.notes(base)
    distance, goldens = None, list[Golden](goldens)
    if budgets:
        distance, measured = oracle.quality(folder / GOLDEN, goldens, budgets)
        goldens = list(measured)
    judged = judge_goldens(pool, goldens, axes, interface.roles.axis(BATCH), distance)
    return dataclasses.replace(
        judged, planned=plan.cases,
        notes=(*left_out, *told, *plan.notes, *notes, *judged.notes),
    )  # fmt: skip


def judge_goldens(
    pool: Pool, goldens: Sequence[Golden], axes: Mapping[str, Shape], batch: str,
    distance: Quality | None = None,
) -> Judged:  # fmt: skip
    """Judge what runtimes make of cases that they were given, as outputs arrive.

    `axes`: The shape of each output, by name; dynamic axes by name.
    `batch`: The name of the batch axis.
    `distance`: That of the reference from a float model, if there is one.
    """
    from attn_export.judge.gate import cpu_notes
    from attn_export.judge.judge import undetermined_note
    from attn_export.judge.replay import buffers_note, judge_pool

    budgets = distance.budgets if distance else ()
    runs, verdicts, quality = judge_pool(pool, goldens, axes, budgets)
    quality = distance.beside(quality) if distance else quality
    notes = (
        tried_note([golden.case for golden in goldens], batch), *buffers_note(pool.files),
        *undetermined_note(goldens), *cpu_notes(verdicts, goldens), *_slices_notes(runs),
        *_levels_notes(pool),
    )  # fmt: skip
    return Judged(goldens, runs, verdicts, quality, notes)


_BATCHES_APART = 3
"""The largest batch size that is tried with other sizes of its own; larger ones share theirs."""


def tried_note(cases: Sequence[Case], batch: str) -> str:
    """Return a note with the smallest and the largest tried sizes, for each number of sequences.

    `batch`: The name of the batch axis.
    """
    sizes_of: dict[int, list[Mapping[str, int]]] = {}
    for case in cases:
        sizes_of.setdefault(min(case.sizes.get(batch, 1), _BATCHES_APART + 1), []).append(
            case.sizes
        )

    def others(tried: Sequence[Mapping[str, int]]) -> str:
        names = dict.fromkeys(name for sizes in tried for name in sizes if name != batch)
        return ", ".join(_range(name, tried) for name in names)

    parts = []
    for text, alike in itertools.groupby((sizes_of[size] for size in sorted(sizes_of)), others):
        batches = _range(batch, [*itertools.chain(*alike)])
        parts += [", ".join(filter(None, (batches, text)))]
    text = "; ".join(filter(None, parts)) or "one, since no axis is dynamic"
    return Detail(f"sizes: {text}")


def _range(axis: str, tried: Sequence[Mapping[str, int]]) -> str:
    found = {sizes[axis] for sizes in tried if axis in sizes}
    return f"{axis} {'-'.join(map(str, dict.fromkeys((min(found), max(found)))))}" if found else ""


def _slices_notes(runs: Sequence[RuntimeRun]) -> list[str]:
    """Return a note on each graph that a runtime ran in slices."""
    return [
        f"{ran.runtime} ran {ran.graph} in {ran.facts['slices']} slices: fusions across them were "
        "not seen; --whole runs it whole"
        for ran in runs
        if "slices" in ran.facts
    ]


def _levels_notes(pool: Pool) -> list[str]:
    """Return notes on the graphs that round inputs of products, if there are any."""
    exact = {file.name: file.exact for file in pool.files if file.exact}
    if not exact:
        return []
    return [
        f"inputs of products are rounded to 8 bits (accuracy_level 4) in {', '.join(exact)}",
        Detail(
            f"rounded as {processor()} does: judged by twice the distance of the model with such "
            f"inputs, and by the budget; {', '.join(exact.values())}, the same without rounding, "
            "by the usual rule"
        ),
    ]


def axes_of(reference: Reference, names: TensorNames) -> dict[str, Shape]:
    """Return the axes of every input and output of the graphs, by name."""
    interface = reference.interface
    shapes = {names.inputs[n]: described.shape for n, described in interface.inputs.items()}
    shapes |= {names.outputs[n]: shape for n, shape in interface.output_shapes.items()}
    # A dynamic axis of an output that is no axis of an input has the name "".
    return {
        name: tuple(f"{name}.{at}" if axis == "" else axis for at, axis in enumerate(shape))
        for name, shape in shapes.items()
    }


def caches_of(reference: Reference, names: TensorNames) -> Mapping[str, str]:
    """Return the input of the graphs that takes an output in the next step, by output."""
    caches = reference.interface.roles.caches
    return {names.outputs[output]: names.inputs[source] for output, source in caches.items()}


def _own_cases(
    reference: Reference, oracle: BaseOracle, names: TensorNames, inputs: Sequence[Any]
) -> list[Case]:
    """Return the cases of the user's own inputs, which the reference must be able to compute."""
    if not inputs:
        return []
    from attn_export.export.given_inputs import own_cases

    cases = own_cases(inputs, reference.interface, names.inputs, reference.whose)
    for case in cases:
        try:
            oracle.eager(case.inputs)
        except Exception as error:  # as various as modules
            raise UsageError(
                f"--inputs {case.about}: {reference.whose} refuses them: {one_line(error)}"
            ) from error
    return cases
