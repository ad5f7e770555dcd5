"""Semantic probes: cases that show what a runtime means by attention.

Each is the same small base case with some inputs changed. Which probes there are depends on
what the spec has: without a mask there is no row to mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from attn_export.cases.draw import Arrays as Inputs
from attn_export.cases.draw import draw_inputs, highest, scaled
from attn_export.cases.in_place import FAR_APART, empty_and_full, keys_of_rows, loud_rest
from attn_export.cases.sizes import Sizes, axis_names, with_sums
from attn_export.nouns import Case
from attn_export.spec import AttentionSpec, Input, MaskSpec
from attn_export.tensorfile import lowest_number

PROBE_SIZES: Sizes = {
    "batch": 2, "query_len": 3, "past_len": 2, "total_len": 5, "key_len": 4,
}  # fmt: skip
"""B 2, L 3, P 2, so S 5 (4 in cross-attention): small, so that large models can keep all probes."""

BASE = "base"
CHANGED = "changed_"
"""The case that differs from `BASE` in one input is named after that input."""

SHARP, LARGE, SMALL = 3.0, 14.0, 0.02

LOUD = frozenset({"large_logits", "causal_future", "kv_head_blocks"})
"""Probes with large inputs, which some modules take only in part."""

PADDING = np.array([2, 1])
"""How many keys of each row of the batch are padding, in the cases with some."""

Change = Callable[[Inputs], None]


@dataclasses.dataclass(frozen=True)
class _Probe:
    name: str
    about: str
    change: Change
    sizes: Sizes = dataclasses.field(default_factory=dict)
    """Those that are not `PROBE_SIZES`."""


def probe_cases(
    inputs: Mapping[str, Input],
    spec: AttentionSpec | None,
    sums: Mapping[str, str],
) -> list[Case]:
    """The probes that apply.

    Args:
        inputs: Every input by name.
        spec: What the module means, if it is ours; without it only general probes apply.
        sums: Sizes that others add up to.
    """
    names = axis_names(inputs, sums)
    small: Sizes = {name: PROBE_SIZES.get(name, 3) for name in names}
    cases = []
    for probe in _probes(inputs, with_sums(small, sums), spec):
        sizes = with_sums({**small, **probe.sizes}, sums)
        drawn = draw_inputs(inputs, sizes, seed_words=("probe", BASE))
        probe.change(drawn)
        loud = probe.name in LOUD
        cases.append(Case(probe.name, "probe", sizes, drawn, probe.about, loud))
    return cases


def _probes(
    inputs: Mapping[str, Input], sizes: Sizes, spec: AttentionSpec | None
) -> Iterator[_Probe]:
    yield _Probe(BASE, "what the changed_* cases are compared with", lambda _: None)
    in_place = spec is not None and spec.in_place
    others = draw_inputs(inputs, sizes, seed_words=("probe", "changed"))
    for name, wanted in inputs.items():
        yield _Probe(
            f"{CHANGED}{name}",
            f"{name} matters to the outputs",
            _mask_changed(in_place=in_place)
            if name == "attn_mask"
            else _redrawn(name, others[name], wanted.low, highest(wanted, sizes)),
        )
    yield _Probe(
        "large_logits", f"inputs times {LARGE:g}: softmax close to one-hot", _scaled(LARGE)
    )
    yield _Probe(
        "small_inputs", f"inputs times {SMALL:g}: softmax close to uniform", _scaled(SMALL)
    )
    if spec is None:
        return
    if spec.q_per_kv > 1:
        yield _Probe("kv_head_blocks", "query head h uses K/V head h // q_per_kv", _scaled(SHARP))
    if spec.causal:
        yield _Probe("causal_future", "keys after the query's own are hidden", _loud_future)
    if spec.mask:
        yield from _mask_probes(spec.mask, in_place=in_place)
    if in_place:
        yield _Probe("beyond_length", "what a row does not hold is never seen", loud_rest)
        yield _Probe(
            "empty_and_full",
            "rows of a batch have lengths of their own",
            empty_and_full,
            {"past_len": FAR_APART},
        )


def _mask_probes(mask: MaskSpec, *, in_place: bool) -> Iterator[_Probe]:
    first = tuple(0 if axis in "BHL" else slice(None) for axis in mask.axes)
    masked = False if mask.dtype == "bool" else -np.inf
    visible = True if mask.dtype == "bool" else 0.0

    def fully_masked(inputs: Inputs) -> None:
        inputs["attn_mask"][first] = masked

    def one_visible(inputs: Inputs) -> None:
        inputs["attn_mask"][...] = masked
        inputs["attn_mask"][..., 0] = visible

    def padded(*, left: bool) -> Change:
        def change(inputs: Inputs) -> None:
            inputs["attn_mask"][...] = visible
            keys = keys_of_rows(inputs, in_place=in_place)
            for row, padding in enumerate(PADDING):
                end = keys[row]
                side = slice(None, padding) if left else slice(end - padding, end)
                inputs["attn_mask"][row, ..., side] = masked
            if "position_ids" in inputs and left:
                L = inputs["query"].shape[1]
                # Each row counts from the end of its padding.
                first = (keys - L - PADDING)[:, None]
                inputs["position_ids"][...] = np.maximum(first + np.arange(L), 0)

        return change

    def lowest(inputs: Inputs) -> None:
        values = inputs["attn_mask"]
        # A row of nothing but float16's lowest has no bits left for its scores.
        keys = slice(1, None) if values.dtype == np.float16 else slice(None)
        values[first][..., keys] = lowest_number(values.dtype)

    yield _Probe("fully_masked_rows", "a row with nothing to attend to gives 0", fully_masked)
    yield _Probe("one_visible_key", "a row with one key gives its value", one_visible)
    if mask.axes[0] == "B" and len(mask.axes) == 4:
        yield _Probe("left_padding", "rows of a batch start late", padded(left=True))
        yield _Probe("right_padding", "rows of a batch end early", padded(left=False))
    if mask.dtype == "float":
        yield _Probe("lowest_float", "finfo.min is a low score, not a masked key", lowest)


def _own_key(inputs: Inputs, *, in_place: bool) -> int:
    """The key of the second query of row 0, where the queries are the last of the keys."""
    S: int = inputs["attn_mask"].shape[-1]
    if in_place:
        return int(inputs["past_length"][0]) + 1
    L: int = inputs["query"].shape[1] if "query" in inputs else S
    return max(min(S - L + 1, S - 1), 0)


def _mask_changed(*, in_place: bool) -> Change:
    def change(inputs: Inputs) -> None:
        # Small masks can be drawn alike twice. The second query's own key is seen even where
        # windows end at once, and by more than one query where they do not.
        key = inputs["attn_mask"][..., _own_key(inputs, in_place=in_place)]
        key[...] = ~key if key.dtype == np.bool_ else np.where(np.isfinite(key), -np.inf, 0.0)

    return change


def _redrawn(name: str, other: np.ndarray, low: int, high: int) -> Change:
    def change(inputs: Inputs) -> None:
        if other.dtype == np.bool_ and np.array_equal(other, inputs[name]):
            inputs[name] = ~other
        elif np.issubdtype(other.dtype, np.integer) and np.array_equal(other, inputs[name]):
            inputs[name] = ((other - low + 1) % (high - low + 1) + low).astype(other.dtype)
        else:
            inputs[name] = other

    return change


def _scaled(factor: float) -> Change:
    def change(inputs: Inputs) -> None:
        inputs |= scaled(inputs, factor)

    return change


def _loud_future(inputs: Inputs) -> None:
    """Make the last tokens so loud that one who looks at them early is seen to do so."""
    inputs["query"][:, 1:] *= LARGE
