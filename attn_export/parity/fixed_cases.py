"""Cases of fixed sizes: every input matters, and non-finite values stay in their batch element."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attn_export.errors import UsageError
from attn_export.parity.contents import Content, DrawnCase
from attn_export.parity.draw import (
    FunctionInputs,
    Interface,
    Limit,
    Sizes,
    add_sums,
    clamp_sizes,
    draw_inputs,
    generator,
    limits,
)
from attn_export.results import BASE, CHANGED, Case
from attn_export.spec import Input
from attn_export.spec.low_precision import PER_RUN
from attn_export.tensorfile import ArrayDict, is_floating

PROBE_SIZES: Sizes = {
    "batch": 2, "query_len": 3, "past_len": 2, "total_len": 5, "key_len": 4,
}  # fmt: skip
"""B 2, L 3, P 2, so S 5 (4 in cross-attention): small, so that large models can keep all probes."""

DRAWS = 8
"""The number of times that a user's function is called to get another value of an input."""

NON_FINITE = 1
"""The batch element that is not finite in cases with `ignored_rows`."""


def fixed_cases(interface: Interface) -> list[Case]:
    """Return the base case, a case that changes each input alone, and cases with NaN or Inf."""
    cases = [_base(interface), *_changed(interface)]
    batch_first = all("batch" not in shape[1:] for shape in interface.output_shapes.values())
    # One scale for all batch elements spreads NaN and Inf from one to all.
    independent = interface.spec is None or interface.spec.activations != PER_RUN
    if "batch" in interface.axes and batch_first and independent:
        cases += _non_finite_cases(interface)
    return cases


def content_case(content: Content, interface: Interface) -> Case:
    """Return the base case with other contents.

    Args:
        content: The contents.
        interface: The inputs and outputs of the subject.
    """
    drawn = _draw_base(interface, _sizes(interface))
    content.change(drawn)
    return Case(content.name, "probe", drawn.sizes, drawn.inputs, content.about)


def _sizes(interface: Interface, **changed: int) -> dict[str, int]:
    """Return the sizes of the base case, with some of them changed."""
    sizes = {name: PROBE_SIZES.get(name, 3) for name in interface.axes} | changed
    return add_sums(clamp_sizes(sizes, interface.bounds), interface.sums)


def _draw_base(interface: Interface, sizes: Sizes) -> DrawnCase:
    """Return the inputs of the base case at these sizes."""
    inputs = draw_inputs(interface.inputs, sizes, seed_words=("probe", BASE))
    return DrawnCase(inputs, interface.inputs, interface.spec, sizes, generator("probe", BASE))


def _base(interface: Interface) -> Case:
    drawn = _draw_base(interface, _sizes(interface))
    return Case(BASE, "probe", drawn.sizes, drawn.inputs, "what the changed_* cases differ from")


def _changed(interface: Interface) -> Iterator[Case]:
    sizes = _sizes(interface)
    others = draw_inputs(interface.inputs, sizes, seed_words=("probe", "changed"))
    for name, input_ in interface.inputs.items():
        drawn = _draw_base(interface, sizes)
        if isinstance(interface.inputs, FunctionInputs):
            drawn.inputs[name] = _redraw(interface.inputs, sizes, name, drawn.inputs[name])
        elif name == "attn_mask":
            _change_mask(drawn)
        else:
            span = limits(input_, sizes)
            drawn.inputs[name] = _differing(drawn.inputs[name], others[name], *span)
        yield Case(f"{CHANGED}{name}", "probe", sizes, drawn.inputs, f"{name} matters")


def _redraw(inputs: FunctionInputs, sizes: Sizes, name: str, array: np.ndarray) -> np.ndarray:
    """Call the user's function until an input differs from `array`, and return that input."""
    for number in range(DRAWS):
        other = draw_inputs(inputs, sizes, seed_words=("probe", "changed", number))[name]
        if not np.array_equal(other, array):
            return other
    raise UsageError(
        f"inputs(sizes, rng) draws {name} alike {DRAWS} times, so no case could show a mistake "
        "with it; vary it with rng, or compute it in the module"
    )


def _change_mask(drawn: DrawnCase) -> None:
    # A small mask may be drawn equal twice, so one key is flipped instead. The second query's own
    # key is visible even in the shortest window, and in longer ones to other queries as well.
    key = drawn.inputs["attn_mask"][..., _own_key(drawn)]
    key[...] = ~key if key.dtype == np.bool_ else np.where(np.isfinite(key), -np.inf, 0.0)


def _own_key(drawn: DrawnCase) -> int:
    """Return the index of the second query's own key in batch element 0; queries come last."""
    inputs = drawn.inputs
    if drawn.in_place:
        return int(inputs["past_length"][0]) + 1
    S: int = inputs["attn_mask"].shape[-1]
    L: int = inputs["query"].shape[1] if "query" in inputs else S
    return max(min(S - L + 1, S - 1), 0)


def _differing(array: np.ndarray, other: np.ndarray, low: Limit, high: Limit) -> np.ndarray:
    """Return `other`, or a change of it if it is equal to `array`."""
    if not np.array_equal(other, array):
        return other
    if other.dtype == np.bool_:
        return ~other
    if np.issubdtype(other.dtype, np.integer):
        return np.asarray(((other - low + 1) % (high - low + 1) + low).astype(other.dtype))
    return other


# -- NaN and Inf in one batch element ------------------------------------------------------------


def _non_finite_cases(interface: Interface) -> Iterator[Case]:
    """Yield cases in which one batch element is not finite: it must not affect the others.

    The outputs of that element are not compared, since runtimes and dialects differ: 0 · NaN is
    NaN, but a kernel may leave out hidden keys.
    """
    several = _sizes(interface, batch=3)
    sizes_by_suffix = {"": several}
    if several.get("query_len", 1) > 1:
        sizes_by_suffix["_one_query"] = _sizes(interface, batch=3, query_len=1)
    for suffix, sizes in sizes_by_suffix.items():
        drawn = _draw_base(interface, sizes)
        names = [name for name in drawn.value_names() if _has_batch(interface.inputs[name])]
        if names:
            for name in names:
                drawn.inputs[name][NON_FINITE] = np.nan
            yield _non_finite_case(f"nan_in_one_row{suffix}", drawn, "NaN in one row of the batch")
        drawn = _draw_base(interface, sizes)
        first_keys = list(_hide_first_key(drawn))
        if first_keys:
            for array in first_keys:
                array[...] = np.inf
            about = "Inf in a key that is masked"
            yield _non_finite_case(f"inf_in_masked_key{suffix}", drawn, about)


def _non_finite_case(name: str, drawn: DrawnCase, about: str) -> Case:
    return Case(
        name, "probe", drawn.sizes, drawn.inputs, f"{about}: the others stay as they are",
        ignored_rows=(NON_FINITE,),
    )  # fmt: skip


def _has_batch(input_: Input) -> bool:
    return input_.shape[:1] == ("batch",)


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
