"""Choice of the cases of a subject, within the size limit of golden vectors."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from attn_export.cases import conditions
from attn_export.cases.blocks import BLOCKS, BlockSizes
from attn_export.cases.coverage import Choice, Cover, Fits
from attn_export.cases.draw import (
    Bounds,
    FunctionInputs,
    Interface,
    Sizes,
    add_sums,
    by_role,
    clamp_sizes,
    draw_inputs,
    generator,
    has_few_scores,
    is_within,
    largest,
)
from attn_export.cases.fixed_cases import far_calls, fixed_cases, long_cases
from attn_export.cases.input_patterns import (
    EQUAL_KEYS,
    FUTURE,
    VALUES,
    DrawnCase,
    InputPattern,
    is_mask,
)
from attn_export.cases.mask_patterns import LARGE_BIASES, LENGTH_NAMES, LENGTHS, LOWEST, MASKS
from attn_export.errors import first_few
from attn_export.interface import BATCH, PAST, QUERIES, Input
from attn_export.results import Case

GOLDEN_BYTES = 32 * 2**20
"""Largest size on disk of the golden vectors of a bundle."""

_MOST_CANDIDATES = 600
"""The largest number of combinations of sizes to choose from; if there are more, a random sample
is used."""

CASE_BYTES = 3 * GOLDEN_BYTES
"""Largest size of one case in bytes."""

_RUN_BYTES, _FEW_WEIGHTS = 9 * GOLDEN_BYTES, 2**20
"""Largest size of all cases as they are run, of modules of so few weights. Of large cases, seeds of
inputs and some rows of outputs are stored: see `reference.stored_evidence`."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The chosen cases.

    Attributes:
        notes: Notes on their choice for the reader of a report.
        interface: The inputs and outputs that they are for.
        is_settled: Whether the cases are run as they are, and none is left out.
    """

    cases: tuple[Case, ...]
    notes: tuple[str, ...]
    interface: Interface
    is_settled: bool = False


@dataclasses.dataclass(frozen=True)
class Groups:
    """The patterns that a subject may have, by group."""

    values: tuple[InputPattern, ...]
    masks: tuple[InputPattern, ...]
    lengths: tuple[InputPattern, ...]

    @classmethod
    def of(cls, interface: Interface) -> Groups:
        """Return the patterns that apply to the inputs of a subject."""
        inputs, traits = interface.inputs, interface.traits
        masks: tuple[InputPattern, ...] = ()
        mask_inputs = [input_ for name, input_ in inputs.items() if is_mask(name, input_)]
        # Masks that a function of the user draws are not changed.
        if mask_inputs and not isinstance(inputs, FunctionInputs):
            floating = any(not m.dtype.startswith(("bool", "int")) for m in mask_inputs)
            masks = (*MASKS, LOWEST, LARGE_BIASES) if floating and traits.is_attention else MASKS
        values: tuple[InputPattern, ...] = VALUES
        if traits.hides_future:
            values = (*values, FUTURE)
        if traits.is_attention and inputs.keys() & {"key", "past_key"}:
            values = (*values, EQUAL_KEYS)
        return cls(values, masks, LENGTHS if traits.in_place else ())

    def pattern_conditions(self, axes: Sequence[str]) -> list[str]:
        """Return all conditions on patterns."""
        values, masks, lengths = (
            [pattern.name for pattern in group] for group in (self.values, self.masks, self.lengths)
        )
        return conditions.pattern_conditions(values, masks, lengths, axes)

    def combinations(self) -> list[tuple[InputPattern, ...]]:
        """Return the combinations of patterns that a case may have, at most one of each group."""
        # Lengths come first, since the patterns of masks depend on them.
        groups = ((None, *self.lengths), (None, *self.values), (None, *self.masks))
        combinations = [
            tuple(pattern for pattern in patterns if pattern is not None)
            for patterns in itertools.product(*groups)
        ]
        return [patterns for patterns in combinations if _fit_together(patterns)]


def _fit_together(patterns: Sequence[InputPattern]) -> bool:
    names = {pattern.name for pattern in patterns}
    if names & {"all_keys_masked", "one_visible_element", "one_visible_key"}:
        return len(names) == 1
    alone = names & {"fully_masked_rows", "hidden_blocks"}
    if alone:
        # In a small batch, masked rows would hide the faults that other values show.
        return names <= {*alone, *LENGTH_NAMES}
    # Unused cache entries are scaled up already: scaled twice, they would overflow.
    return "beyond_length" not in names or not (
        "zero_tokens" in names or any(pattern.may_overflow for pattern in patterns)
    )


def plan_cases(
    interface: Interface, fits: Fits = lambda _: True, weights: int = _FEW_WEIGHTS
) -> Plan:
    """Return cases that together meet as many conditions as fit into the limits of their size.

    `weights`: The number of weights of the module, whose runs take time.
    """
    roles, is_function = interface.roles, isinstance(interface.inputs, FunctionInputs)
    most = GOLDEN_BYTES if is_function else _RUN_BYTES * _FEW_WEIGHTS // max(weights, _FEW_WEIGHTS)
    plan = _plan_by_role(
        by_role(interface), lambda sizes: fits(roles.sizes(sizes)), max(most, GOLDEN_BYTES)
    )
    cases = [dataclasses.replace(case, sizes=roles.sizes(case.sizes)) for case in plan.cases]
    return Plan(tuple(cases), (*roles.notes(), *plan.notes), interface)


def _plan_by_role(interface: Interface, fits: Fits, most_bytes: int) -> Plan:
    """Return the cases of an interface whose axes have the names of their roles."""
    long, notes = long_cases(interface)
    fixed = [*fixed_cases(interface), *long]
    # Fixed cases are made whatever their size, so they may leave nothing of the limit.
    budget = most_bytes - sum(interface.case_bytes(case.sizes) for case in fixed)
    sums, bounds = interface.sums, interface.bounds
    axes = conditions.free_axes(interface.axes, list(sums))
    groups, blocks = Groups.of(interface), BlockSizes(axes, sums, bounds)
    candidates = _candidates(axes, fits, sums, bounds, blocks)
    costs = [interface.case_bytes(each) for each in candidates]
    at_bounds = [f"{axis} {end}" for axis, ends in bounds.items() for end in (ends[0], ends[-1])]
    wanted = [*groups.pattern_conditions(axes), *at_bounds]
    patterns = groups.combinations()
    cover = Cover(axes, blocks, wanted, candidates, costs, patterns, bounded=bool(bounds))
    choices = cover.choose(budget, CASE_BYTES, fits, reserve=most_bytes * 5 // 9)
    budget -= sum(interface.case_bytes(chosen) for chosen, _ in choices)
    far, too_far = far_calls(interface, budget)
    notes += [*too_far, *_notes(cover, blocks)]
    ends = [(axis, high) for axis, sizes in bounds.items() if (high := largest(sizes))]
    unreached = [f"{a} {high}" for a, high in ends if all(each[a] != high for each in candidates)]
    if unreached:
        notes.append(
            f"no case reaches {first_few(unreached)}, where the module raises or a run would take "
            "too much time or memory"
        )
    cases = [_case(sizes, patterns, interface) for sizes, patterns in _shuffle(choices)]
    return Plan((*cases, *fixed, *far), tuple(notes), interface)


def _notes(cover: Cover, blocks: BlockSizes) -> Iterator[str]:
    """Yield notes on the conditions that no case meets."""
    at_blocks, missed = blocks.conditions(), cover.missed()
    others = [name for name in missed if name not in at_blocks]
    if others:
        yield (
            f"not tested, {len(others)} of {cover.count} combinations of sizes and patterns, since "
            f"a build would take too long: {first_few(others)}"
        )
    for reason, names in (
        ("a build would take too long", missed),
        ("the module raises there or is too large to try them", cover.refused()),
    ):
        sizes = blocks.summary(names)
        if sizes:
            yield f"not tested at block sizes of kernels, since {reason}: {sizes}"


def covering_sizes(
    axes: Sequence[str], sums: Mapping[str, str], bounds: Bounds
) -> list[dict[str, int]]:
    """Return sizes that together meet the conditions on sizes, not at blocks or upper bounds."""
    free = conditions.free_axes(list(axes), list(sums))
    sizes = _candidates(free, lambda _: False, sums, bounds)
    costs = [0] * len(sizes)
    cover = Cover(free, None, (conditions.SMALLEST,), sizes, costs, [()], bounded=bool(bounds))
    return [sizes for sizes, _ in _shuffle(cover.choose(0, 0))]


def _candidates(
    axes: Sequence[str],
    fits: Fits,
    sums: Mapping[str, str],
    bounds: Bounds,
    blocks: BlockSizes | None = None,
) -> list[dict[str, int]]:
    """Return sizes to choose from, within bounds and with sums; those like the example first."""
    values = {axis: _sizes_within(axis, bounds, fits) for axis in axes}
    candidates = _combinations(values)
    if QUERIES in axes:
        candidates += _combinations({**values, QUERIES: (1,)})
    candidates.append({axis: min(of_axis) for axis, of_axis in values.items()})
    candidates += conditions.corners(axes)
    candidates += blocks.candidates() if blocks else ()
    candidates = [clamp_sizes(each, bounds) for each in candidates]
    unique = {tuple(each[axis] for axis in axes): each for each in candidates}
    complete = [
        add_sums(each, sums) for each in sorted(unique.values(), key=_distance_from_example)
    ]
    return [each for each in complete if is_within(each, bounds) and has_few_scores(each, sums)]


def _sizes_within(axis: str, bounds: Bounds, fits: Fits) -> tuple[int, ...]:
    """Return the sizes of an axis to try: the usual ones within its bounds, and those at them."""
    if axis not in bounds:
        return conditions.tried_sizes(axis)
    allowed, high = bounds[axis], largest(bounds[axis])
    ends = [*allowed[:2], *([high] if high and fits({axis: high}) else [])]
    usual = [size for size in conditions.tried_sizes(axis) if size in allowed and size != high]
    first = [] if getattr(allowed, "step", 0) == 1 else allowed[:5]
    return tuple(sorted({*usual, *first, *ends}))


def _combinations(values: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """Return all combinations of sizes, or `_MOST_CANDIDATES` random ones if there are more."""
    if math.prod(len(of_axis) for of_axis in values.values()) <= _MOST_CANDIDATES:
        return [
            dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())
        ]
    rng = generator("candidates", *values)
    columns = [rng.choice(of_axis, _MOST_CANDIDATES).tolist() for of_axis in values.values()]
    return [dict(zip(values, row, strict=True)) for row in zip(*columns, strict=True)]


def _distance_from_example(sizes: Sizes) -> float:
    """Return the sum of the log2 distances of sizes from 4, which is near those of the example."""
    return sum(abs(math.log2((size + 1) / 5)) for size in sizes.values())


def _shuffle(choices: Sequence[Choice]) -> list[Choice]:
    """Return the cases in random order, the one with the smallest sizes and no patterns first."""
    # Some runtimes keep buffers, or a branch, from the first shape that they see.
    shuffled = [choices[index] for index in generator("order").permutation(len(choices))]
    plain = [choice for choice in shuffled if not choice[1]] or shuffled
    if plain:
        first = min(plain, key=lambda choice: sum(choice[0].values()))
        shuffled.remove(first)
        shuffled.insert(0, first)
    return shuffled


def random_case(sizes: Sizes, inputs: Mapping[str, Input], sums: Mapping[str, str]) -> Case:
    """Return a case with random inputs."""
    return _case(sizes, (), Interface(inputs, {}, sums=sums))


def _case(sizes: Sizes, patterns: Sequence[InputPattern], interface: Interface) -> Case:
    inputs = interface.inputs
    letters = {"batch": "B", "query_len": "L", "past_len": "P", "key_len": "S"}
    shown = [
        f"{letters.get(n, n)}{size}" for n, size in sorted(sizes.items()) if n not in interface.sums
    ]
    name = "_".join([*(pattern.name for pattern in patterns), *shown])
    name = name if patterns else "_".join(["shape", *shown])
    drawn = draw_inputs(inputs, sizes, seed_words=("case", name))
    # The last batch element of a cache in place has the longest past. A single one has it at a
    # block only: else every case of one element would fill its capacity.
    is_filled = interface.traits.in_place and (sizes[BATCH] > 1 or sizes[PAST] >= BLOCKS[0] - 2)
    if is_filled:
        drawn["past_length"][-1] = sizes["past_len"]
    case = DrawnCase(drawn, inputs, interface.traits, sizes, generator("contents", name))
    for pattern in patterns:
        pattern.change(case)
    about = "; ".join(pattern.about for pattern in patterns) or conditions.PLAIN
    may_overflow = any(pattern.may_overflow for pattern in patterns)
    return Case(
        name, "probe" if patterns else "shape", sizes, drawn, about, may_overflow,
        tuple(pattern.name for pattern in patterns),
    )  # fmt: skip
