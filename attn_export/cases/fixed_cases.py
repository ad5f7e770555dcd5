"""Cases that are not chosen by the cover: those of fixed sizes, and long ones.

Cases of fixed sizes show that every input matters, and that non-finite values stay in their batch
element. The long cases are a whole decode, keys at distant positions, and decodes after long pasts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from attn_export.cases import blocks
from attn_export.cases.contents import Content, DrawnCase
from attn_export.cases.draw import ANY, Interface, Sizes, add_sums, draw_inputs
from attn_export.cases.influence import base_case, base_sizes, changed_cases, draw_base
from attn_export.errors import first_few
from attn_export.results import WHOLE_DECODE, Case
from attn_export.spec import AttentionSpec, Input
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


def content_case(content: Content, interface: Interface) -> Case:
    """Return the base case with other contents."""
    drawn = draw_base(interface, base_sizes(interface))
    content.change(drawn)
    return Case(content.name, "probe", drawn.sizes, drawn.inputs, content.about)


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
            if drawn.in_place:
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
    if drawn.spec is None or "attn_mask" not in inputs:
        return
    mask = inputs["attn_mask"]
    mask[..., 0] = False if mask.dtype == np.bool_ else -np.inf
    if drawn.in_place:
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
    if interface.spec is not None:
        for choose in (_distant_case, _decode_case):
            case, note = choose(interface, interface.spec)
            cases += [case] if case else []
            notes += [note] if note else []
        cases += _far_positions(interface, interface.spec)
    return cases, notes


TOKENS = (300, 200, 100)
"""Numbers of tokens to decode, tried in turn: the first that fits is used."""


def _decode_case(interface: Interface, spec: AttentionSpec) -> tuple[Case | None, str]:
    """Return the longest decode within the size limit, and a note if it would be too large.

    For the module it is one sequence: without a past, whose keys fill the buffers, or after a
    state. There is no such
    case if a decode step by step differs from a run of the whole sequence.
    """
    # Without a causal mask, tokens would see later tokens, which a decode does not have yet. Some
    # rotary scalings depend on the length at the time of a key.
    if not (spec.has_state or (spec.in_place and spec.causal)) or spec.turns_by_length:
        return None, ""
    for tokens in TOKENS:
        past = {} if spec.has_state else {"past_len": 0}
        sizes = add_sums({"batch": 2, "query_len": tokens, **past}, interface.sums)
        if interface.case_bytes(sizes) <= LONG_BYTES:
            name = f"{WHOLE_DECODE}_{tokens}"
            drawn = draw_inputs(interface.inputs, sizes, seed_words=(WHOLE_DECODE, name))
            kept = "one state" if spec.has_state else "buffers that grow"
            about = f"prompt, tokens and chunks, in {kept}"
            return Case(name, WHOLE_DECODE, sizes, drawn, about), ""
    return None, (
        f"no case decodes step by step: at these dimensions {TOKENS[-1]} tokens would take more "
        f"than {LONG_BYTES >> 20} MiB"
    )


_GROWN_BYTES = 24 * 2**20
"""Largest size in bytes if rotary frequencies change with the length, which no other case shows."""

POSITIONS = ((2050, 2 * 2**20), (258, 4 * 2**20))
"""Distances to reach for rotary positions alone, each with the largest size of the case in bytes.
float16 counts exactly up to 2048, and bfloat16 and bytes up to 256."""

_GROWS = "the change of the rotary frequencies"


def _distant_case(interface: Interface, spec: AttentionSpec) -> tuple[Case | None, str]:
    """Return the case with the most distant keys, and a note if they are not distant enough."""
    thresholds = _thresholds(spec)
    budgets = {
        distance: _GROWN_BYTES if about == _GROWS else LONG_BYTES
        for distance, about in thresholds.items()
    }
    if spec.has_rotary and spec.has_cache and not spec.position_ids:
        for distance, budget in POSITIONS:
            budgets.setdefault(distance, budget)
    for distance in sorted(budgets, reverse=True):
        # Two queries after a long past, or many queries without a past.
        lengths = {"query_len": 2, "past_len": distance + 2}
        lengths = lengths if spec.has_cache else {"query_len": distance + 4}
        sizes = add_sums({"batch": 1, **lengths}, interface.sums)
        if interface.case_bytes(sizes) <= budgets[distance]:
            case = _distant_keys(interface.inputs, spec, sizes, distance)
            return case, _note(thresholds, distance)
    return None, _note(thresholds, 0)


def _thresholds(spec: AttentionSpec) -> dict[int, str]:
    """Return the distances from query to key at which the computation changes, with the reason."""
    thresholds = {
        spec.window_left or 0: "the end of the window",
        spec.window_right or 0: "the end of the window",
    }
    if spec.relative_buckets:
        thresholds[spec.relative_max_distance] = "the last of the relative positions"
    if spec.turns_by_length and not spec.position_ids:
        thresholds[spec.rotary_original_len] = _GROWS
    return {distance: about for distance, about in thresholds.items() if distance}


def _note(thresholds: Mapping[int, str], reached: int) -> str:
    missed = [(distance, about) for distance, about in thresholds.items() if distance > reached]
    if not missed:
        return ""
    shown = " nor ".join(f"{about}, {distance} keys away" for distance, about in sorted(missed))
    return f"no case reaches {shown}: at these dimensions it would be too large"


def _distant_keys(
    inputs: Mapping[str, Input], spec: AttentionSpec, sizes: Sizes, distance: int
) -> Case:
    """Return a case with keys farther away than a distance."""
    drawn = _draw_visible(inputs, spec, sizes, "far_keys")
    return Case("far_keys", "probe", sizes, drawn, f"keys more than {distance} away")


def _draw_visible(
    inputs: Mapping[str, Input], spec: AttentionSpec, sizes: Sizes, name: str
) -> ArrayDict:
    """Return random inputs of a case in which all of the past is in use and no key is masked."""
    drawn = draw_inputs(inputs, sizes, seed_words=("probe", name))
    if spec.mask:
        drawn["attn_mask"][...] = True if spec.mask.dtype == "bool" else 0.0
    if spec.in_place:
        drawn["past_length"][...] = sizes["past_len"]
    return drawn


_FAR_BYTES = 6 * 2**20
"""Largest size in bytes of a call of `blocks.FAR_CALLS`."""


def far_calls(interface: Interface, budget: int) -> tuple[list[Case], list[str]]:
    """Return calls after long pasts in a layer of ours, and a note on those that do not fit."""
    cases: list[Case] = []
    missed: list[str] = []
    spec = interface.spec
    if spec is None or not spec.has_cache:
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
        drawn = _draw_visible(interface.inputs, spec, sizes, name)
        cases.append(Case(name, "probe", sizes, drawn, f"queries after {past} keys: {queries}"))
    note = (
        f"no case has these queries after long pasts, which would be too large: {first_few(missed)}"
    )
    return cases, [note] if missed else []


_FAR_POSITIONS = tuple(block + step for block in (2048, 4096, 8192, 16384) for step in (-1, 0, 1))
"""Position ids beyond those of most tables, at blocks and beside them."""


def _far_positions(interface: Interface, spec: AttentionSpec) -> Iterator[Case]:
    """Yield cases with `_FAR_POSITIONS`: one row with all, and, after a past, one row for each."""
    count = len(_FAR_POSITIONS)
    forms = {"far_positions": (1, count), "far_positions_one_query": (count, 1)}
    for name, (B, L) in forms.items() if spec.position_ids else ():
        if L > 1 or spec.has_cache:  # without a past, a single key has a weight of 1 anywhere
            sizes = {"batch": B, "query_len": L, **({"past_len": 2} if spec.has_cache else {})}
            sizes = add_sums(sizes, interface.sums)
            drawn = _draw_visible(interface.inputs, spec, sizes, name)
            drawn["position_ids"][...] = np.reshape(_FAR_POSITIONS, (B, L))
            about = f"positions {_FAR_POSITIONS[0]} to {_FAR_POSITIONS[-1]}"
            yield Case(name, "probe", sizes, drawn, about)
