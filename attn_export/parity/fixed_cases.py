"""Cases of fixed sizes: each input matters, and what is not finite stays in its row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from attn_export.errors import UsageError
from attn_export.parity.contents import Content, Drawn
from attn_export.parity.draw import (
    Bounds,
    FunctionInputs,
    Limit,
    Sizes,
    axis_names,
    draw_inputs,
    generator,
    into_bounds,
    limits,
    with_sums,
)
from attn_export.results import BASE, CHANGED, Case
from attn_export.spec import AttentionSpec, Input, Shape
from attn_export.spec.low_precision import PER_RUN
from attn_export.tensorfile import ArrayDict, is_floating

PROBE_SIZES: Sizes = {
    "batch": 2, "query_len": 3, "past_len": 2, "total_len": 5, "key_len": 4,
}  # fmt: skip
"""B 2, L 3, P 2, so S 5 (4 in cross-attention): small, so that large models can keep all probes."""


DRAWS = 8
"""The number of times that a function may draw an input as it was."""

SPOILT = 1
"""The row of the batch that is not finite in cases with `ignored_rows`."""


@dataclasses.dataclass(frozen=True)
class _Made:
    """Maker of the cases of one subject."""

    inputs: Mapping[str, Input]
    spec: AttentionSpec | None
    sums: Mapping[str, str]
    bounds: Bounds

    def sizes(self, **changed: int) -> dict[str, int]:
        names = axis_names(self.inputs, self.sums)
        sizes = {name: PROBE_SIZES.get(name, 3) for name in names} | changed
        return with_sums(into_bounds(sizes, self.bounds), self.sums)

    def drawn(self, sizes: Sizes) -> Drawn:
        """Return the inputs of the base case; those of other sizes are drawn alike."""
        inputs = draw_inputs(self.inputs, sizes, seed_words=("probe", BASE))
        return Drawn(inputs, self.inputs, self.spec, sizes, generator("probe", BASE))


def fixed_cases(
    inputs: Mapping[str, Input],
    output_shapes: Mapping[str, Shape],
    spec: AttentionSpec | None,
    sums: Mapping[str, str],
    bounds: Bounds | None = None,
) -> list[Case]:
    """Return the base case, one for each input that changes it alone, and spoilt rows.

    Args:
        inputs: Every input by name.
        output_shapes: The shape of every output.
        spec: The spec of the module, if it is ours.
        sums: Sizes that others add up to.
        bounds: The bounds of axes that have any.
    """
    made = _Made(inputs, spec, sums, bounds or {})
    found = [_base(made), *_changed(made)]
    batch_first = all("batch" not in shape[1:] for shape in output_shapes.values())
    # One scale for all rows takes what is not finite to all of them.
    apart = spec is None or spec.activations != PER_RUN
    if "batch" in axis_names(inputs, sums) and batch_first and apart:
        found += _spoilt(made)
    return found


def content_case(
    content: Content,
    inputs: Mapping[str, Input],
    spec: AttentionSpec | None,
    sums: Mapping[str, str],
) -> Case:
    """Return the base case with other contents.

    Args:
        content: The contents.
        inputs: Every input by name.
        spec: The spec, if the module is ours.
        sums: Sizes that others add up to.
    """
    made = _Made(inputs, spec, sums, {})
    drawn = made.drawn(made.sizes())
    content.change(drawn)
    return Case(content.name, "probe", drawn.sizes, drawn.inputs, content.about)


def _base(made: _Made) -> Case:
    drawn = made.drawn(made.sizes())
    return Case(BASE, "probe", drawn.sizes, drawn.inputs, "what the changed_* cases differ from")


def _changed(made: _Made) -> Iterator[Case]:
    sizes = made.sizes()
    others = draw_inputs(made.inputs, sizes, seed_words=("probe", "changed"))
    for name, wanted in made.inputs.items():
        drawn = made.drawn(sizes)
        if isinstance(made.inputs, FunctionInputs):
            drawn.inputs[name] = _drawn_again(made.inputs, sizes, name, drawn.inputs[name])
        elif name == "attn_mask":
            _change_mask(drawn)
        else:
            span = limits(wanted, sizes)
            drawn.inputs[name] = _other_than(drawn.inputs[name], others[name], *span)
        yield Case(f"{CHANGED}{name}", "probe", sizes, drawn.inputs, f"{name} matters")


def _drawn_again(inputs: FunctionInputs, sizes: Sizes, name: str, array: np.ndarray) -> np.ndarray:
    """Return an input that a function draws otherwise than before."""
    for number in range(DRAWS):
        other = draw_inputs(inputs, sizes, seed_words=("probe", "changed", number))[name]
        if not np.array_equal(other, array):
            return other
    raise UsageError(
        f"inputs(sizes, rng) draws {name} alike {DRAWS} times, so no case could show a mistake "
        "with it; vary it with rng, or compute it in the module"
    )


def _change_mask(drawn: Drawn) -> None:
    # Small masks can be drawn alike twice. The second query's own key is seen even where
    # windows end at once, and by more than one query where they do not.
    key = drawn.inputs["attn_mask"][..., _own_key(drawn)]
    key[...] = ~key if key.dtype == np.bool_ else np.where(np.isfinite(key), -np.inf, 0.0)


def _own_key(drawn: Drawn) -> int:
    """Return the key of the second query of row 0, where the queries are the last of the keys."""
    inputs = drawn.inputs
    if drawn.in_place:
        return int(inputs["past_length"][0]) + 1
    S: int = inputs["attn_mask"].shape[-1]
    L: int = inputs["query"].shape[1] if "query" in inputs else S
    return max(min(S - L + 1, S - 1), 0)


def _other_than(array: np.ndarray, other: np.ndarray, low: Limit, high: Limit) -> np.ndarray:
    """Return `other`, changed where it is `array` again."""
    if not np.array_equal(other, array):
        return other
    if other.dtype == np.bool_:
        return ~other
    if np.issubdtype(other.dtype, np.integer):
        return np.asarray(((other - low + 1) % (high - low + 1) + low).astype(other.dtype))
    return other


# -- what is not finite --------------------------------------------------------------------------


def _spoilt(made: _Made) -> Iterator[Case]:
    """Yield cases in which one row of the batch is not finite: it must not reach the others.

    Outputs of that row itself are not compared. Runtimes differ in it, and so do dialects:
    0 · NaN is NaN, but a kernel may leave out what is hidden.
    """
    several = made.sizes(batch=3)
    forms = {"": several}
    if several.get("query_len", 1) > 1:
        forms["_one_query"] = made.sizes(batch=3, query_len=1)
    for form, sizes in forms.items():
        drawn = made.drawn(sizes)
        rows = [name for name in drawn.values() if _has_rows(made.inputs[name])]
        if rows:
            for name in rows:
                drawn.inputs[name][SPOILT] = np.nan
            yield _spoilt_case(f"nan_in_one_row{form}", drawn, "NaN in one row of the batch")
        drawn = made.drawn(sizes)
        keys = list(_hide_first_key(drawn))
        if keys:
            for array in keys:
                array[...] = np.inf
            yield _spoilt_case(f"inf_in_masked_key{form}", drawn, "Inf in a key that is masked")


def _spoilt_case(name: str, drawn: Drawn, about: str) -> Case:
    return Case(
        name, "probe", drawn.sizes, drawn.inputs, f"{about}: the others stay as they are",
        ignored_rows=(SPOILT,),
    )  # fmt: skip


def _has_rows(wanted: Input) -> bool:
    return bool(wanted.shape) and wanted.shape[0] == "batch"


def _hide_first_key(drawn: Drawn) -> Iterator[np.ndarray]:
    """Mask key 0, and yield the parts of the inputs that form it in one row."""
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
                yield inputs[name][SPOILT, :, 0]
    elif "key" in inputs:
        yield inputs["key"][SPOILT, 0]
        yield inputs["value"][SPOILT, 0]
    elif inputs["query"].shape[1] > 1:
        yield inputs["query"][SPOILT, 0]
