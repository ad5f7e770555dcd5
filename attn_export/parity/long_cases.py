"""The two long cases: a whole decode, and keys at distant positions."""

from __future__ import annotations

import math
from collections.abc import Mapping

from attn_export.parity.draw import Interface, Sizes, add_sums, concrete_shape, draw_inputs
from attn_export.results import WHOLE_DECODE, Case
from attn_export.spec import AttentionSpec, Input
from attn_export.tensorfile import is_floating, numpy_dtype

LONG_BYTES = 8 * 2**20
"""Largest size of each long case in bytes: a quarter of all."""

# -- the one case that is a whole decode --------------------------------------------------------

TOKENS = (300, 200, 100)
"""Numbers of tokens to decode, tried in turn: the first that fits is used."""


def decode_case(interface: Interface, spec: AttentionSpec) -> tuple[Case | None, str]:
    """Return the longest decode within the size limit, and a note if there is none.

    For the module it is one sequence without a past, whose keys fill the buffers.

    Args:
        interface: The inputs and outputs of the module.
        spec: The spec of the module.

    Returns:
        The case and an empty note. The case is None if it would be too large, which the note says,
        or if a decode step by step differs from a run of the whole sequence.
    """
    # Without a causal mask, tokens would see later tokens, which a decode does not have yet. Some
    # rotary scalings depend on the length at the time of a key. Quantised activations may have a
    # scale for each step.
    if not (spec.in_place and spec.causal) or spec.depends_on_steps:
        return None, ""
    for tokens in TOKENS:
        sizes = add_sums({"batch": 2, "query_len": tokens, "past_len": 0}, interface.sums)
        if case_bytes(sizes, interface) <= LONG_BYTES:
            return _decode(interface.inputs, sizes), ""
    return None, (
        f"no case decodes step by step: at these dimensions {TOKENS[-1]} tokens would take more "
        f"than {LONG_BYTES >> 20} MiB"
    )


def _decode(inputs: Mapping[str, Input], sizes: Sizes) -> Case:
    name = f"{WHOLE_DECODE}_{sizes['query_len']}"
    drawn = draw_inputs(inputs, sizes, seed_words=(WHOLE_DECODE, name))
    return Case(name, WHOLE_DECODE, sizes, drawn, "prompt, tokens and chunks, in buffers that grow")


# -- the one case with distant keys -------------------------------------------------------------

GROWN_BYTES = 24 * 2**20
"""Largest size in bytes if rotary frequencies change with the length, which no other case shows."""

POSITIONS = ((2050, 2 * 2**20), (258, 4 * 2**20))
"""Distances to reach for rotary positions alone, each with the largest size of the case in bytes.
float16 counts exactly up to 2048, and bfloat16 and bytes up to 256."""


def distant_case(interface: Interface, spec: AttentionSpec) -> tuple[Case | None, str]:
    """Return the case with the most distant keys, and a note if they are not distant enough.

    Args:
        interface: The inputs and outputs of the module.
        spec: The spec of the module.

    Returns:
        The case, or None if no distance matters or each takes too much space; and the note.
    """
    thresholds = _thresholds(spec)
    budgets = {
        distance: GROWN_BYTES if about == GROWS else LONG_BYTES
        for distance, about in thresholds.items()
    }
    if spec.has_rotary and spec.has_cache and not spec.position_ids:
        for distance, budget in POSITIONS:
            budgets.setdefault(distance, budget)
    for distance in sorted(budgets, reverse=True):
        sizes = _sizes(spec, interface.sums, distance)
        if case_bytes(sizes, interface) <= budgets[distance]:
            case = _distant_keys(interface.inputs, spec, sizes, distance)
            return case, _note(thresholds, distance)
    return None, _note(thresholds, 0)


GROWS = "the change of the rotary frequencies"


def _thresholds(spec: AttentionSpec) -> dict[int, str]:
    """Return the distances from query to key at which the computation changes, with the reason."""
    thresholds = {
        spec.window_left or 0: "the end of the window",
        spec.window_right or 0: "the end of the window",
    }
    if spec.relative_buckets:
        thresholds[spec.relative_max_distance] = "the last of the relative positions"
    if spec.turns_by_length and not spec.position_ids:
        thresholds[spec.rotary_original_len] = GROWS
    return {distance: about for distance, about in thresholds.items() if distance}


def _note(thresholds: Mapping[int, str], reached: int) -> str:
    missed = [(distance, about) for distance, about in thresholds.items() if distance > reached]
    if not missed:
        return ""
    shown = " nor ".join(f"{about}, {distance} keys away" for distance, about in sorted(missed))
    return f"no case reaches {shown}: at these dimensions it would be too large"


def _sizes(spec: AttentionSpec, sums: Mapping[str, str], distance: int) -> Sizes:
    """Return sizes with batch 1: two queries after a long past, or many queries without a past."""
    if not spec.has_cache:
        return add_sums({"batch": 1, "query_len": distance + 4}, sums)
    return add_sums({"batch": 1, "query_len": 2, "past_len": distance + 2}, sums)


def _distant_keys(
    inputs: Mapping[str, Input], spec: AttentionSpec, sizes: Sizes, distance: int
) -> Case:
    """Return a case with keys farther away than a distance, none of them masked."""
    drawn = draw_inputs(inputs, sizes, seed_words=("probe", "far_keys"))
    if spec.mask:
        drawn["attn_mask"][...] = True if spec.mask.dtype == "bool" else 0.0
    if spec.in_place:
        drawn["past_length"][...] = sizes["past_len"]
    return Case("far_keys", "probe", sizes, drawn, f"keys more than {distance} away")


def case_bytes(sizes: Sizes, interface: Interface) -> int:
    """Return the size of a case on disk: its inputs, and its outputs twice (truth and eager).

    Args:
        sizes: The sizes of the dynamic axes.
        interface: The inputs and outputs of the subject.
    """
    dtypes = {name: numpy_dtype(input_.dtype) for name, input_ in interface.inputs.items()}
    # The element size of outputs is that of the widest floating input.
    floating = [dtype.itemsize for dtype in dtypes.values() if is_floating(dtype)]
    itemsize = max(floating or [dtype.itemsize for dtype in dtypes.values()])
    input_bytes = sum(
        dtypes[name].itemsize * math.prod(concrete_shape(input_.shape, sizes))
        for name, input_ in interface.inputs.items()
    )
    # An axis of unknown size ("") counts as the longest one.
    known = {**sizes, "": max(sizes.values(), default=1)}
    shapes = interface.output_shapes.values()
    output_elements = sum(math.prod(concrete_shape(shape, known)) for shape in shapes)
    return input_bytes + 2 * itemsize * output_elements
