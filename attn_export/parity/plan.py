"""The cases that a subject is tried with."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from attn_export.parity import conditions
from attn_export.parity.contents import FUTURE, VALUES, Content, Drawn, hides
from attn_export.parity.cover import Candidates, Choice, Cover
from attn_export.parity.draw import (
    Bounds,
    FunctionInputs,
    Sizes,
    axis_names,
    draw_inputs,
    generator,
    into_bounds,
    is_within,
    with_sums,
)
from attn_export.parity.fixed_cases import fixed_cases
from attn_export.parity.long_cases import case_bytes, decode_case, distant_case
from attn_export.parity.mask_contents import LENGTHS, LOWEST, MASKS
from attn_export.results import Case
from attn_export.spec import AttentionSpec, Input, Shape

GOLDEN_BYTES = 32 * 2**20
"""Largest size on disk of the golden vectors of a bundle."""

MOST_CANDIDATES = 600
"""The number of sizes that are looked at where all combinations are more."""

CASE_BYTES = GOLDEN_BYTES // 2
"""Largest size of one case."""

Fits = Callable[[Sizes], bool]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cases, and notes for the reader on their choice."""

    cases: tuple[Case, ...]
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Groups:
    """The contents that a subject may have, by group."""

    values: tuple[Content, ...]
    masks: tuple[Content, ...]
    lengths: tuple[Content, ...]

    @classmethod
    def of(cls, inputs: Mapping[str, Input], spec: AttentionSpec | None) -> Groups:
        """Return the contents that mean something for these inputs.

        Args:
            inputs: Descriptions of the inputs, by name.
            spec: The spec; None for a user's module.
        """
        masks: tuple[Content, ...] = ()
        found = {name: wanted for name, wanted in inputs.items() if hides(name, wanted)}
        if found and not isinstance(inputs, FunctionInputs):  # which draws masks as it wants
            floating = any(not w.dtype.startswith(("bool", "int")) for w in found.values())
            masks = (*MASKS, LOWEST) if floating and spec is not None else MASKS
        values: tuple[Content, ...] = VALUES
        if spec is not None and (spec.causal or spec.window_right is not None):
            values = (*VALUES, FUTURE)
        return cls(values, masks, LENGTHS if spec is not None and spec.in_place else ())

    def conditions(self, axes: Sequence[str]) -> list[str]:
        """Return all conditions on contents."""
        values, masks, lengths = (
            [content.name for content in group] for group in (self.values, self.masks, self.lengths)
        )
        return conditions.content_conditions(values, masks, lengths, axes)

    def combinations(self) -> list[tuple[Content, ...]]:
        """Return the contents that one case may have, at most one of each group."""
        # Masks depend on lengths: those are changed first.
        groups = ((None, *self.lengths), (None, *self.values), (None, *self.masks))
        found = [
            tuple(content for content in chosen if content is not None)
            for chosen in itertools.product(*groups)
        ]
        return [contents for contents in found if _fit_together(contents)]


def _fit_together(contents: Sequence[Content]) -> bool:
    names = {content.name for content in contents}
    if names & {"all_keys_masked", "one_visible_key"}:
        return len(names) == 1
    if "fully_masked_rows" in names:
        # In a small batch it hides all that other values could show.
        return names <= {"fully_masked_rows", *(content.name for content in LENGTHS)}
    # Unheld rows of the cache are scaled up already: twice, they would overflow.
    return "beyond_length" not in names or not any(content.is_loud for content in contents)


def plan_cases(
    inputs: Mapping[str, Input],
    output_shapes: dict[str, Shape],
    spec: AttentionSpec | None,
    sums: Mapping[str, str],
    fits: Fits = lambda _: True,
    bounds: Bounds | None = None,
) -> Plan:
    """Choose cases that meet all conditions together, within `GOLDEN_BYTES`.

    Args:
        inputs: Every input by name.
        output_shapes: The shape of every output, for the size of its truth.
        spec: The spec of the module, if it is ours.
        sums: Axes that are sums of others.
        fits: Whether the module takes given sizes; called for those next to blocks.
        bounds: The bounds of axes that have any.
    """
    bounds = bounds or {}
    fixed = fixed_cases(inputs, output_shapes, spec, sums, bounds)
    notes: list[str] = []
    if spec is not None:
        for choose in (distant_case, decode_case):
            case, note = choose(inputs, output_shapes, spec, sums)
            fixed += [case] if case else []
            notes += [note] if note else []
    budget = GOLDEN_BYTES - sum(case_bytes(case.sizes, inputs, output_shapes) for case in fixed)
    axes = conditions.free_axes(axis_names(inputs, sums), list(sums))
    groups = Groups.of(inputs, spec)
    sizes = _candidates(axes, fits, sums, bounds)
    costs = [case_bytes(each, inputs, output_shapes) for each in sizes]
    candidates = Candidates(sizes, costs, groups.combinations())
    ends = [f"{axis} {end}" for axis, limits in bounds.items() for end in limits]
    conditioned = [*groups.conditions(axes), *ends]
    cover = Cover(axes, conditioned, candidates, bounded=bool(bounds))
    chosen = cover.chosen(budget, CASE_BYTES)
    if cover.missed:
        notes.append(
            f"{len(cover.missed)} of {cover.wanted} conditions are met by no case, for lack of "
            f"room: {', '.join(cover.missed[:3])}{' …' if len(cover.missed) > 3 else ''}"
        )
    cases = [_case(sizes, contents, inputs, spec, sums) for sizes, contents in _in_order(chosen)]
    return Plan((*cases, *fixed), tuple(notes))


def covering_sizes(
    axes: Sequence[str], sums: Mapping[str, str], bounds: Bounds
) -> list[dict[str, int]]:
    """Return sizes that meet all conditions on sizes, but for those next to blocks.

    Args:
        axes: The names of the dynamic axes.
        sums: Axes that are sums of others.
        bounds: The bounds of axes that have any.
    """
    free = conditions.free_axes(list(axes), list(sums))
    found = _candidates(free, lambda _: False, sums, bounds, blocks=False)
    candidates = Candidates(found, [0] * len(found), [()])
    cover = Cover(free, (conditions.SMALLEST,), candidates, bounded=bool(bounds))
    return [sizes for sizes, _ in _in_order(cover.chosen(0, 0))]


def _candidates(
    axes: Sequence[str],
    fits: Fits,
    sums: Mapping[str, str],
    bounds: Bounds,
    *,
    blocks: bool = True,
) -> list[dict[str, int]]:
    """Return sizes to choose from, within their bounds and with sums, the usual ones first."""
    values = {axis: _values_within(axis, bounds, fits) for axis in axes}
    found = _some_combinations(values)
    if conditions.QUERIES in axes:
        found += _some_combinations({**values, conditions.QUERIES: (1,)})
    found.append({axis: min(of_axis) for axis, of_axis in values.items()})
    found += conditions.corners(axes)
    for axis in axes if blocks else ():
        for block, size in conditions.blocks_of(axis).items():
            beside = _beside_block(axes, block, bounds)
            if not fits({**beside, axis: size}):
                break
            found += _next_to_block(beside, axis, size)
    if conditions.PAST in axes and blocks:
        for block, size in conditions.BLOCKS.items():
            beside = _beside_block(axes, block, bounds)
            if not fits({**beside, conditions.PAST: size - 1}):
                break
            found += _next_to_block(beside, conditions.PAST, size - 1)
    whole = [with_sums(each, sums) for each in sorted(found, key=_distance_from_example)]
    return [each for each in whole if is_within(each, bounds)]


def _values_within(axis: str, bounds: Bounds, fits: Fits) -> tuple[int, ...]:
    """Return the sizes of an axis that are tried: the usual ones, and the ends of its bounds."""
    if axis not in bounds:
        return conditions.values_of(axis)
    low, high = bounds[axis]
    ends = [low, min(low + 1, high), high] if fits({axis: high}) else [low, min(low + 1, high)]
    usual = [value for value in conditions.values_of(axis) if low < value < high]
    return tuple(sorted({*usual, *ends}))


def _beside_block(axes: Sequence[str], block: int, bounds: Bounds) -> dict[str, int]:
    return into_bounds({axis: conditions.beside_block(axis, block) for axis in axes}, bounds)


def _some_combinations(values: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """Return all combinations of the values of each axis, or as many as can be looked at."""
    if math.prod(len(of_axis) for of_axis in values.values()) <= MOST_CANDIDATES:
        return [
            dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())
        ]
    rng = generator("candidates", *values)
    columns = [rng.choice(of_axis, MOST_CANDIDATES).tolist() for of_axis in values.values()]
    return [dict(zip(values, row, strict=True)) for row in zip(*columns, strict=True)]


def _next_to_block(beside: Mapping[str, int], axis: str, size: int) -> list[dict[str, int]]:
    """Return sizes with one axis next to a block, with two rows of a batch and with one."""
    found = {**beside, axis: size}
    return [{**found, conditions.BATCH: 2}, found] if conditions.BATCH in beside else [found]


def _distance_from_example(sizes: Sizes) -> float:
    """Return the log2 distance of sizes from those of the example: the nearest are chosen."""
    return sum(abs(math.log2((size + 1) / 5)) for size in sizes.values())


def _is_filled(sizes: Sizes) -> bool:
    """Return whether a row of a cache in place must be filled with the whole past.

    One of several rows has it; a single one has it next to a block, else capacity may be left.
    """
    most = max(conditions.values_of(conditions.PAST))
    return sizes[conditions.BATCH] > 1 or sizes[conditions.PAST] > most


def _in_order(chosen: Sequence[Choice]) -> list[Choice]:
    """Return the cases in mixed order, the smallest call first.

    Some runtimes keep buffers, or a branch, from the first shape that they see.
    """
    mixed = generator("order").permutation(len(chosen))
    found = [chosen[index] for index in mixed]
    plain = [each for each in found if not each[1]] or found
    if plain:
        first = min(plain, key=lambda each: sum(each[0].values()))
        found.remove(first)
        found.insert(0, first)
    return found


def random_case(sizes: Sizes, inputs: Mapping[str, Input], sums: Mapping[str, str]) -> Case:
    """Return a case with random inputs.

    Args:
        sizes: The size of every axis.
        inputs: Every input by name.
        sums: Axes that are sums of others.
    """
    return _case(sizes, (), inputs, None, sums)


def _case(
    sizes: Sizes,
    contents: Sequence[Content],
    inputs: Mapping[str, Input],
    spec: AttentionSpec | None,
    sums: Mapping[str, str],
) -> Case:
    letters = {"batch": "B", "query_len": "L", "past_len": "P", "key_len": "S"}
    shown = [f"{letters.get(n, n)}{size}" for n, size in sorted(sizes.items()) if n not in sums]
    name = "_".join([*(content.name for content in contents), *shown])
    name = name if contents else "_".join(["shape", *shown])
    drawn = draw_inputs(inputs, sizes, seed_words=("case", name))
    if spec is not None and spec.in_place and _is_filled(sizes):
        drawn["past_length"][-1] = sizes["past_len"]
    change = Drawn(drawn, inputs, spec, sizes, generator("contents", name))
    for content in contents:
        content.change(change)
    about = "; ".join(content.about for content in contents) or conditions.PLAIN
    loud = any(content.is_loud for content in contents)
    return Case(
        name, "probe" if contents else "shape", sizes, drawn, about, loud,
        tuple(content.name for content in contents),
    )  # fmt: skip
