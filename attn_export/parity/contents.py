"""The contents of a case: values and masks that reveal more than random numbers do.

Each is a change of random inputs. A case has at most one change of each group: of values, here, of
masks and of the lengths of a cache in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from attn_export.parity.draw import Sizes, scaled
from attn_export.spec import AttentionSpec, Input
from attn_export.spec.low_precision import PER_BLOCK
from attn_export.tensorfile import ArrayDict, is_floating

LOUD, LOUD_FLOAT16 = 24.0, 14.0
"""The factor on loud inputs. Scores reach several hundred: exp overflows at 88."""

LESS_LOUD = 10.0
"""The factor by which the largest scores lie around 60."""

UNEVEN = 1e4
"""The factor on queries and values, and the divisor of keys, whose scores are as usual."""

APART = 0.02
"""The share by which tokens of a pair differ, so that even large scores are close together."""

HUGE, HUGE_FLOAT16 = 2.0**17, 14.0
"""The factor on huge inputs. Scores reach several 1e9: no finite number is below all of them."""

SHARP, SMALL = 3.0, 0.02
OUTLIER, OUTLIER_FLOAT16 = 30000.0, 300.0
QUIETER = 30.0
"""The number by which the outliers of every other row of the batch are smaller."""

TINY, TINY_CACHE, TINY_FLOAT16 = 2.0**-100, 2.0**-120, 2.0**-8
"""Factors of inputs next to the smallest numbers. What is computed of a cache is smaller still."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The inputs of a case, to be changed in place.

    Attributes:
        inputs: The arrays, by name.
        wanted: The wanted inputs.
        spec: The spec of the module, if it is ours.
        sizes: The size of every dynamic axis.
        random: A generator of the case's own.
    """

    inputs: ArrayDict
    wanted: Mapping[str, Input]
    spec: AttentionSpec | None
    sizes: Sizes
    random: np.random.Generator

    @property
    def in_place(self) -> bool:
        """Return whether the cache is written in place."""
        return self.spec is not None and self.spec.in_place

    def values(self) -> Iterator[str]:
        """Yield the names of floating inputs that are no masks."""
        for name, array in self.inputs.items():
            if is_floating(array.dtype) and name not in set(self.masks()):
                yield name

    def masks(self) -> Iterator[str]:
        """Yield the names of inputs that hide keys."""
        return (name for name, wanted in self.wanted.items() if hides(name, wanted))

    def is_narrow(self, name: str) -> bool:
        """Return whether an input is float16, which ends at 65504 and at 6e-8."""
        return bool(self.inputs[name].dtype == np.float16)


Change = Callable[[Drawn], None]


@dataclasses.dataclass(frozen=True)
class Content:
    """One change of random inputs.

    Attributes:
        name: The part of the case's name.
        about: A few words for the reader of a report.
        shows: The faults that it shows.
        change: Makes it.
        is_opaque: Whether it hides faults that other inputs show, as inputs close to 0 do.
        is_loud: Whether it may have to be scaled down for modules that overflow.
    """

    name: str
    about: str
    shows: str
    change: Change
    is_opaque: bool = False
    is_loud: bool = False


def hides(name: str, wanted: Input) -> bool:
    """Return whether an input is a mask: `attn_mask`, or one of a user's module like it.

    Those are bool with one value at the start of all rows, floating with -inf, or 0 and 1.

    Args:
        name: The name.
        wanted: The description of the input.
    """
    if name == "attn_mask" or wanted.hides:
        return True
    if len(wanted.shape) < 2 or not isinstance(wanted.shape[-1], str):
        return False
    if wanted.dtype == "bool":
        return wanted.first is not None
    return wanted.dtype.startswith("int") and (wanted.low, wanted.high) == (0, 1)


# -- values --------------------------------------------------------------------------------------


def _loud(drawn: Drawn) -> None:
    """Make all rows of the batch loud; for our own modules in four ways, in turn.

    Loud, huge, less loud with tokens in pairs, and loud queries of quiet keys.
    """
    for name in drawn.values():
        narrow = drawn.is_narrow(name)
        multiply(drawn, name, LOUD_FLOAT16 if narrow else LOUD)
        if drawn.wanted[name].shape[:1] == ("batch",) and drawn.spec is not None and not narrow:
            rows, is_key = drawn.inputs[name], name in ("key", "past_key")
            _multiply_part(rows[1::4], HUGE / LOUD)
            _multiply_part(rows[2::4], LESS_LOUD / LOUD)
            if is_key or name == "query":
                _pair(drawn, rows[2::4])
            _multiply_part(rows[3::4], (1 / UNEVEN if is_key else UNEVEN) / LOUD)


def _pair(drawn: Drawn, array: np.ndarray) -> None:
    """Make tokens alike, two by two."""
    even, odd = array[..., :-1:2, :], array[..., 1::2, :]
    noise = drawn.random.uniform(1 - APART, 1 + APART, odd.shape)
    odd[...] = (even * noise).astype(array.dtype)


def _sharp(drawn: Drawn) -> None:
    for name in drawn.values():
        multiply(drawn, name, SHARP)


def _small(drawn: Drawn) -> None:
    for name in drawn.values():
        multiply(drawn, name, SMALL)


def _tiny(drawn: Drawn) -> None:
    for name in drawn.values():
        # Scales of blocks must be normal numbers: kernels divide by them.
        blocks = drawn.spec is not None and drawn.spec.activations == PER_BLOCK
        wide = TINY_CACHE if name.startswith("past_") and not blocks else TINY
        multiply(drawn, name, TINY_FLOAT16 if drawn.is_narrow(name) else wide)


def _outliers(drawn: Drawn) -> None:
    """Set one very large element in each row of the batch, and make attention sharp."""
    _sharp(drawn)
    for name in drawn.values():
        array = drawn.inputs[name]
        largest = OUTLIER_FLOAT16 if drawn.is_narrow(name) else OUTLIER
        by_row = drawn.wanted[name].shape[:1] == ("batch",)
        for row, part in enumerate(array if by_row else [array]):
            if part.size:
                place = drawn.random.integers(part.size)
                part.reshape(-1)[place] = largest / QUIETER ** (row % 2)


def _equal(drawn: Drawn) -> None:
    """Make all tokens of a sequence alike, so that all scores of a row are equal.

    Of our own modules also all elements of a row: a norm of such a row would be 0 / 0 elsewhere.
    """
    for name in drawn.values():
        array = drawn.inputs[name]
        if array.ndim > 1 and array.size:
            array[...] = array[..., :1, :] if drawn.spec is None else array[..., :1, :1]


def _one_hot(drawn: Drawn) -> None:
    """Set a power of 2 in each row and zeros elsewhere, so that products round only once."""
    for name in drawn.values():
        array = drawn.inputs[name]
        if array.ndim and array.size:
            width = array.shape[-1]
            rows = array.reshape(-1, width)
            places = drawn.random.integers(width, size=len(rows))
            signs = drawn.random.choice([-1.0, 1.0], len(rows))
            rows[...] = 0
            rows[np.arange(len(rows)), places] = signs * 2.0 ** drawn.random.integers(
                1, 5, len(rows)
            )


def _loud_future(drawn: Drawn) -> None:
    """Make the last tokens so loud that a query which sees them too early shows it."""
    _multiply_part(drawn.inputs["query"][:, 1:], LOUD_FLOAT16)


def multiply(drawn: Drawn, name: str, factor: float) -> None:
    """Multiply one input.

    Args:
        drawn: The case whose input is changed.
        name: The input.
        factor: The factor.
    """
    drawn.inputs[name] = scaled({name: drawn.inputs[name]}, factor)[name]


def _multiply_part(array: np.ndarray, factor: float) -> None:
    array[...] = (array * factor).astype(array.dtype)


VALUES = (
    Content(
        "large_logits", f"inputs times {LOUD:g}: softmax close to one-hot",
        "softmax without its maximum, clipped scores", _loud,
        is_opaque=True, is_loud=True,
    ),
    Content(
        "small_inputs", f"inputs times {SMALL:g}: softmax close to uniform",
        "numbers below a threshold taken for 0", _small, is_opaque=True,
    ),
    Content(
        "sharp", f"inputs times {SHARP:g}: some keys weigh more",
        "query head h and K/V head h // q_per_kv, wrong scales", _sharp, is_loud=True,
    ),
    Content(
        "tiny_values", "inputs next to the smallest numbers",
        "small numbers flushed to 0", _tiny, is_opaque=True,
    ),
    Content(
        "outliers", f"elements of up to {OUTLIER:g} in each input", "numbers cut at a limit",
        _outliers, is_opaque=True, is_loud=True,
    ),
    Content(
        "equal_tokens", "all tokens of a sequence and all elements of a row alike",
        "ties, norms of constant rows", _equal, is_opaque=True,
    ),
    Content(
        "one_hot_rows", "a power of 2 in each row, else zeros", "rounding to few bits", _one_hot,
        is_opaque=True,
    ),
)  # fmt: skip
FUTURE = Content(
    "causal_future", "keys after the query's own are hidden", "a causal mask that is too wide",
    _loud_future, is_loud=True,
)  # fmt: skip
