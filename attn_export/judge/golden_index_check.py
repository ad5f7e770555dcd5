"""Checks that the inputs of stored cases are what the index of the golden vectors says of them.

Anybody can write an index. What it says of a case (its sizes, its contents, the batch elements that
are not compared) is evidence only if the inputs show it. Thresholds are far from what honest inputs
have; `verify --recompute` compares them exactly.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from attn_export.errors import BundleError, one_line
from attn_export.judge.ignored_rows import (
    compared_elements,
    is_finite_array,
    without_last,
    wrongly_ignored,
)
from attn_export.results import BASE, CHANGED, Case, Golden
from attn_export.tensorfile import is_floating

if TYPE_CHECKING:
    from attn_export.schema import InputSignature, Manifest

SCALED = re.compile(r"; inputs times (0\.[0-9]{1,9})\Z")
"""The end of the description of a case whose inputs were scaled down, see `BaseOracle.usable`."""

MANY_ELEMENTS, ENOUGH_ELEMENTS = 64, 16
"""Numbers of random elements: of so many some are hidden, and their root mean square is usual."""

_WIDE = {"float32", "float64", "int64", "bool"}
"""The types of inputs that are not narrower than float32."""

USUAL_RMS = (0.4, 2.5)
"""The root mean square of random inputs, with a margin; it is 1."""


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """The inputs of a stored case of any module: they have any names, and True may hide or show.

    Attributes:
        compared: The ignored batch elements of which rows are compared in each output: all but
            padding, or what is stored of a whole model.
        takes_nan: Whether NaN may be an input like others.
        needed: What cases with two keys must have if there is a mask.
    """

    case: Case
    base: Case
    batch: str
    compared: Set[int] = frozenset()

    takes_nan: ClassVar[bool] = True
    needed: ClassVar[tuple[str, ...]] = ()

    @property
    def in_place(self) -> bool:
        """Whether caches are written in place, after the lengths of pasts."""
        return False

    @property
    def scale(self) -> float:
        """The factor by which the inputs were scaled down."""
        match = SCALED.search(self.case.about)
        return float(match[1]) if match else 1.0

    def masks(self) -> Iterator[np.ndarray]:
        """Yield a mask of the hidden keys for each input that may hide keys."""
        for array in self.case.inputs.values():
            if array.ndim and array.size:
                if array.dtype == np.bool_:
                    yield from (~array, array)
                elif is_floating(array.dtype):
                    yield np.isneginf(array)
                elif ((array == 0) | (array == 1)).all():
                    yield array == 0

    def keys(self) -> int:
        """Return the largest number of keys of a row of a mask."""
        return max((mask.shape[-1] for mask in self.masks()), default=0)

    def values(self) -> list[np.ndarray]:
        """Return the floating inputs that are no masks, in float32, but for unused caches."""
        inputs = {n: x for n, x in self.case.inputs.items() if x.size and is_floating(x.dtype)}
        if not set(self.case.contents).isdisjoint(_LENGTH_LABELS):  # large beyond their length
            inputs = {n: x for n, x in inputs.items() if not n.startswith("past_")}
        return [x.astype(np.float32, copy=False) for n, x in inputs.items() if self._is_value(n)]

    def _is_value(self, name: str) -> bool:
        """Return whether an input has random numbers of the usual size in the base case."""
        array = self.base.inputs[name]
        return array.size >= ENOUGH_ELEMENTS and USUAL_RMS[0] < _rms(array) < USUAL_RMS[1]

    def are_shown(self, found: Sequence[bool]) -> bool:
        """Return whether inputs show what is said of them, as far as each of the values does."""
        return not found or any(found)

    def not_random(self) -> Iterator[str]:
        """Yield how inputs differ from the random ones that they are said to be."""
        yield from ()


class _LayerInputs(_Inputs):
    """The inputs of a layer of ours, whose names are known."""

    takes_nan, needed = False, ("left_padding", "right_padding")

    @property
    def in_place(self) -> bool:
        """Whether caches are written in place, after the lengths of pasts."""
        return "past_length" in self.case.inputs

    def masks(self) -> Iterator[np.ndarray]:
        """Yield a mask of the hidden keys."""
        mask = self.case.inputs.get("attn_mask", np.zeros(0))
        if mask.size:
            yield ~mask if mask.dtype == np.bool_ else np.isneginf(mask)

    def keys(self) -> int:
        """Return the largest number of keys of a row of a mask."""
        if not self.in_place:
            return super().keys()
        lengths = self.case.inputs["past_length"]
        by_batch = any(len(mask) == len(lengths) for mask in self.masks())
        past = lengths.max() if by_batch else lengths.min()
        return int(past) + int(self.case.inputs["query"].shape[1])

    def _is_value(self, name: str) -> bool:
        return name != "attn_mask"

    def are_shown(self, found: Sequence[bool]) -> bool:
        """Return whether all inputs show what is said of them."""
        return all(found)

    def not_random(self) -> Iterator[str]:
        """Yield how inputs differ from the random ones that they are said to be."""
        (low, high), case = USUAL_RMS, self.case
        if case.ignored_rows or LABELS.keys() & set(case.contents):
            return
        # Only narrow types overflow with random inputs, so that these are scaled down.
        is_narrow = {array.dtype.name for array in case.inputs.values()} - _WIDE
        scale = self.scale if is_narrow else 1.0
        for array in self.values():
            if array.size >= MANY_ELEMENTS and not low < (rms := _rms(array)) / scale < high:
                yield f"is said to have random inputs, and their root mean square is {rms:.2g}"
        is_far = case.sizes.get("past_len", 0) > 1000 or 1 in (
            case.sizes["batch"], case.sizes["query_len"]
        )  # fmt: skip
        if case.name.startswith("far_") and is_far:
            return  # no key is hidden there
        for mask in self.masks():
            hidden = mask[..., 1:]  # the first key is never hidden
            if hidden.size >= MANY_ELEMENTS and hidden.all() == hidden.any():
                yield "is said to have a random mask, and it is the same everywhere"


_LabelCheck = Callable[[_Inputs], bool]


# -- what contents say of masks -----------------------------------------------------------------


def _some_mask(is_so: Callable[[np.ndarray], bool]) -> _LabelCheck:
    return lambda inputs: any(is_so(hidden) for hidden in inputs.masks())


def _is_padded(inputs: _Inputs, *, left: bool) -> bool:
    """Return whether all rows hide keys at one end, or have one key at most."""
    if inputs.keys() <= 1:
        return True
    for hidden in inputs.masks():
        starts = hidden[..., 1:] & ~hidden[..., :-1]
        ends = hidden[..., :-1] & ~hidden[..., 1:]
        if left:
            is_padding = not starts.any()
        else:  # beyond the length of a cache in place, all is visible
            is_padding = (starts.sum(-1) <= 1).all() if inputs.in_place else not ends.any()
        if is_padding and hidden.any() and not hidden.all():
            return True
    return False


def _has_lowest(inputs: _Inputs) -> bool:
    """Return whether a mask has the lowest number; one in float16 has none for its first key."""
    for array in inputs.case.inputs.values():
        if is_floating(array.dtype):
            low = np.where(np.isneginf(array), 0, array) < LOW[array.itemsize]
            if low.any() or (array.itemsize == 2 and array.shape[-1] == 1):
                return True
    return False


def _has_hidden_block(hidden: np.ndarray) -> bool:
    """Return whether hidden keys lie between visible ones in every row, if there are enough."""
    last = hidden.shape[-1] - 1
    if last <= 16 or hidden[..., 0].any() or hidden[..., -1].any():
        return bool(last <= 16)
    return bool(hidden.any(-1).all())


def _has_large_bias(inputs: _Inputs) -> bool:
    """Return whether a mask has numbers as large as biases are."""
    mask = inputs.case.inputs["attn_mask"].astype(np.float32)
    return mask.size < MANY_ELEMENTS or float(np.abs(mask[np.isfinite(mask)]).max(initial=0)) >= 16


LOW = {2: -6e4, 4: -3e38, 8: -1e308}
"""Numbers above the lowest finite one, by the size of the type in bytes. Of the two types of 2
bytes, float16 has the smaller range."""


# -- what contents say of values and lengths ------------------------------------------------------


def _values(is_so: Callable[[np.ndarray, float], bool]) -> _LabelCheck:
    """Return a check of all values, or of some of a user's module, given their scale."""

    def check(inputs: _Inputs) -> bool:
        return inputs.are_shown([is_so(array, inputs.scale) for array in inputs.values()])

    return check


def _largest(array: np.ndarray) -> float:
    return max(float(array.max()), -float(array.min()))


def _rms(array: np.ndarray) -> float:
    norm: float = np.linalg.norm(array.astype(np.float32, copy=False)).item()
    return norm / math.sqrt(array.size)


def _tokens_are_equal(array: np.ndarray, _: float) -> bool:
    # Values may have been moved away from rounding ties.
    return array.ndim < 2 or np.allclose(array, array[..., :1, :], rtol=0.1, atol=0.1)


def _is_one_hot(array: np.ndarray, _: float) -> bool:
    large = np.abs(array) > 0.3 * np.abs(array).max(-1, keepdims=True)
    return not array.ndim or bool((large.sum(-1) == 1).all())


def _has_zero_tokens(array: np.ndarray) -> bool:
    """Return whether tokens of an input are 0, or it has too few tokens."""
    if array.ndim < 2 or not is_floating(array.dtype) or array[..., 0].size < MANY_ELEMENTS:
        return array.ndim > 1
    return bool((array == 0).all(-1).any())


def _has_equal_tokens(array: np.ndarray) -> bool:
    """Return whether the second token of an input is its first one, if it has both."""
    return array.ndim > 2 and (
        array.shape[-2] < 2 or np.array_equal(array[..., 0, :], array[..., 1, :])
    )


def _has_large_queries(inputs: _Inputs) -> bool:
    later = inputs.case.inputs["query"][:, 1:].astype(np.float32)
    return later.size < MANY_ELEMENTS or _largest(later) >= 4 * inputs.scale


def _has_short_pasts(inputs: _Inputs) -> bool:
    return int(inputs.case.inputs["past_length"].max(initial=0)) <= 2


def _is_empty_and_full(inputs: _Inputs) -> bool:
    arrays = inputs.case.inputs
    lengths, capacity = arrays["past_length"], arrays["past_key"].shape[2]
    is_full = int(lengths[-1]) == capacity - arrays["query"].shape[1]
    return is_full and not lengths[:-1].any()


_LENGTH_LABELS: Mapping[str, _LabelCheck] = {
    "beyond_length": _has_short_pasts,
    "empty_and_full": _is_empty_and_full,
}

LABELS: Mapping[str, _LabelCheck] = {
    "nothing_masked": _some_mask(lambda hidden: not hidden.any()),
    "all_keys_masked": _some_mask(lambda hidden: bool(hidden.all())),
    "fully_masked_rows": _some_mask(lambda hidden: bool(hidden.all(-1).any())),
    "one_visible_key": _some_mask(lambda hidden: bool(((~hidden).sum(-1) == 1).all())),
    "one_visible_element": _some_mask(
        lambda hidden: bool(hidden[:-1].all() and not hidden[-1:].all())
    ),
    "hidden_blocks": _some_mask(_has_hidden_block),
    "left_padding": lambda inputs: _is_padded(inputs, left=True),
    "right_padding": lambda inputs: _is_padded(inputs, left=False),
    "lowest_float": _has_lowest,
    "large_biases": _has_large_bias,
    "large_logits": _values(lambda x, scale: x.size < MANY_ELEMENTS or _largest(x) >= 4 * scale),
    "small_inputs": _values(lambda x, _: _largest(x) <= 0.25),
    "sharp": _values(lambda x, scale: x.size < MANY_ELEMENTS or _rms(x) >= 1.5 * scale),
    "tiny_values": _values(lambda x, _: _largest(x) <= 0.05),
    "outliers": _values(lambda x, scale: _largest(x) >= 100 * scale),
    "equal_tokens": _values(_tokens_are_equal),
    "one_hot_rows": _values(_is_one_hot),
    "zero_tokens": lambda inputs: any(_has_zero_tokens(x) for x in inputs.case.inputs.values()),
    "equal_keys": lambda inputs: any(map(_has_equal_tokens, inputs.case.inputs.values())),
    "causal_future": _has_large_queries,
    **_LENGTH_LABELS,
}
"""The check of each of the contents, by name. Other names are not checked."""


# -- the checks ----------------------------------------------------------------------------------


def check_labels(manifest: Manifest, goldens: Sequence[Golden], *, ours: bool, batch: str) -> None:
    """Raise an error unless the inputs of all cases are what the index says of them."""
    try:
        wrong = next(_all_wrong(manifest, goldens, ours=ours, batch=batch), "")
    except (LookupError, TypeError, ValueError) as error:  # they have other inputs than the spec's
        wrong = f"their inputs cannot be checked: {one_line(error)}"
    if wrong:
        raise BundleError(f"the stored test cases prove nothing: {wrong}; build the bundle again")


def _all_wrong(
    manifest: Manifest, goldens: Sequence[Golden], *, ours: bool, batch: str
) -> Iterator[str]:
    base = next(golden.case for golden in goldens if golden.case.name == BASE)
    kind = _LayerInputs if ours else _Inputs
    stored = [kind(golden.case, base, batch, compared_elements(golden)) for golden in goldens]
    for each, golden in zip(stored, goldens, strict=True):
        wrong = itertools.chain(
            _wrong(each, manifest.inputs), without_last(golden, manifest.outputs)
        )
        yield from (f"{each.case.name} {text}" for text in wrong)
        if not any(map(_has_finite, golden.expected.values())):
            yield f"{each.case.name} has no finite number in its reference"
    for label in kind.needed if "attn_mask" in manifest.inputs else ():
        if not any(label in each.case.contents and each.keys() > 1 for each in stored):
            yield f"no case with two keys has {label}"


def _wrong(inputs: _Inputs, signatures: Mapping[str, InputSignature]) -> Iterator[str]:
    case, sizes = inputs.case, inputs.case.sizes
    if list(case.inputs) != list(signatures):
        yield f"has the inputs {', '.join(case.inputs)}"
    for name, signature in signatures.items():
        array, axes = case.inputs[name], signature.shape
        if array.shape != tuple(sizes.get(a) if isinstance(a, str) else a for a in axes):
            yield f"has sizes {dict(sizes)}, and {name} is {list(array.shape)}"
        if array.dtype.name != signature.dtype:
            yield f"has {name} in {array.dtype.name}, not {signature.dtype}"
    if case.ignored_rows or not inputs.takes_nan:
        yield from wrongly_ignored(case, signatures, inputs.compared, inputs.batch)
    for label in case.contents:
        if label in LABELS and not LABELS[label](inputs):
            yield f"is said to have {label}, and its inputs have not"
    changed = case.name.removeprefix(CHANGED)
    if changed != case.name and np.array_equal(case.inputs[changed], inputs.base.inputs[changed]):
        yield f"has the same {changed} as {BASE}"
    yield from inputs.not_random()


def _has_finite(array: np.ndarray) -> bool:
    return is_finite_array(array) or bool(np.isfinite(array).any())
