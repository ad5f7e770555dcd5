"""Influence of every input: the base case, cases that change one input of it, and what they show.

Without influence, the cases could not show a fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from attn_export.cases.draw import (
    FunctionInputs,
    Interface,
    Sizes,
    add_sums,
    by_role,
    clamp_sizes,
    draw_inputs,
    generator,
    limits,
)
from attn_export.cases.input_patterns import DrawnCase
from attn_export.errors import AttnExportError, ExportError, UsageError
from attn_export.measures import measure
from attn_export.results import BASE, CHANGED, Case, Golden

PROBE_SIZES: Sizes = {
    "batch": 2, "query_len": 3, "past_len": 2, "total_len": 5, "key_len": 4,
}  # fmt: skip
"""B 2, L 3, P 2, so S 5 (4 in cross-attention): small, so that large models can keep all probes."""

DRAWS = 8
"""The largest number of values that are drawn of an input to see whether it changes an output."""

_ATTEMPTS = (1, 1, 3, 6)
"""Factors on the sizes of the base case. An input may matter only if another has some value, or
only in longer sequences, so other base cases are tried if an input changes no output."""


def base_case(interface: Interface, attempt: int = 0) -> Case:
    """Return the case from which the `changed_*` cases differ."""
    planned = by_role(interface)
    drawn = draw_base(planned, base_sizes(planned, attempt), attempt)
    sizes, about = interface.roles.sizes(drawn.sizes), "what the changed_* cases differ from"
    return Case(BASE, "probe", sizes, drawn.inputs, about)


def changed_cases(interface: Interface, name: str, attempt: int = 0) -> Iterator[Case]:
    """Yield cases that differ from `base_case` in one input, each with another value of it."""
    planned = by_role(interface)
    sizes, inputs = base_sizes(planned, attempt), planned.inputs
    is_drawn = isinstance(inputs, FunctionInputs)
    differs = False
    for number in range(DRAWS):
        drawn = draw_base(planned, sizes, attempt)
        if name == "attn_mask" and not is_drawn and not number:
            _change_mask(drawn)
        else:
            words: list[str | int] = ["probe", "changed"]
            words += [number] if is_drawn or number else []
            other = draw_inputs(inputs, sizes, seed_words=tuple(words))[name]
            if is_drawn and np.array_equal(other, drawn.inputs[name]):
                continue
            span = (0, 0) if is_drawn else limits(inputs[name], sizes)
            drawn.inputs[name] = _differing(drawn.inputs[name], other, *span)
        differs = True
        named = interface.roles.sizes(sizes)
        yield Case(f"{CHANGED}{name}", "probe", named, drawn.inputs, f"{name} matters")
    if not differs:
        raise UsageError(
            f"inputs(sizes, rng) draws {name} alike {DRAWS} times, so no case could show a fault "
            "with it; vary it with rng, or compute it in the module"
        )


def base_sizes(interface: Interface, attempt: int = 0, **changed: int) -> dict[str, int]:
    """Return the sizes of the base case."""
    sizes = {name: PROBE_SIZES.get(name, 3) for name in interface.axes} | changed
    if attempt:
        sizes = {name: size * _ATTEMPTS[attempt] for name, size in sizes.items()}
    return add_sums(clamp_sizes(sizes, interface.bounds), interface.sums)


def draw_base(interface: Interface, sizes: Sizes, attempt: int = 0) -> DrawnCase:
    """Return the inputs of the base case."""
    words: list[str | int] = ["probe", BASE, *([attempt] if attempt else [])]
    inputs = draw_inputs(interface.inputs, sizes, seed_words=tuple(words))
    return DrawnCase(inputs, interface.inputs, interface.traits, sizes, generator("probe", BASE))


def _change_mask(drawn: DrawnCase) -> None:
    # A small mask may be drawn equal twice, so one key is flipped instead. The second query's own
    # key is visible even in the shortest window, and in longer ones to other queries as well.
    key = drawn.inputs["attn_mask"][..., _own_key(drawn)]
    key[...] = ~key if key.dtype == np.bool_ else np.where(np.isfinite(key), -np.inf, 0.0)


def _own_key(drawn: DrawnCase) -> int:
    """Return the index of the second query's own key in batch element 0; queries come last."""
    inputs = drawn.inputs
    if drawn.traits.in_place:
        return int(inputs["past_length"][0]) + 1
    S: int = inputs["attn_mask"].shape[-1]
    L: int = inputs["query"].shape[1] if "query" in inputs else S
    return max(min(S - L + 1, S - 1), 0)


def _differing(array: np.ndarray, other: np.ndarray, low: int, high: int) -> np.ndarray:
    """Return `other`, or a change of it if it is equal to `array`."""
    if not np.array_equal(other, array):
        return other
    if other.dtype == np.bool_:
        return ~other
    if np.issubdtype(other.dtype, np.integer):
        return np.asarray(((other - low + 1) % (high - low + 1) + low).astype(other.dtype))
    return other


# -- what they show -------------------------------------------------------------------------------

CLEARLY = 100
"""The change of an output, as a multiple of its tolerance, that shows an input's influence."""

ENOUGH = 0.1
"""The change of an output, relative to the output, that is enough if `CLEARLY` requires more."""


def find_influence(
    cases: Sequence[Case], interface: Interface, golden_of: Callable[[Case], Golden], clearly: float
) -> tuple[list[Case], dict[str, Golden]]:
    """Draw the base case and those that change one input again until each input changes an output.

    Returns:
        The cases, and the reference of those that were computed, by name.
    """
    first: dict[str, Golden] = {}
    for attempt in range(len(_ATTEMPTS)):
        try:
            computed, all_react = _attempt(interface, attempt, golden_of, clearly)
        except AttnExportError:  # not every module takes the larger sizes
            if not attempt:
                raise
            break
        first = first or computed
        if all_react:
            return [computed[c.name].case if c.name in computed else c for c in cases], computed
    return [first[c.name].case if c.name in first else c for c in cases], first


def _attempt(
    interface: Interface, attempt: int, golden_of: Callable[[Case], Golden], clearly: float
) -> tuple[dict[str, Golden], bool]:
    """Return the reference of the cases of one attempt, and whether they show every influence."""
    base = golden_of(base_case(interface, attempt))
    computed, reacting, all_move = {BASE: base}, set[str](), not base.uncompared
    for name in interface.inputs:
        moved: set[str] = set()
        for case in changed_cases(interface, name, attempt):
            changed = golden_of(case)
            computed.setdefault(case.name, changed)
            moved = {out for out in base.expected if _moves(base, changed, out, clearly)}
            if moved and not changed.uncompared:
                computed[case.name] = changed
                break
        all_move &= bool(moved)
        reacting |= moved
    return computed, all_move and reacting == set(base.expected)


def check_influence(goldens: Sequence[Golden], clearly: float = CLEARLY) -> None:
    """Raise an error unless each input changes an output, and each output is changed by an input.

    The base case is compared with the cases that change one input of it.
    """
    by_name = {golden.case.name: golden for golden in goldens}
    base = by_name[BASE]
    reacting: set[str] = set()
    for name in base.case.inputs:
        moved = {
            out for out in base.expected if _moves(base, by_name[f"{CHANGED}{name}"], out, clearly)
        }
        if not moved:
            raise ExportError(
                f"the input {name} changes no output, so no case could show a fault with it; "
                "remove it from the inputs"
            )
        reacting |= moved
    for out in base.expected:
        if out not in reacting:
            raise ExportError(
                f"the output {out} reacts to no input, so comparing it proves nothing; "
                "remove it from the outputs"
            )


def _moves(base: Golden, changed: Golden, output: str, clearly: float) -> bool:
    tolerance = base.tolerance[output]
    before, after = base.expected[output], changed.expected[output]
    if before.shape != after.shape:
        raise ExportError(
            f"the shape of {output} depends on values: {list(before.shape)} and "
            f"{list(after.shape)} for inputs of the same sizes; give it a shape of its own"
        )
    if tolerance is None:
        return bool((before != after).any())
    if not before.any():
        return bool(after.any())
    if tolerance.whole == math.inf:
        raise ExportError(
            f"the tolerance for {output} is infinite in the case {base.case.name}, so nothing "
            "it shows could be wrong: rounding makes values of the module infinite or NaN; keep "
            "them below the largest number of their type"
        )
    change = measure(after, before)
    # A change is seldom much larger than the output itself. A long past may hide it in the whole.
    return any(
        moved > min(clearly * error, max(ENOUGH, error))
        for moved, error in ((change.whole, tolerance.whole), (change.row, tolerance.row))
    )
