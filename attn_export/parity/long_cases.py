"""The two long cases: a whole decode, and keys at distant positions."""

from __future__ import annotations

import math
from collections.abc import Mapping

from attn_export.parity.draw import Sizes, concrete, draw_inputs, with_sums
from attn_export.results import DECODE, Case
from attn_export.spec import AttentionSpec, Input, Shape
from attn_export.tensorfile import is_floating, numpy_dtype

# -- the one case that is a whole decode --------------------------------------------------------

DECODE_BYTES = 8 * 2**20
"""Largest size of the case in bytes: a quarter of all."""

TOKENS = (300, 200, 100)
"""Numbers of tokens to decode, tried in turn: the first that fits is used."""


def decode_case(
    inputs: Mapping[str, Input],
    output_shapes: Mapping[str, Shape],
    spec: AttentionSpec,
    sums: Mapping[str, str],
) -> tuple[Case | None, str]:
    """Return the longest decode within the size limit, and a note if there is none.

    To the module it is one sequence without a past, in buffers that it fills.

    Args:
        inputs: Every input by name.
        output_shapes: The shape of every output.
        spec: Whether a decode in pieces means what the whole means.
        sums: Sizes that others add up to.
    """
    # Without causal, tokens see those that are not there yet in a decode; some scalings turn
    # keys by the length at which they came; quantised activations have a scale for each step.
    if not (spec.in_place and spec.causal) or spec.depends_on_steps:
        return None, ""
    for tokens in TOKENS:
        sizes = with_sums({"batch": 2, "query_len": tokens, "past_len": 0}, sums)
        if case_bytes(sizes, inputs, output_shapes) <= DECODE_BYTES:
            return _decode(inputs, sizes), ""
    return None, (
        f"no case decodes step by step: at these dimensions {TOKENS[-1]} tokens would take more "
        f"than {DECODE_BYTES >> 20} MiB"
    )


def _decode(inputs: Mapping[str, Input], sizes: Sizes) -> Case:
    name = f"{DECODE}_{sizes['query_len']}"
    drawn = draw_inputs(inputs, sizes, seed_words=(DECODE, name))
    return Case(name, DECODE, sizes, drawn, "prompt, tokens and chunks, in buffers that grow")


# -- the one case with far keys -----------------------------------------------------------------

FAR_BYTES = 8 * 2**20
"""Largest size of the case in bytes."""

GROWN_BYTES = 24 * 2**20
"""Largest size where frequencies change with the length: no other case would show that."""

POSITIONS = ((2050, 2 * 2**20), (258, 4 * 2**20))
"""Largest rotary positions where nothing else requires larger ones, and the bytes allowed:
beyond what float16 and bfloat16 can count to, or bytes and short tables."""


def distant_case(
    inputs: Mapping[str, Input],
    output_shapes: Mapping[str, Shape],
    spec: AttentionSpec,
    sums: Mapping[str, str],
) -> tuple[Case | None, str]:
    """Return the case of the largest possible reach, and a note if that is not far enough.

    Args:
        inputs: Every input by name.
        output_shapes: The shape of every output.
        spec: Its windows, buckets and positions are reached.
        sums: Sizes that others add up to.
    """
    ends = _ends(spec)
    wanted = {end: GROWN_BYTES if what == GROWS else FAR_BYTES for end, what in ends.items()}
    if spec.has_rotary and spec.has_cache and not spec.position_ids:
        for reach, budget in POSITIONS:
            wanted.setdefault(reach, budget)
    for reach in sorted(wanted, reverse=True):
        sizes = _sizes(spec, sums, reach)
        if case_bytes(sizes, inputs, output_shapes) <= wanted[reach]:
            return _distant_keys(inputs, spec, sizes, reach), _note(ends, reach)
    return None, _note(ends, 0)


GROWS = "the change of the rotary frequencies"


def _ends(spec: AttentionSpec) -> dict[int, str]:
    """Return the distances in keys at which something changes, with its description."""
    ends = {
        spec.window_left or 0: "the end of the window",
        spec.window_right or 0: "the end of the window",
    }
    if spec.relative_buckets:
        ends[spec.relative_max_distance] = "the last of the relative positions"
    if spec.turns_by_length and not spec.position_ids:
        ends[spec.rotary_original_len] = GROWS
    return {end: what for end, what in ends.items() if end}


def _note(ends: Mapping[int, str], reached: int) -> str:
    missed = {end: what for end, what in ends.items() if end > reached}
    if not missed:
        return ""
    shown = " nor ".join(f"{what}, {end} keys away" for end, what in sorted(missed.items()))
    return f"no case reaches {shown}: at these dimensions it would be too large"


def _sizes(spec: AttentionSpec, sums: Mapping[str, str], reach: int) -> Sizes:
    """Return sizes of one row; two queries after a long past, or many queries without a past."""
    past = reach + 2 if spec.has_cache else 0
    if not past:
        return with_sums({"batch": 1, "query_len": reach + 4}, sums)
    return with_sums({"batch": 1, "query_len": 2, "past_len": past}, sums)


def _distant_keys(
    inputs: Mapping[str, Input], spec: AttentionSpec, sizes: Sizes, reach: int
) -> Case:
    """Return a case whose queries have keys beyond a reach, none of them masked."""
    drawn = draw_inputs(inputs, sizes, seed_words=("probe", "far_keys"))
    if spec.mask:
        drawn["attn_mask"][...] = True if spec.mask.dtype == "bool" else 0.0
    if spec.in_place:
        drawn["past_length"][...] = sizes["past_len"]
    return Case("far_keys", "probe", sizes, drawn, f"keys more than {reach} away")


def case_bytes(
    sizes: Sizes,
    inputs: Mapping[str, Input],
    output_shapes: Mapping[str, Shape],
) -> int:
    """Return the size of a case on disk: its inputs, and its outputs twice (truth and eager).

    Args:
        sizes: The sizes of the dynamic axes.
        inputs: Every input by name.
        output_shapes: The shape of every output.
    """
    widths = {name: numpy_dtype(wanted.dtype).itemsize for name, wanted in inputs.items()}
    # Outputs are as wide as what they are computed from; integers and masks are not.
    floating = [
        widths[name] for name, wanted in inputs.items() if is_floating(numpy_dtype(wanted.dtype))
    ]
    width = max(floating, default=max(widths.values()))
    taken = sum(
        widths[name] * math.prod(concrete(wanted.shape, sizes)) for name, wanted in inputs.items()
    )
    # An axis of which nothing is known counts as the longest one.
    known = {**sizes, "": max(sizes.values(), default=1)}
    outputs = sum(width * math.prod(concrete(shape, known)) for shape in output_shapes.values())
    return taken + 2 * outputs
