"""Golden vectors on disk: `test_data_set_N/input_I.pb, output_I.pb` and an index.

The layout is that of ONNX's backend tests, so `onnx_test_runner` reads it too. In addition to the
reference (`output_I.pb`) there are eager's outputs (`eager_I.pb`).

numpy is imported inside functions: `verify` starts the runtimes' processes before that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import to_builtins

from attn_export.errors import AttnExportError, BundleError, UsageError, counted, one_line
from attn_export.quality import Budget, Quality
from attn_export.results import BASE, CHANGED, Arrays, Case, Golden, RuntimeRun, StoredCase, Verdict
from attn_export.schema import CaseEntry, GoldenIndex, Manifest
from attn_export.untrusted_files import checked, parse_json, read_text

if TYPE_CHECKING:
    import numpy as np


# -- golden vectors on disk ---------------------------------------------------------------------

INDEX = "index.json"

_MOST_ELEMENTS = 2**29
"""The most elements of an output of which some rows are stored."""


def write_inputs(folder: Path, number: int, case: Case) -> StoredCase:
    """Write the inputs of a case.

    Returns:
        The case, with the folder of its files.
    """
    from attn_export.tensorfile import write_tensors

    data = folder / data_set(number)
    data.mkdir(parents=True)
    write_tensors(data, "input", case.inputs)
    return StoredCase(case.name, data, case.sizes, case.kind)


def data_set(number: int) -> str:
    """Return the name of the folder of a case, as ONNX's backend tests name it."""
    return f"test_data_set_{number}"


def write_outputs(folder: Path, number: int, golden: Golden) -> Golden:
    """Write the reference and eager's outputs of a case into the folder of its inputs.

    Returns:
        The case, whose large outputs are views of these files.
    """
    from attn_export.tensorfile import mapped, write_tensors

    data = folder / data_set(number)
    write_tensors(data, "output", golden.expected)
    write_tensors(data, "eager", golden.eager)
    return replace(
        golden, expected=mapped(data, "output", golden.expected),
        eager=mapped(data, "eager", golden.eager),
    )  # fmt: skip


def write_index(folder: Path, goldens: Sequence[Golden]) -> None:
    """Write the index of all cases; `write_inputs` and `write_outputs` wrote their files."""
    first = goldens[0]
    entries = [_entry(number, golden) for number, golden in enumerate(goldens)]
    ends, budgets = (list(first.case.inputs), list(first.expected)), list(map(str, first.budgets))
    index = to_builtins(GoldenIndex(*ends, entries, budgets))
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def read_golden(folder: Path) -> list[Golden]:
    """Read the golden vectors without their inputs, which only the runtimes read."""
    index = read_index(folder)
    try:
        budgets = tuple(map(Budget.parse, index.budgets))
        return [replace(_read_case(folder, index, e), budgets=budgets) for e in index.cases]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, UsageError) as error:
        raise BundleError(f"the stored test cases in {folder} cannot be read: {error}") from error


def stored_cases(folder: Path) -> tuple[list[str], list[StoredCase]]:
    """Return the names of the inputs, and every case, from the index alone.

    Returns:
        The names of the inputs, in the order of their files, and the cases.
    """
    index = read_index(folder)
    cases = [
        StoredCase(entry.name, folder / entry.folder, entry.sizes, entry.kind)
        for entry in index.cases
    ]
    return index.inputs, cases


def read_inputs(case: StoredCase, names: Sequence[str]) -> Arrays:
    """Return the inputs of a case, by name."""
    from attn_export.tensorfile import read_tensors

    try:
        return read_tensors(case.folder, "input", names)
    except (OSError, ValueError) as error:
        raise BundleError(f"{case.folder} cannot be read: {one_line(error)}") from error


def with_inputs(
    goldens: Sequence[Golden], cases: Sequence[StoredCase], names: Sequence[str]
) -> list[Golden]:
    """Return golden vectors with the inputs of their cases."""
    return [
        replace(golden, case=replace(golden.case, inputs=read_inputs(case, names)))
        for golden, case in zip(goldens, cases, strict=True)
    ]


def read_index(folder: Path) -> GoldenIndex:
    """Read the index, and check the type and range of all its values.

    Kits put these values into generated programs.
    """
    path = folder / INDEX
    try:
        return checked(parse_json(read_text(path)), GoldenIndex)
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BundleError(f"{path} was changed: {error}; build the bundle again") from error


def _entry(number: int, golden: Golden) -> CaseEntry:
    case = golden.case
    return CaseEntry(
        case.name, case.kind, case.about, case.contents, case.ignored_rows, dict(case.sizes),
        data_set(number), dict(golden.tolerance), dict(golden.uncompared), dict(golden.determined),
        rounded=dict(golden.rounded),
    )  # fmt: skip


def _read_case(folder: Path, index: GoldenIndex, entry: CaseEntry) -> Golden:
    from attn_export.tensorfile import read_tensors

    case_folder = folder / entry.folder
    case = Case(
        entry.name, entry.kind, entry.sizes, {}, entry.about,
        contents=entry.contents, ignored_rows=entry.ignored_rows,
    )  # fmt: skip
    stored = read_tensors(case_folder, "output", index.outputs)
    expected = {name: _whole(array, name, entry) for name, array in stored.items()}
    eager = expected if entry.shapes else read_tensors(case_folder, "eager", index.outputs)
    for name, reference in expected.items():
        if (reference.shape, reference.dtype) != (eager[name].shape, eager[name].dtype):
            raise ValueError(f"{case.name} has two shapes or types of {name}")
        is_read = reference.ndim and reference.size  # nothing of an empty output is compared
        if is_read and any(row >= len(reference) for row in case.ignored_rows):
            raise ValueError(f"{case.name} ignores rows that {name} does not have")
    for name, rows in entry.determined.items():
        ignored = case.ignored_rows if expected[name].size else ()
        per_element = math.prod(expected[name].shape[1:-1])
        if any(row // per_element not in ignored for row in rows):
            raise ValueError(f"{case.name} compares rows of {name} that it does not ignore")
    return Golden(
        case, expected, eager, entry.tolerance, entry.uncompared, determined=entry.determined,
        rounded=entry.rounded,
    )  # fmt: skip


def _whole(stored: np.ndarray, name: str, entry: CaseEntry) -> np.ndarray:
    """Return an output with 0 in the rows that are not stored."""
    if name not in entry.shapes:
        return stored
    import numpy as np

    shape, rows = entry.shapes[name], list(entry.determined.get(name, ()))
    if (len(rows), shape[-1]) != stored.shape or math.prod(shape) > _MOST_ELEMENTS:
        raise ValueError(f"{entry.name} has {list(stored.shape)} values of {name} {shape}")
    whole = np.zeros((math.prod(shape[:-1]), shape[-1]), stored.dtype)
    whole[rows] = stored  # raises IndexError beyond the last row
    return whole.reshape(shape)


Start = Callable[[Sequence[StoredCase]], int]
"""A function that starts the runtimes on stored cases, and returns the number of all their runs."""


@dataclass(frozen=True)
class GoldenEvidence:
    """The cases by which a bundle is judged.

    Attributes:
        quality: The distance of a quantised model from the float model.
        runs: The run of the stored reference, if it is judged by a new one.
        error: The error if stored cases differ from those that are computed anew.
    """

    goldens: Sequence[Golden]
    quality: Quality | None = None
    notes: tuple[str, ...] = ()
    runs: tuple[RuntimeRun, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    error: AttnExportError | None = None


# -- the cases that golden vectors must contain; docs/parity.md defines them --------------------

LEAST_SIZES = 3
"""The least number of different sizes that each dynamic axis of an input must have."""

SMALLEST = {"batch": 1, "query_len": 1, "past_len": 0}
"""The size that some case must have of the axis with a role, unless its bounds exclude it."""

_MASK_PATTERNS = ("fully_masked_rows", "one_visible_key", "left_padding", "right_padding")
"""Input patterns that some case must have if a layer of ours has a mask."""


def check_evidence(manifest: Manifest, cases: Sequence[Case], *, ours: bool) -> None:
    """Raise an error if golden vectors lack a case that evidence requires."""
    missing = next(_missing(manifest, cases, ours=ours), "")
    if missing:
        raise BundleError(
            f"the stored test cases prove nothing: of {counted(len(cases), 'case')}, {missing}; "
            "build the bundle again"
        )


def _missing(manifest: Manifest, cases: Sequence[Case], *, ours: bool) -> Iterator[str]:
    inputs = {name: signature.shape for name, signature in manifest.inputs.items()}
    names = {case.name for case in cases}
    alone = inputs if ours else inputs.keys() - set(manifest.unchanged)
    for name in (BASE, *(f"{CHANGED}{input_name}" for input_name in alone)):
        if name not in names:
            yield f"none is {name!r}"
    for axis in {axis for shape in inputs.values() for axis in shape if isinstance(axis, str)}:
        sizes = {case.sizes.get(axis, 0) for case in cases}
        if len(sizes) < LEAST_SIZES:
            yield f"{axis} has {len(sizes)} sizes, not {LEAST_SIZES} or more"
        smallest = SMALLEST.get(axis if ours else manifest.roles.get(axis, axis))
        least = smallest if ours else manifest.bounds.get(axis, [smallest])[0]
        if smallest is not None and least == smallest and smallest not in sizes:
            yield f"none has {axis} {smallest}"
    patterns = {name for case in cases for name in case.contents}
    for pattern in _MASK_PATTERNS if ours and "attn_mask" in inputs else ():
        if pattern not in patterns:
            yield f"none has {pattern}"
