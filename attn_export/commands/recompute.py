"""Recomputation of a bundle's reference, from its spec and weights or from the user's module."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from attn_export import system_info
from attn_export.bundle.golden import GoldenEvidence, Start, read_golden, write_inputs
from attn_export.bundle.manifest import GOLDEN, bundle_spec
from attn_export.bundle.quality_vectors import QUALITY
from attn_export.dialect_names import MODEL
from attn_export.errors import BundleError, UsageError, counted
from attn_export.graph.load import load_proto
from attn_export.judge.judge import judge
from attn_export.quality import Quality, kept_notes
from attn_export.results import Case, Golden, RuntimeRun, StoredCase, Verdict
from attn_export.runtimes.run_options import Progress
from attn_export.schema import Manifest
from attn_export.temp_folders import scratch

if TYPE_CHECKING:
    from attn_export.export.subject import Subject

_OF_CASES = ("attn-export", "numpy", "torch")
"""The packages whose versions determine cases and tolerances."""

MOST_ELEMENTS = 2**30
"""The largest number of elements of an input or output in a case of `--sizes`."""


class Recomputation:
    """A source of newly computed references: the module that a bundle was built from."""

    def __init__(
        self, folder: Path, manifest: Manifest, module: str | None, progress: Progress
    ) -> None:
        system_info.check_installed("torch")
        progress.phase("importing torch")
        self._spec = None if module is not None else bundle_spec(folder, manifest)
        if module is not None:
            from attn_export.export.user_module import load_subject

            self.subject = load_subject(module)
            dtype = _integers_of(folder, manifest, self.subject)
            if dtype and self.subject.budget is None:  # else it has such weights
                self.subject = self.subject.with_weights(dtype)
        elif self._spec is not None:
            from attn_export.export.subject import Subject

            self.subject = Subject.from_graph(self._spec, folder / MODEL)
        else:
            raise UsageError(
                f"{folder} is of a module of your own: give --module PATH.py:FUNCTION, which the "
                "reference is computed from"
            )
        self.progress, self._bundle = progress, folder
        _check_names(self.subject, manifest, module)
        own = dict(self.subject.kept or {})
        if own != manifest.kept:
            here, there = (
                "; ".join(kept_notes(kept)) or "all weights are of one type"
                for kept in (own, manifest.kept)
            )
            raise UsageError(f"--module {module}: {here}; in the bundle {there}: build it as that")
        from attn_export.reference.reference import of_subject

        self._reference = of_subject(self.subject)
        self._oracle = self._reference.oracle(0.0)

    def recompute(
        self, stored: GoldenEvidence, versions: Mapping[str, str], folder: Path, start: Start
    ) -> GoldenEvidence:
        """Compute cases, reference and tolerances as `build` does, and compare the stored ones.

        Returns:
            The new evidence, with a note on each difference, and verdicts on the stored reference.
        """
        from attn_export.commands.golden_vectors import golden_vectors

        goldens, _ = golden_vectors(
            folder, self._reference.plan(), self._oracle, start, self.progress,
            has_narrow_dtypes=self._reference.has_narrow_dtypes,
        )  # fmt: skip
        reduced = self._reduced(goldens, folder)
        differences = [*_compare_cases(reduced, stored.goldens), *self._of_quality(stored.quality)]
        here = system_info.versions()
        others = [name for name in _OF_CASES if _release(versions, name) != _release(here, name)]
        wrong = [each for each in differences if each.is_wrong]
        error = None
        if others:
            built = ", ".join(f"{name} {versions.get(name, 'unknown')}" for name in others)
            others_here = {each.case for each in differences if each.is_of_case}
            same = sum(golden.case.name not in others_here for golden in goldens)
            about = (
                f"the bundle was built with {built}: judged by the cases that are computed here, "
                f"of which it has {same} of {len(goldens)}"
            )
            differences = [_Difference(about), *(d for d in differences if not d.is_of_case)]
        elif wrong:
            error = BundleError(
                f"the stored test cases are not those that are computed anew: "
                f"{counted(len(wrong), 'difference')}, the first: {wrong[0]}"
            )
        runs, verdicts = _judge_stored(reduced, stored.goldens)
        notes = (*stored.notes, *map(str, differences))
        return GoldenEvidence(goldens, stored.quality, notes, runs, verdicts, error)

    def _reduced(self, goldens: Sequence[Golden], folder: Path) -> list[Golden]:
        """Return golden vectors in a folder with the rows alone that a bundle stores of them."""
        with scratch() as copy:  # runtimes still read the inputs
            shutil.copytree(folder, copy / GOLDEN)
            if (stored := self._bundle / GOLDEN / QUALITY).is_file():
                shutil.copy(stored, copy / GOLDEN)  # its cases are stored whole
            if not self._oracle.reduce(copy / GOLDEN):
                return list(goldens)
            reduced = {golden.case.name: golden for golden in read_golden(copy / GOLDEN)}
        pairs = ((golden, reduced.get(golden.case.name)) for golden in goldens)
        return [
            dataclasses.replace(
                each, tolerance=rows.tolerance, determined=rows.determined,
                case=dataclasses.replace(each.case, ignored_rows=rows.case.ignored_rows),
            )
            for each, rows in pairs if rows is not None
        ]  # fmt: skip

    def _of_quality(self, stored: Quality | None) -> list[_Difference]:
        """Return how a stored distance from the float model differs from that of a build."""
        spec = self._spec
        if stored is None or spec is None or spec.weights_dtype == "none":
            return []
        from attn_export.export.quantised_linears import default_budget

        differences = []
        default = (default_budget(spec.weights_dtype),)
        if stored.budgets != default:
            shown = [", ".join(map(str, budgets)) for budgets in (stored.budgets, default)]
            differences.append(_Difference(f"the budget is {shown[0]}, and by default {shown[1]}"))
        about = "the float weights are not in the bundle: the distance from them is its own claim"
        return [*differences, _Difference(about)]

    def random_cases(
        self, sizes: Sequence[str], folder: Path
    ) -> tuple[list[Golden], list[StoredCase]]:
        """Draw random cases of other sizes, write their inputs, and compute their reference.

        Returns:
            The cases with their reference, and the places of their inputs.
        """
        drawn = {case.name: case for case in map(self._case, sizes)}
        cases = [self._oracle.move_off_ties(case) or case for case in drawn.values()]
        stored = [write_inputs(folder, number, case) for number, case in enumerate(cases)]
        return self._references(cases), stored

    def _references(self, cases: Sequence[Case]) -> list[Golden]:
        goldens = []
        self.progress.expect(len(cases))
        for case in cases:
            goldens.append(self._oracle.golden(case))
            self.progress.advance(f"float64 reference: {case.name}")
        return goldens

    def _case(self, text: str) -> Case:
        from attn_export.cases.draw import concrete_shape, sizes_text
        from attn_export.cases.plan import random_case
        from attn_export.interface import PAST

        subject, bounds = self.subject, self.subject.interface().all_bounds
        axes = [axis for axis in subject.example_sizes if axis not in subject.sums]
        usual = {axis: int(subject.roles.name(axis) != PAST) for axis in axes}
        least = {axis: bounds.get(axis, [low])[0] for axis, low in usual.items()}
        sizes = subject.sizes_with(_parse_sizes(text, least))
        for name, allowed in bounds.items():
            if sizes[name] not in allowed:
                shown = sizes_text(allowed)
                raise UsageError(f"--sizes {text}: {name} is {shown}; got {sizes[name]}")
        shapes = [described.shape for described in subject.input_descriptions().values()]
        for shape in (*shapes, *subject.output_shapes().values()):
            elements = math.prod(concrete_shape(shape, sizes))
            if elements > MOST_ELEMENTS:
                raise UsageError(f"--sizes {text}: {list(shape)} would have {elements} elements")
        return random_case(sizes, subject.input_descriptions(), subject.sums)


def _parse_sizes(text: str, least: Mapping[str, int]) -> dict[str, int]:
    """Parse sizes such as ``"batch=4,query_len=2048"``, given the least size of each free axis."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in least:
            raise UsageError(
                f"--sizes {text}: {name!r} is not an axis; choose from {', '.join(least)}"
            )
        if not size.isascii() or not size.isdigit() or int(size) < least[name]:
            raise UsageError(f"--sizes {text}: {name} must be {least[name]} or more; got {size!r}")
        if name in sizes:
            raise UsageError(f"--sizes {text}: {name} is given twice")
        sizes[name] = int(size)
    return sizes


def _release(versions: Mapping[str, str], name: str) -> str:
    """Return the version of a package without the local part, which names a build of it."""
    return versions.get(name, "").partition("+")[0]


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


def _integers_of(folder: Path, manifest: Manifest, subject: Subject) -> str:
    """Return the integers that a bundle's graph holds for weights of a user's module; "" if none.

    A module may have integers of its own: then the bundle has no distance from a float model.
    """
    if not (folder / GOLDEN / QUALITY).is_file() or MODEL not in manifest.graphs:
        return ""
    weights = {name for name, _ in subject.module.named_parameters()}
    stored = {
        onnx.TensorProto.DataType.Name(tensor.data_type).lower()
        for tensor in load_proto(folder / MODEL).graph.initializer
        if tensor.name in weights
    }
    return next((dtype for dtype in ("int4", "int8") if dtype in stored), "")


# -- differences of stored test cases from those that are computed anew -------------------------

STORED = "stored test cases"
"""The runtime name in the report under which the stored reference is judged."""

_MORE = 1.1
"""The ratio of a tolerance to the computed one from which on they differ. That of eager, a
part of it, depends on the processor: 1.2 % were measured."""


@dataclasses.dataclass(frozen=True)
class _Difference:
    """A difference of stored evidence from that which is computed anew.

    Attributes:
        text: The difference, without the name of the case.
        case: The name of the case; "" if it is of no case.
        is_of_case: Whether the case is another one, so that the rest cannot be compared.
        is_wrong: Whether the evidence does not count in a bundle of the same version.
    """

    text: str
    case: str = ""
    is_of_case: bool = False
    is_wrong: bool = False

    def __str__(self) -> str:
        """Return the difference on one line."""
        return f"{self.case}: {self.text}" if self.case else self.text


def _compare_cases(recomputed: Sequence[Golden], stored: Sequence[Golden]) -> Iterator[_Difference]:
    """Yield the differences of stored cases from computed ones, except those of the reference."""
    here, there = ({g.case.name: g for g in goldens} for goldens in (recomputed, stored))
    for name in {**here, **there}:
        if name not in there or name not in here:
            text = "is missing" if name in here else "is not among the cases that are computed"
            yield _Difference(text, name, is_of_case=True, is_wrong=True)
            continue
        of_case = list(_labels_that_differ(here[name], there[name]))
        yield from (_Difference(text, name, is_of_case=True, is_wrong=True) for text in of_case)
        if not of_case:
            yield from _compare_tolerances(here[name], there[name])


def _labels_that_differ(new: Golden, old: Golden) -> Iterator[str]:
    for label in ("kind", "contents", "ignored_rows", "sizes"):
        values = [getattr(golden.case, label) for golden in (old, new)]
        if values[0] != values[1]:
            yield f"its {label} is {values[0]}, and {values[1]} is computed"
    for name in _other_inputs(new, old):
        yield f"its {name} is not the one that is computed"
    if new.uncompared.keys() != old.uncompared.keys():
        yield f"not compared are {sorted(old.uncompared)}; computed: {sorted(new.uncompared)}"


def _other_inputs(new: Golden, old: Golden) -> list[str]:
    stored = old.case.inputs
    return [
        name
        for name, array in new.case.inputs.items()
        if (array.dtype, array.shape) != (stored[name].dtype, stored[name].shape)
        or array.tobytes() != stored[name].tobytes()
    ]


def _compare_tolerances(new: Golden, old: Golden) -> Iterator[_Difference]:
    for name, computed in new.tolerance.items():
        tolerance = old.tolerance.get(name)
        if computed == tolerance:
            continue  # also infinite ones, of cases that are not compared
        if computed is None or tolerance is None:
            text = f"the tolerance for {name} is {tolerance}, and {computed} is computed"
            yield _Difference(text, new.case.name, is_wrong=True)
            continue
        ratios = (tolerance.whole / computed.whole, tolerance.row / computed.row)
        if not (min(ratios) >= 1 / _MORE and max(ratios) <= _MORE):
            text = (
                f"the tolerance for {name} is {tolerance.whole:.3g} of the whole and "
                f"{tolerance.row:.3g} of a row, {max(ratios):.3g} times what is computed"
            )
            yield _Difference(text, new.case.name, is_wrong=max(ratios) > _MORE)


def _judge_stored(
    recomputed: Sequence[Golden], stored: Sequence[Golden]
) -> tuple[tuple[RuntimeRun, ...], tuple[Verdict, ...]]:
    """Judge the stored reference of cases with equal inputs as if it were the output of a runtime.

    Returns:
        The run of that runtime, if there are such cases, and the verdicts.
    """
    by_name = {golden.case.name: golden for golden in stored}
    pairs = [(new, by_name.get(new.case.name)) for new in recomputed]
    verdicts = [
        verdict
        for new, old in pairs
        if old is not None and not _other_inputs(new, old)
        for verdict in judge(STORED, GOLDEN, new, old.expected)
    ]
    runs = (RuntimeRun(STORED, GOLDEN, "ran", "", True, {}),) if verdicts else ()
    return runs, tuple(verdicts)
