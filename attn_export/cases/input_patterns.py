"""Input patterns of values: changes of random inputs that show more faults than random numbers.

A case has at most one change of each group: values (this file), masks, and lengths of a cache in
place (both in `mask_patterns`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from attn_export.cases.draw import Sizes
from attn_export.interface import Input, Traits
from attn_export.tensorfile import ArrayDict, is_floating

LARGE, LARGE_FLOAT16 = 24.0, 14.0
"""The factor on large inputs. Scores reach several hundred; exp overflows at 88 in float32."""

LESS_LARGE = 10.0
"""The factor on inputs whose largest scores are about 60, so that exp does not overflow."""

UNEVEN = 1e4
"""The factor on queries and values, and the divisor of keys; scores keep their usual size."""

PAIR_DIFFERENCE = 0.02
"""The largest relative difference of two paired tokens, so that large scores are close together."""

HUGE, HUGE_FLOAT16 = 2.0**17, 14.0
"""The factor on huge inputs. Scores reach several 1e9, below the usual finite numbers for -inf."""

SHARP, SMALL = 3.0, 0.02
SMALLER = (2.0**-12, 2.0**-24, 2.0**-50)
"""Factors of small inputs in the batch elements after the first, in turn."""

OUTLIER, OUTLIER_FLOAT16 = 30000.0, 300.0
OUTLIER_RATIO = 30.0
"""The divisor of the outlier in every other batch element."""

TINY, TINY_CACHE, TINY_STATE, TINY_FLOAT16 = 2.0**-100, 2.0**-120, 2.0**-20, 2.0**-8
"""Factors that bring inputs near the smallest normal numbers, by kind of input."""


@dataclasses.dataclass(frozen=True)
class DrawnCase:
    """Random inputs of a case, which an `InputPattern` changes in place.

    Attributes:
        traits: What is known of the subject.
        random: A generator that is seeded by the name of the case.
    """

    inputs: ArrayDict
    descriptions: Mapping[str, Input]
    traits: Traits
    sizes: Sizes
    random: np.random.Generator

    def value_names(self) -> Iterator[str]:
        """Yield the names of floating inputs that are no masks."""
        for name, array in self.inputs.items():
            if is_floating(array.dtype) and name not in set(self.mask_names()):
                yield name

    def mask_names(self) -> Iterator[str]:
        """Yield the names of inputs that hide keys."""
        return (name for name, input_ in self.descriptions.items() if is_mask(name, input_))

    def is_narrow(self, name: str) -> bool:
        """Return whether an input is float16, which holds magnitudes from 6e-8 to 65504."""
        return bool(self.inputs[name].dtype == np.float16)


Change = Callable[[DrawnCase], None]


@dataclasses.dataclass(frozen=True)
class InputPattern:
    """A named change of random inputs.

    Attributes:
        name: The part that it adds to the case's name.
        about: A few words for the reader of a report.
        change: The function that changes the inputs of a case in place.
        is_opaque: Whether the change hides faults that other inputs show: inputs close to 0 do.
        may_overflow: Whether inputs may have to be scaled down because the module overflows.
        is_sharp: Whether softmax comes close to one-hot. The rounding of two scores that are nearly
            equal then changes one row far more than all others.
    """

    name: str
    about: str
    shows: str
    change: Change
    is_opaque: bool = False
    may_overflow: bool = False
    is_sharp: bool = False


def is_mask(name: str, input_: Input) -> bool:
    """Return whether an input is a mask: `attn_mask`, or an input of a user's module like it.

    Masks of users' modules are floating with -inf. Or they have a dynamic last axis and are bool,
    with the same value at the start of all rows, or integers, 0 and 1.
    """
    if name == "attn_mask" or input_.hides:
        return True
    if len(input_.shape) < 2 or not isinstance(input_.shape[-1], str):
        return False
    if input_.dtype == "bool":
        return input_.first is not None
    return input_.dtype.startswith("int") and (input_.low, input_.high) == (0, 1)


# -- values --------------------------------------------------------------------------------------


def _large_logits(drawn: DrawnCase) -> None:
    """Multiply all batch elements by large factors.

    For our own modules the batch elements differ, in turn: large, huge, less large with paired
    tokens, and large queries and values with small keys. float16 inputs are only made large.
    """
    for name in drawn.value_names():
        narrow = drawn.is_narrow(name)
        multiply(drawn, name, LARGE_FLOAT16 if narrow else LARGE)
        batch_first = drawn.descriptions[name].shape[:1] == ("batch",)
        if batch_first and drawn.traits.is_attention and not narrow:
            array, is_key = drawn.inputs[name], name in ("key", "past_key")
            _multiply_part(array[1::4], HUGE / LARGE)
            _multiply_part(array[2::4], LESS_LARGE / LARGE)
            if is_key or name == "query":
                _pair_tokens(drawn, array[2::4])
            _multiply_part(array[3::4], (1 / UNEVEN if is_key else UNEVEN) / LARGE)


def _pair_tokens(drawn: DrawnCase, array: np.ndarray) -> None:
    """Make each odd token nearly equal to the token before it."""
    even, odd = array[..., :-1:2, :], array[..., 1::2, :]
    noise = drawn.random.uniform(1 - PAIR_DIFFERENCE, 1 + PAIR_DIFFERENCE, odd.shape)
    odd[...] = (even * noise).astype(array.dtype)


def _multiply_all(drawn: DrawnCase, *, factor: float) -> None:
    for name in drawn.value_names():
        multiply(drawn, name, factor)


def _small(drawn: DrawnCase) -> None:
    """Multiply all inputs by a small factor, which differs in the batch elements of our modules."""
    _multiply_all(drawn, factor=SMALL)
    if not drawn.traits.is_attention:
        return
    for name in drawn.value_names():
        if drawn.descriptions[name].shape[:1] == ("batch",) and not drawn.is_narrow(name):
            for first, factor in enumerate(SMALLER, start=1):
                _multiply_part(drawn.inputs[name][first :: len(SMALLER) + 1], factor / SMALL)


def _tiny(drawn: DrawnCase) -> None:
    for name in drawn.value_names():
        wide = TINY_CACHE if name.startswith("past_") else TINY
        if not drawn.traits.has_softmax:
            wide = TINY_STATE  # of products of keys, values and decays
        multiply(drawn, name, TINY_FLOAT16 if drawn.is_narrow(name) else wide)


def _outliers(drawn: DrawnCase) -> None:
    """Set one very large element in each batch element, and make attention sharp."""
    _multiply_all(drawn, factor=SHARP)
    for name in drawn.value_names():
        array = drawn.inputs[name]
        largest = OUTLIER_FLOAT16 if drawn.is_narrow(name) else OUTLIER
        batch_first = drawn.descriptions[name].shape[:1] == ("batch",)
        for number, sequence in enumerate(array if batch_first else [array]):
            if sequence.size:
                index = drawn.random.integers(sequence.size)
                sequence.reshape(-1)[index] = largest / OUTLIER_RATIO ** (number % 2)


def _equal_tokens(drawn: DrawnCase) -> None:
    """Make all tokens of a sequence equal, so that all scores of a query are equal."""
    # For our own modules all elements of a token are equal too. A user's module may have a norm
    # that is 0 / 0 for such a token.
    for name in drawn.value_names():
        array = drawn.inputs[name]
        if array.ndim > 1 and array.size:
            elements = 1 if drawn.traits.is_attention else None
            array[...] = array[..., :1, :elements]


def _zero_tokens(drawn: DrawnCase) -> None:
    """Make every third token 0, another one in each input and in the next batch element."""
    for number, name in enumerate(drawn.value_names()):
        array = drawn.inputs[name]
        if array.ndim > 1 and array.size:
            batch_first = array.ndim > 2 and drawn.descriptions[name].shape[:1] == ("batch",)
            for element, tokens in enumerate(array if batch_first else [array]):
                tokens[..., (1 - element - number) % 3 :: 3, :] = 0


def _equal_keys(drawn: DrawnCase) -> None:
    """Make four keys after each other equal, with values of their own."""
    _multiply_all(drawn, factor=SHARP)
    for name in drawn.inputs.keys() & {"key", "past_key"}:
        array = drawn.inputs[name]
        for step in (1, 2, 3):
            keys = array[..., step::4, :]
            keys[...] = array[..., ::4, :][..., : keys.shape[-2], :]


def _one_hot(drawn: DrawnCase) -> None:
    """Set one power of 2 in each last-axis row and zeros elsewhere: products round only once."""
    for name in drawn.value_names():
        array = drawn.inputs[name]
        if array.ndim and array.size:
            width = array.shape[-1]
            rows = array.reshape(-1, width)
            columns = drawn.random.integers(width, size=len(rows))
            signs = drawn.random.choice([-1.0, 1.0], len(rows))
            powers = drawn.random.integers(1, 5, len(rows))
            rows[...] = 0
            rows[np.arange(len(rows)), columns] = signs * 2.0**powers


def _large_future(drawn: DrawnCase) -> None:
    """Multiply all queries but the first, so that a query that sees a later key is wrong."""
    _multiply_part(drawn.inputs["query"][:, 1:], LARGE_FLOAT16)


def multiply(drawn: DrawnCase, name: str, factor: float) -> None:
    """Multiply a floating input."""
    array = drawn.inputs[name]
    drawn.inputs[name] = (array * factor).astype(array.dtype)


def _multiply_part(array: np.ndarray, factor: float) -> None:
    array[...] = (array * factor).astype(array.dtype)


VALUES = (
    InputPattern(
        "large_logits", f"inputs times {LARGE:g}: softmax close to one-hot",
        "softmax without its maximum, clipped scores", _large_logits,
        is_opaque=True, may_overflow=True, is_sharp=True,
    ),
    InputPattern(
        "small_inputs", f"inputs times {SMALL:g} and less: softmax close to uniform",
        "numbers below a threshold taken for 0", _small, is_opaque=True,
    ),
    InputPattern(
        "sharp", f"inputs times {SHARP:g}: some keys weigh more",
        "query head h and K/V head h // q_per_kv, wrong scales",
        functools.partial(_multiply_all, factor=SHARP), may_overflow=True, is_sharp=True,
    ),
    InputPattern(
        "tiny_values", "inputs next to the smallest numbers",
        "small numbers flushed to 0", _tiny, is_opaque=True,
    ),
    InputPattern(
        "outliers", f"elements of up to {OUTLIER:g} in each input", "numbers cut at a limit",
        _outliers, is_opaque=True, may_overflow=True, is_sharp=True,
    ),
    InputPattern(
        "equal_tokens", "all tokens of a sequence and all elements of a row alike",
        "ties, norms of constant rows", _equal_tokens, is_opaque=True,
    ),
    InputPattern(
        "one_hot_rows", "a power of 2 in each row, else zeros", "rounding to few bits", _one_hot,
        is_opaque=True, is_sharp=True,
    ),
    InputPattern(
        "zero_tokens", "every third token, key and value is 0", "zeros taken for padding",
        _zero_tokens,
    ),
)  # fmt: skip
EQUAL_KEYS = InputPattern(
    "equal_keys", "keys are equal, and their values are not", "equal scores counted once",
    _equal_keys, may_overflow=True, is_sharp=True,
)  # fmt: skip
FUTURE = InputPattern(
    "causal_future", "keys after the query's own are hidden", "a causal mask that is too wide",
    _large_future, may_overflow=True, is_sharp=True,
)  # fmt: skip
