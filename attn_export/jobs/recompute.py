"""The truth of a bundle, computed anew from its spec and weights, or from the user's module."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.bundle import GOLDEN, SPEC
from attn_export.dialect_names import MODEL
from attn_export.errors import BundleError, UsageError
from attn_export.parity.golden import read_inputs, write_inputs
from attn_export.report.progress import Progress
from attn_export.results import Case, Golden, RuntimeRun, StoredCase, Verdict
from attn_export.spec import AttentionSpec
from attn_export.system_info import check_installed

if TYPE_CHECKING:
    from attn_export.export.subject import Subject

STORED = "golden vectors"
"""The name under which the stored truth is judged, as a runtime is."""

MOST_ELEMENTS = 2**30
"""The most elements that one input or output of a case of `--sizes` may have."""


@dataclasses.dataclass(frozen=True)
class Truth:
    """New computation of the truth of cases.

    Attributes:
        subject: The module.
        progress: Receiver of progress.
    """

    subject: Subject
    progress: Progress

    @classmethod
    def of(
        cls, folder: Path, manifest: Mapping[str, Any], module: str | None, progress: Progress
    ) -> Truth:
        """Load the module that a bundle was built from.

        Args:
            folder: The bundle.
            manifest: Its manifest.
            module: ``PATH.py:FUNCTION`` of a module of the user's.
            progress: Receiver of progress.

        Raises:
            UsageError: If torch is missing; if the bundle is not of a layer of ours, and `module`
                is None; or if `module` has other inputs or outputs.
            BundleError: If the graph lacks a weight that the spec requires.
        """
        check_installed("torch")
        progress.phase("importing torch")
        if module is not None:
            from attn_export.user_module import load_subject

            subject = load_subject(module)
        elif SPEC in manifest["files"]:
            from attn_export.export.subject import Subject

            subject = Subject.from_graph(AttentionSpec.from_toml(folder / SPEC), folder / MODEL)
        else:
            raise UsageError(
                f"{folder} is of a module of your own: give --module PATH.py:FUNCTION, which the "
                "truth is computed from"
            )
        _refuse_other_signature(subject, manifest, module)
        return cls(subject, progress)

    def recomputed(self, goldens: Sequence[Golden], stored: Sequence[StoredCase]) -> list[Golden]:
        """Return the cases with a truth that is computed anew from their stored inputs.

        Args:
            goldens: The cases, with their inputs.
            stored: The golden vectors of the bundle.
        """
        inputs = list(self.subject.inputs)
        cases = []
        for golden, case in zip(goldens, stored, strict=True):
            read = read_inputs(case, inputs)
            # What was read cannot be written, which torch asks for.
            arrays = {name: array.copy() for name, array in read.items()}
            cases.append(dataclasses.replace(golden.case, inputs=arrays))
        return self._truths(cases)

    def at(self, sizes: Sequence[str], folder: Path) -> tuple[list[Golden], list[StoredCase]]:
        """Return random cases of other sizes with their truth, and write their inputs.

        Args:
            sizes: Texts such as ``"batch=4,query_len=2048"``. Other axes have the sizes of the
                example.
            folder: The folder to write the inputs to.

        Raises:
            UsageError: If a text names no axis, or a size that is too large.
            ExportError: If the module does not take such sizes.
        """
        from attn_export.parity.oracle import Oracle

        named = {case.name: case for case in map(self._case, sizes)}
        move_off_ties = Oracle(self.subject).move_off_ties
        cases = [move_off_ties(case) or case for case in named.values()]
        stored = [write_inputs(folder, number, case) for number, case in enumerate(cases)]
        return self._truths(cases), stored

    def _truths(self, cases: Sequence[Case]) -> list[Golden]:
        from attn_export.parity.oracle import Oracle

        oracle = Oracle(self.subject)
        found = []
        self.progress.expect(len(cases))
        for case in cases:
            found.append(oracle.golden(case))
            self.progress.advance(f"float64 truth: {case.name}")
        return found

    def _case(self, text: str) -> Case:
        from attn_export.parity.draw import concrete_shape
        from attn_export.parity.plan import random_case

        changed = sizes_of(text, list(self.subject.example_sizes), self.subject.sums)
        sizes = self.subject.sizes_with(changed)
        for name, (low, high) in self.subject.bounds.items():
            if not low <= sizes[name] <= high:
                raise UsageError(f"--sizes {text}: {name} is {low} to {high}; got {sizes[name]}")
        shapes = [wanted.shape for wanted in self.subject.input_values().values()]
        for shape in (*shapes, *self.subject.output_shapes().values()):
            elements = math.prod(concrete_shape(shape, sizes))
            if elements > MOST_ELEMENTS:
                raise UsageError(f"--sizes {text}: {list(shape)} would have {elements} elements")
        return random_case(sizes, self.subject.input_values(), self.subject.sums)


def sizes_of(text: str, axes: Sequence[str], sums: Mapping[str, str]) -> dict[str, int]:
    """Return the sizes that a text names.

    Args:
        text: ``"batch=4,query_len=2048"``.
        axes: The axes that there are.
        sums: The sizes that are sums of others, which cannot be given.

    Raises:
        UsageError: If it is something else.
    """
    free = [axis for axis in axes if axis not in sums]
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        least = 0 if name == "past_len" else 1
        if name not in free:
            raise UsageError(f"--sizes {text}: {name!r} is no axis; choose from {', '.join(free)}")
        if not size.isascii() or not size.isdigit() or int(size) < least:
            raise UsageError(f"--sizes {text}: {name} must be {least} or more; got {size!r}")
        if name in found:
            raise UsageError(f"--sizes {text}: {name} is given twice")
        found[name] = int(size)
    return found


def judge_stored(
    recomputed: Sequence[Golden], stored: Sequence[Golden]
) -> tuple[RuntimeRun, list[Verdict]]:
    """Judge the stored truth, as if it were a runtime's output.

    Args:
        recomputed: The cases with the new truth.
        stored: The golden vectors of the bundle.
    """
    from attn_export.parity.judge import judge

    run = RuntimeRun(STORED, GOLDEN, "ran", "", True, {})
    return run, [
        verdict
        for new, old in zip(recomputed, stored, strict=True)
        for verdict in judge(STORED, GOLDEN, new, old.expected)
    ]


def _refuse_other_signature(
    subject: Subject, manifest: Mapping[str, Any], module: str | None
) -> None:
    for what, found, wanted in (
        ("inputs", list(subject.inputs), list(manifest["inputs"])),
        ("outputs", list(subject.outputs), list(manifest["outputs"])),
    ):
        if found != wanted:
            message = f"has the {what} {', '.join(found)}, and the bundle {', '.join(wanted)}"
            if module is None:
                raise BundleError(f"the spec of the bundle {message}; build it again")
            raise UsageError(f"--module {module} {message}")
