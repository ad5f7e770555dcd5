"""The evidence that is kept of large cases: seeds of inputs, and some positions of outputs.

All positions of all cases of a whole model would take gigabytes with a real vocabulary.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs, to_builtins

from attn_export.bundle.golden import INDEX, LEAST_SIZES, read_index
from attn_export.bundle.quality_vectors import FLOAT, measured_folders
from attn_export.cases.draw import seed_of
from attn_export.errors import counted
from attn_export.measures import judged_rows
from attn_export.results import BASE, CHANGED, Detail
from attn_export.schema import CaseEntry, GoldenIndex, Tolerance
from attn_export.seeded_tensors import write_seed
from attn_export.tensorfile import SEED, is_floating, read_tensor, read_tensors, write_tensors

MOST_BYTES = 2**25
"""The largest size of the references of all graphs of a model, in bytes."""

_POSITIONS = 9
"""The most positions of a batch element: the last, the first, and between them."""

_SEEDED_FROM = 4096
"""The size in bytes from which an input is stored as a seed."""

_Rows = dict[str, list[np.ndarray]]
"""The numbers of rows to store, by output: those of the last position of all batch elements, those
of their first …."""


def seed_words(*words: str) -> tuple[str, ...]:
    """Return the words of the seed of a case, or with its name, of an input."""
    return "whole", *words


def reduce_if_large(folder: Path, most_bytes: int) -> tuple[str, ...]:
    """Reduce golden vectors that are larger, but for small cases; return a note, if it did."""
    index = read_index(folder)
    sizes = {entry.name: _bytes(folder / entry.folder) for entry in index.cases}
    if sum(sizes.values()) <= most_bytes:
        return ()
    # Kits and tools for ONNX's test data replay those that are stored whole, and the distance from
    # a float model is measured on them.
    whole, left = set[str](), most_bytes // 2
    measured = measured_folders(folder)
    first = {e.name for e in index.cases if e.name == BASE or e.folder in measured}
    for name in sorted(sizes, key=lambda name: (name not in first, sizes[name])):
        left -= sizes[name]
        if left >= 0 or name in first:
            whole.add(name)
    others = max(most_bytes - sum(sizes[name] for name in whole), 0)
    return reduce_evidence(folder, min(others, most_bytes // 2), whole)


def _bytes(case: Path) -> int:
    """Return the size of a case in bytes, without outputs of a float model."""
    # `verify --recompute` does not have them, and must come to the same rows.
    files = (file for file in case.iterdir() if not file.name.startswith(FLOAT))
    return sum(file.stat().st_size for file in files)


def reduce_evidence(folder: Path, most_bytes: int, whole: Collection[str] = ()) -> tuple[str, ...]:
    """Reduce the golden vectors in a folder to what is stored of a whole model; return a note.

    `whole`: The names of cases that stay as they are.
    """
    index = read_index(folder)
    outputs, choices = index.outputs, list[tuple[CaseEntry, _Rows, list[int]]]()
    judged, stored, entries = 0, 0, list[CaseEntry]()
    for entry in index.cases:
        before = judged
        arrays = read_tensors(folder / entry.folder, "output", outputs)
        rows, sizes = _Rows(), [0] * _POSITIONS
        for name, array in arrays.items():
            if array.ndim < 2 or not array.size or not is_floating(array.dtype):
                continue
            is_judged = judged_rows(array.shape, entry.ignored_rows, entry.determined.get(name, ()))
            judged += int(np.count_nonzero(is_judged))
            numbers = np.arange(is_judged.size).reshape(is_judged.shape)
            rows[name] = _by_rank(list(map(_spread, numbers, is_judged)))
            for rank, each in enumerate(rows[name]):
                sizes[rank] += len(each) * array.shape[-1] * array.dtype.itemsize
        if entry.name in whole:
            entries.append(entry)
            stored += judged - before
        else:
            choices.append((entry, rows, sizes))
    count = _count([sizes for _, _, sizes in choices], most_bytes)
    # Where not even one position of each case fits, what `verify` asks for is kept first.
    shown, least = set[Any](), _least(index.cases)
    every = *entries, *(entry for entry, _, _ in choices)
    needed = {entry.name for entry in every if _is_needed(entry, shown, least)}
    choices.sort(key=lambda choice: choice[0].name not in needed)
    left = most_bytes
    for entry, rows, sizes in choices:
        left -= sum(sizes[:count])
        if left < 0 and entry.name not in needed:
            shutil.rmtree(folder / entry.folder)
            continue
        none = np.empty(0, np.int64)
        kept = {n: np.sort(np.concatenate([none, *each[:count]])) for n, each in rows.items()}
        stored += sum(map(len, kept.values()))
        entries.append(_store(folder / entry.folder, index, entry, kept))
    order = {entry.name: at for at, entry in enumerate(index.cases)}
    entries.sort(key=lambda entry: order[entry.name])
    _write(folder, structs.replace(index, cases=entries))
    whole_ones = f", {len(whole)} of them whole" if whole else ""
    return (
        Detail(
            f"stored evidence: {stored} of {judged} rows that were judged, of "
            f"{len(entries)} of {counted(len(index.cases), 'case')}{whole_ones}"
        ),
    )


def _least(entries: Sequence[CaseEntry]) -> dict[str, int]:
    """Return the smallest size of each axis."""
    axes = {axis for entry in entries for axis in entry.sizes}
    return {axis: min(e.sizes[axis] for e in entries if axis in e.sizes) for axis in axes}


def _is_needed(entry: CaseEntry, shown: set[Any], least: Mapping[str, int]) -> bool:
    """Return whether `verify` asks for a case: none before shows what it does.

    It is the base, changes one input, has new patterns, the smallest size of an axis, or one of the
    first sizes of it.

    `shown`: The patterns of the cases before, and their sizes, to which its own are added.
    `least`: The smallest size of each axis.
    """
    new: set[Any] = {*entry.contents, *entry.sizes.items()} - shown
    counts = Counter(each[0] for each in shown if isinstance(each, tuple))
    shown |= new
    return entry.name.startswith((BASE, CHANGED)) or any(
        isinstance(each, str) or counts[each[0]] < LEAST_SIZES or each[1] == least[each[0]]
        for each in new
    )


def _by_rank(elements: list[list[np.ndarray]]) -> list[np.ndarray]:
    """Return the rows of the first position of all batch elements, of the second …."""
    ranks = range(max(map(len, elements), default=0))
    return [np.concatenate([e[rank] for e in elements if rank < len(e)]) for rank in ranks]


def _spread(numbers: np.ndarray, is_judged: np.ndarray) -> list[np.ndarray]:
    """Return the judged rows of some positions of a batch element.

    They are the last position with any, the first, and others between them.
    """
    numbers, is_judged = np.atleast_1d(numbers), np.atleast_1d(is_judged)
    positions = np.flatnonzero(is_judged.any(axis=tuple(range(is_judged.ndim - 1))))[::-1]
    last = len(positions) - 1
    middles = [last * eighths // 8 for eighths in (4, 2, 6, 1, 3, 5, 7)]
    places = dict.fromkeys([0, last, *middles]) if len(positions) else ()
    return [numbers[..., at][is_judged[..., at]] for at in positions[list(places)]]


def _count(sizes: list[list[int]], most: int) -> int:
    """Return how many positions of each case fit; at least one."""
    fitting = (
        count
        for count in range(_POSITIONS, 1, -1)
        if sum(sum(each[:count]) for each in sizes) <= most
    )
    return next(fitting, 1)


def _store(
    folder: Path, index: GoldenIndex, entry: CaseEntry, kept: Mapping[str, np.ndarray]
) -> CaseEntry:
    """Rewrite the files of a case, and return its entry."""
    for number, name in enumerate(index.inputs):
        path = folder / f"input_{number}.pb"
        if path.stat().st_size <= _SEEDED_FROM:
            continue
        _, array = read_tensor(path)
        seeds = [seed_of(*seed_words(case, name)) for case in (entry.name, BASE)]
        seeds += [seed_of(kind, entry.name, name) for kind in ("case", "probe")]
        if any(write_seed(path.with_suffix(SEED), name, array, seed) for seed in seeds):
            path.unlink()
    arrays = read_tensors(folder, "output", index.outputs)
    shapes = {name: list(arrays[name].shape) for name in kept}
    determined = {
        name: range(array[..., 0].size if array.ndim else 0) for name, array in arrays.items()
    } | {name: rows.tolist() for name, rows in kept.items()}
    write_tensors(folder, "output", {
        name: a.reshape(-1, a.shape[-1])[kept[name]] if name in kept else a
        for name, a in arrays.items()
    })  # fmt: skip
    for path in folder.glob("eager_*.pb"):
        path.unlink()
    return structs.replace(
        entry, shapes=shapes,
        ignored_rows=tuple(range(max(len(a) for a in arrays.values() if a.ndim))),
        determined={name: tuple(rows) for name, rows in determined.items() if len(rows)},
        # The error of some rows together may be that of the worst one.
        tolerance=_by_row(entry.tolerance), rounded=_by_row(entry.rounded),
    )  # fmt: skip


def _by_row(errors: Mapping[str, Tolerance | None]) -> dict[str, Tolerance | None]:
    return {
        name: Tolerance(max(each.whole, each.row), each.row) if each else None
        for name, each in errors.items()
    }


def _write(folder: Path, index: GoldenIndex) -> None:
    text = json.dumps(to_builtins(index), indent=1) + "\n"
    (folder / INDEX).write_text(text, encoding="utf-8")
