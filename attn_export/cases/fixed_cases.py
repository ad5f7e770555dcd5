"""Cases that are not chosen by the cover: those of fixed sizes, and long ones.

Cases of fixed sizes show that every input matters, and that non-finite values stay in their batch
element. The long cases are a whole decode, keys at distant positions, and decodes after long pasts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from attn_export.cases import blocks
from attn_export.cases.draw import ANY, Interface, Sizes, add_sums, draw_inputs
from attn_export.cases.influence import base_case, base_sizes, changed_cases, draw_base
from attn_export.cases.input_patterns import DrawnCase, InputPattern
from attn_export.errors import first_few
from attn_export.interface import Threshold
from attn_export.results import WHOLE_DECODE, Case
from attn_export.tensorfile import ArrayDict, is_floating

NON_FINITE = 1
"""The first batch element that is not finite in cases with `ignored_rows`."""


def fixed_cases(interface: Interface) -> list[Case]:
    """Return the base case, a case that changes each input alone, and cases with NaN or Inf."""
    cases = [base_case(interface)]
    cases += [next(changed_cases(interface, name)) for name in interface.inputs]
    batch_first = all("batch" not in shape[1:] for shape in interface.output_shapes.values())
    has_others = interface.bounds.get("batch", ANY)[-1] > NON_FINITE
    if "batch" in interface.axes and batch_first and has_others:
        cases += _non_finite_cases(interface)
    return cases


def pattern_case(pattern: InputPattern, interface: Interface) -> Case:
    """Return the base case with other patterns."""
    drawn = draw_base(interface, base_sizes(interface))
    pattern.change(drawn)
    return Case(pattern.name, "probe", drawn.sizes, drawn.inputs, pattern.about)


# -- NaN and Inf in one batch element ------------------------------------------------------------


def _non_finite_cases(interface: Interface) -> Iterator[Case]:
    """Yield cases in which batch elements are not finite: they must not affect the others."""
    # Outputs of these elements are compared where they are determined, see `non_finite.py`.
    drawn = draw_base(interface, base_sizes(interface))
    shapes = {name: interface.inputs[name].shape for name in drawn.value_names()}
    names = [name for name, shape in shapes.items() if shape[:1] == ("batch",)]
    # The first and the last batch element are finite.
    several = base_sizes(interface, batch=len(names) + 3)
    sizes_by_suffix = {"": several}
    if several.get("query_len", 1) > 1:
        sizes_by_suffix["_one_query"] = base_sizes(interface, batch=len(names) + 3, query_len=1)
    for suffix, sizes in sizes_by_suffix.items():
        for kind, value in (("nan", np.nan), ("inf", np.inf)) if names else ():
            drawn = draw_base(interface, sizes)
            if drawn.traits.in_place:
                drawn.inputs["past_length"][...] = sizes["past_len"]
            rows = [*_fill_elements(drawn, names, value)]
            about = f"{value} in rows of the batch"
            yield _non_finite_case(f"{kind}_in_rows{suffix}", drawn, about, rows)
        drawn = draw_base(interface, base_sizes(interface, **{**sizes, "batch": 3}))
        first_keys = list(_hide_first_key(drawn))
        if first_keys:
            for array in first_keys:
                array[...] = np.inf
            about = "Inf in a key that is masked"
            yield _non_finite_case(f"inf_in_masked_key{suffix}", drawn, about, [NON_FINITE])


def _fill_elements(drawn: DrawnCase, names: Sequence[str], value: float) -> Iterator[int]:
    """Fill all inputs of one batch element, and one number of each input in others.

    Yield the indices of these batch elements.
    """
    for name in names:
        drawn.inputs[name][NON_FINITE] = value
    yield NON_FINITE
    for row, name in enumerate(names, NON_FINITE + 1):
        if row < drawn.sizes["batch"] - 1 and drawn.inputs[name][row].size:
            drawn.inputs[name][row].reshape(-1)[0] = value
            yield row


def _non_finite_case(name: str, drawn: DrawnCase, about: str, rows: Sequence[int]) -> Case:
    return Case(
        name, "probe", drawn.sizes, drawn.inputs, f"{about}: the others stay as they are",
        ignored_rows=tuple(rows),
    )  # fmt: skip


def _hide_first_key(drawn: DrawnCase) -> Iterator[np.ndarray]:
    """Mask key 0, and yield the slices of the inputs that it is computed from in one element."""
    inputs: ArrayDict = drawn.inputs
    if not drawn.traits.is_attention or "attn_mask" not in inputs:
        return
    mask = inputs["attn_mask"]
    mask[..., 0] = False if mask.dtype == np.bool_ else -np.inf
    if drawn.traits.in_place:
        inputs["past_length"][...] = drawn.sizes["past_len"]
    if "past_key" in inputs:
        for name in ("past_key", "past_value"):
            if is_floating(inputs[name].dtype):  # integers have no Inf
                yield inputs[name][NON_FINITE, :, 0]
    elif "key" in inputs:
        yield inputs["key"][NON_FINITE, 0]
        yield inputs["value"][NON_FINITE, 0]
    elif inputs["query"].shape[1] > 1:
        yield inputs["query"][NON_FINITE, 0]


# -- the long cases, and positions far away -------------------------------------------------------

LONG_BYTES = 8 * 2**20
"""Largest size of each long case in bytes: a quarter of all."""


def long_cases(interface: Interface) -> tuple[list[Case], list[str]]:
    """Return the long cases of a layer of ours, and notes on those that would be too large."""
    cases, notes = [], []
    if interface.traits.is_attention:
        for choose in (_distant_case, _decode_case):
            case, note = choose(interface)
            cases += [case] if case else []
            notes += [note] if note else []
        cases += _far_positions(interface)
    return cases, notes


TOKENS = (300, 200, 100)
"""Numbers of tokens to decode, tried in turn: the first that fits is used."""


def _decode_case(interface: Interface) -> tuple[Case | None, str]:
    """Return the longest decode within the size limit, and a note if it would be too large.

    For the module it is one sequence: without a past, whose keys fill the buffers, or after a
    state. There is no such
    case if a decode step by step differs from a run of the whole sequence.
    """
    if not interface.traits.decodes:
        return None, ""
    for tokens in TOKENS:
        past = {"past_len": 0} if interface.traits.in_place else {}
        sizes = add_sums({"batch": 2, "query_len": tokens, **past}, interface.sums)
        if interface.case_bytes(sizes) <= LONG_BYTES:
            name = f"{WHOLE_DECODE}_{tokens}"
            drawn = draw_inputs(interface.inputs, sizes, seed_words=(WHOLE_DECODE, name))
            kept = "buffers that grow" if interface.traits.in_place else "one state"
            about = f"prompt, tokens and chunks, in {kept}"
            return Case(name, WHOLE_DECODE, sizes, drawn, about), ""
    return None, (
        f"no case decodes step by step: at these dimensions {TOKENS[-1]} tokens would take more "
        f"than {LONG_BYTES >> 20} MiB"
    )


def _distant_case(interface: Interface) -> tuple[Case | None, str]:
    """Return the case with the most distant keys, and a note if they are not distant enough."""
    thresholds = interface.traits.thresholds
    for distance, threshold in sorted(thresholds.items(), reverse=True):
        # Two queries after a long past, or many queries without a past.
        lengths = {"query_len": 2, "past_len": distance + 2}
        lengths = lengths if interface.traits.has_cache else {"query_len": distance + 4}
        sizes = add_sums({"batch": 1, **lengths}, interface.sums)
        if interface.case_bytes(sizes) <= (threshold.most_bytes or LONG_BYTES):
            drawn = _draw_visible(interface, sizes, "far_keys")
            case = Case("far_keys", "probe", sizes, drawn, f"keys more than {distance} away")
            return case, _note(thresholds, distance)
    return None, _note(thresholds, 0)


def _note(thresholds: Mapping[int, Threshold], reached: int) -> str:
    missed = [
        (distance, threshold.about)
        for distance, threshold in thresholds.items()
        if distance > reached and threshold.about
    ]
    if not missed:
        return ""
    shown = " nor ".join(f"{about}, {distance} keys away" for distance, about in sorted(missed))
    return f"no case reaches {shown}: at these dimensions it would be too large"


def _draw_visible(interface: Interface, sizes: Sizes, name: str) -> ArrayDict:
    """Return random inputs of a case in which all of the past is in use and no key is masked."""
    drawn = draw_inputs(interface.inputs, sizes, seed_words=("probe", name))
    if "attn_mask" in drawn:
        drawn["attn_mask"][...] = True if drawn["attn_mask"].dtype == np.bool_ else 0.0
    if "past_length" in drawn:
        drawn["past_length"][...] = sizes["past_len"]
    return drawn


_FAR_BYTES = 6 * 2**20
"""Largest size in bytes of a call of `blocks.FAR_CALLS`."""


def far_calls(interface: Interface, budget: int) -> tuple[list[Case], list[str]]:
    """Return calls after long pasts in a layer of ours, and a note on those that do not fit."""
    cases: list[Case] = []
    missed: list[str] = []
    if not interface.traits.has_cache:
        return [], []
    for past, queries in blocks.FAR_CALLS:
        batch = 1 if queries == 1 else 2
        sizes = add_sums({"batch": batch, "query_len": queries, "past_len": past}, interface.sums)
        cost = interface.case_bytes(sizes)
        if cost > min(budget, _FAR_BYTES):
            missed.append(f"{queries} after {past}")
            continue
        budget -= cost
        name = f"far_past_{past}" if queries == 1 else f"far_past_{past}_L{queries}"
        drawn = _draw_visible(interface, sizes, name)
        cases.append(Case(name, "probe", sizes, drawn, f"queries after {past} keys: {queries}"))
    note = (
        f"no case has these queries after long pasts, which would be too large: {first_few(missed)}"
    )
    return cases, [note] if missed else []


_FAR_POSITIONS = tuple(block + step for block in (2048, 4096, 8192, 16384) for step in (-1, 0, 1))
"""Position ids beyond those of most tables, at blocks and beside them."""


def _far_positions(interface: Interface) -> Iterator[Case]:
    """Yield cases with `_FAR_POSITIONS`: one row with all, and, after a past, one row for each."""
    count = len(_FAR_POSITIONS)
    forms = {"far_positions": (1, count), "far_positions_one_query": (count, 1)}
    has_cache = interface.traits.has_cache
    for name, (B, L) in forms.items() if "position_ids" in interface.inputs else ():
        if L > 1 or has_cache:  # without a past, a single key has a weight of 1 anywhere
            sizes = {"batch": B, "query_len": L, **({"past_len": 2} if has_cache else {})}
            sizes = add_sums(sizes, interface.sums)
            drawn = _draw_visible(interface, sizes, name)
            drawn["position_ids"][...] = np.reshape(_FAR_POSITIONS, (B, L))
            about = f"positions {_FAR_POSITIONS[0]} to {_FAR_POSITIONS[-1]}"
            yield Case(name, "probe", sizes, drawn, about)
