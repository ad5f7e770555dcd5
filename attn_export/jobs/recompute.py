"""Recomputation of a bundle's truth, from its spec and weights or from the user's module."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_export.bundle import GOLDEN, bundle_spec
from attn_export.dialect_names import MODEL
from attn_export.errors import BundleError, UsageError
from attn_export.parity.golden import read_inputs, write_inputs
from attn_export.report.progress import Progress
from attn_export.results import Case, Golden, RuntimeRun, StoredCase, Verdict
from attn_export.schema import Manifest
from attn_export.system_info import check_installed

if TYPE_CHECKING:
    from attn_export.export.subject import Subject

STORED = "golden vectors"
"""The runtime name in the report under which the stored truth is judged."""

MOST_ELEMENTS = 2**30
"""The largest number of elements of an input or output in a case of `--sizes`."""


class Truth:
    """A source of newly computed truths: the module that a bundle was built from.

    Args:
        folder: The bundle's folder.
        manifest: The manifest of the bundle.
        module: ``PATH.py:FUNCTION`` of the user's module; None for the spec of the bundle.
        progress: Receiver of progress.

    Raises:
        UsageError: If torch is missing; if the bundle has no spec and `module` is None; or if
            `module` has other inputs or outputs.
        BundleError: If the graph lacks a weight that the spec requires.
        ExportError: If the module has no float64 copy.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, module: str | None, progress: Progress
    ) -> None:
        check_installed("torch")
        progress.phase("importing torch")
        if module is not None:
            from attn_export.user_module import load_subject

            self.subject = load_subject(module)
        elif (spec := bundle_spec(folder, manifest)) is not None:
            from attn_export.export.subject import Subject

            self.subject = Subject.from_graph(spec, folder / MODEL)
        else:
            raise UsageError(
                f"{folder} is of a module of your own: give --module PATH.py:FUNCTION, which the "
                "truth is computed from"
            )
        self.progress = progress
        _check_names(self.subject, manifest, module)
        from attn_export.parity.oracle import Oracle

        self._oracle = Oracle(self.subject)

    def recompute(self, goldens: Sequence[Golden], stored: Sequence[StoredCase]) -> list[Golden]:
        """Return cases with a truth that is computed anew from their stored inputs.

        Args:
            goldens: The cases to compute.
            stored: The golden vectors of the bundle.
        """
        inputs = list(self.subject.inputs)
        cases = []
        for golden, case in zip(goldens, stored, strict=True):
            # Copies, because torch requires writable arrays.
            arrays = {name: array.copy() for name, array in read_inputs(case, inputs).items()}
            cases.append(dataclasses.replace(golden.case, inputs=arrays))
        return self._truths(cases)

    def random_cases(
        self, sizes: Sequence[str], folder: Path
    ) -> tuple[list[Golden], list[StoredCase]]:
        """Draw random cases of other sizes, write their inputs, and compute their truth.

        Args:
            sizes: Texts such as ``"batch=4,query_len=2048"``. Unnamed axes have the sizes of the
                example inputs.
            folder: The folder to write the inputs to.

        Returns:
            The cases with their truth, and the places of their inputs.

        Raises:
            UsageError: If a text is malformed, or a size is out of range.
            ExportError: If the module does not run at such sizes.
        """
        drawn = {case.name: case for case in map(self._case, sizes)}
        cases = [self._oracle.move_off_ties(case) or case for case in drawn.values()]
        stored = [write_inputs(folder, number, case) for number, case in enumerate(cases)]
        return self._truths(cases), stored

    def _truths(self, cases: Sequence[Case]) -> list[Golden]:
        goldens = []
        self.progress.expect(len(cases))
        for case in cases:
            goldens.append(self._oracle.golden(case))
            self.progress.advance(f"float64 truth: {case.name}")
        return goldens

    def _case(self, text: str) -> Case:
        from attn_export.parity.draw import concrete_shape
        from attn_export.parity.plan import random_case

        changed = _parse_sizes(text, list(self.subject.example_sizes), self.subject.sums)
        sizes = self.subject.sizes_with(changed)
        for name, (low, high) in self.subject.bounds.items():
            if not low <= sizes[name] <= high:
                raise UsageError(f"--sizes {text}: {name} is {low} to {high}; got {sizes[name]}")
        shapes = [described.shape for described in self.subject.input_descriptions().values()]
        for shape in (*shapes, *self.subject.output_shapes().values()):
            elements = math.prod(concrete_shape(shape, sizes))
            if elements > MOST_ELEMENTS:
                raise UsageError(f"--sizes {text}: {list(shape)} would have {elements} elements")
        return random_case(sizes, self.subject.input_descriptions(), self.subject.sums)


def _parse_sizes(text: str, axes: Sequence[str], sums: Mapping[str, str]) -> dict[str, int]:
    """Parse sizes such as ``"batch=4,query_len=2048"``; axes that are sums must not be named."""
    free = [axis for axis in axes if axis not in sums]
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        least = 0 if name == "past_len" else 1
        if name not in free:
            raise UsageError(
                f"--sizes {text}: {name!r} is not an axis; choose from {', '.join(free)}"
            )
        if not size.isascii() or not size.isdigit() or int(size) < least:
            raise UsageError(f"--sizes {text}: {name} must be {least} or more; got {size!r}")
        if name in sizes:
            raise UsageError(f"--sizes {text}: {name} is given twice")
        sizes[name] = int(size)
    return sizes


def judge_stored(
    recomputed: Sequence[Golden], stored: Sequence[Golden]
) -> tuple[RuntimeRun, list[Verdict]]:
    """Judge the stored truth as if it were the output of a runtime.

    Args:
        recomputed: The cases with the new truth.
        stored: The golden vectors of the bundle.

    Returns:
        The run of that runtime, and the verdicts.
    """
    from attn_export.parity.judge import judge

    run = RuntimeRun(STORED, GOLDEN, "ran", "", True, {})
    return run, [
        verdict
        for new, old in zip(recomputed, stored, strict=True)
        for verdict in judge(STORED, GOLDEN, new, old.expected)
    ]


def _check_names(subject: Subject, manifest: Manifest, module: str | None) -> None:
    for end, names, expected in (
        ("inputs", list(subject.inputs), list(manifest.inputs)),
        ("outputs", list(subject.outputs), list(manifest.outputs)),
    ):
        if names != expected:
            message = f"has the {end} {', '.join(names)}, and the bundle {', '.join(expected)}"
            if module is None:
                raise BundleError(f"the spec of the bundle {message}; build it again")
            raise UsageError(f"--module {module} {message}")
