"""Relations of wrong values to right ones, in words."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from attn_export.explain.relations import relation

HEADS = ("batch element", "head", "position", "channel")
MASK = ("batch element", "head", "query", "key")
SHAPES = ((2, 4, 3, 4), (1, 4, 5, 4), (3, 4, 1, 4))
Change = Callable[[np.ndarray], np.ndarray]


def values() -> list[np.ndarray]:
    random = np.random.default_rng(2)
    return [random.standard_normal(shape) for shape in SHAPES]


def masks() -> list[np.ndarray]:
    """Return causal masks after a past of two keys."""
    return [np.tril(np.ones((B, 1, L, L + 2), bool), 2) for B, _, L, _ in SHAPES]


def in_part(axis: int, part: slice | int, factor: float) -> Change:
    def change(x: np.ndarray) -> np.ndarray:
        changed = x.copy()
        np.moveaxis(changed, axis, 0)[part] *= factor
        return changed

    return change


def reshaped(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, 1, 2).reshape(x.shape)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: 0.5 * x, "is 0.5 times what it should be"),
        (lambda x: x + 0.25, "is 0.25 too high"),
        (lambda x: x - 1, "is 1 too low"),
        (np.negative, "is negated"),
        (np.zeros_like, "is 0 everywhere"),
        (np.rint, "is rounded to integers"),
        (lambda x: x.astype(np.float16).astype(float), "is rounded to float16"),
        (lambda x: x.astype(ml_dtypes.bfloat16).astype(float), "is rounded to bfloat16"),
        (lambda x: np.maximum(x, -0.5), "is clipped to at least -0.5"),
        (lambda x: np.minimum(x, 0.5), "is clipped to at most 0.5"),
        (in_part(1, 2, 0.5), "is 0.5 times what it should be in head 2 alone"),
        (in_part(2, -1, 2.0), "is 2 times what it should be in the last position alone"),
        (in_part(3, slice(2, None), 0.0), "is 0 everywhere in channels from 2 on alone"),
        (lambda x: x[:, [1, 0, 2, 3]], "has heads 0 and 1 swapped"),
        (lambda x: x[:, [0, 0, 2, 3]], "has heads 0, 0, 2, 3 in place of 0 to 3"),
        (lambda x: x[:, ::-1], "has its heads in reverse"),
        (lambda x: np.roll(x, -1, axis=1), "has head i + 1 in place of head i"),
        (lambda x: x[:1].repeat(len(x), 0), "is that of the first batch element for every"),
        (lambda x: x[..., [0, 2, 1, 3]], "has its even channels before its odd ones"),
        (reshaped, "has the elements of axes 1 and 2 in the wrong order, as by a reshape"),
        (lambda x: x**3, ""),
    ],
)
def test_a_wrong_value_is_described(change: Change, says: str):
    text = relation([(change(x), x) for x in values()], HEADS)
    assert text.startswith(says)
    assert bool(text) == bool(says)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (np.logical_not, "is inverted"),
        (lambda m: m & ~np.eye(*m.shape[-2:], 2, dtype=bool), "hides each query's own key"),
        (
            lambda m: m | np.eye(*m.shape[-2:], 3, dtype=bool),
            "shows the key after each query's own",
        ),
        (lambda m: m & (np.arange(m.shape[-1]) > 0), "hides key 0"),
        (lambda m: m & (np.arange(m.shape[-1]) > 1), "hides the keys of the past"),
        (lambda m: np.triu(m, 1), "hides keys more than 1 before each query's own"),
        (np.ones_like, "shows the keys after each query's own"),
    ],
)
@pytest.mark.parametrize("as_bias", [False, True])
def test_keys_that_a_mask_shows_or_hides_are_named(change: Change, says: str, as_bias: bool):
    pairs = [(change(mask), mask) for mask in masks()]
    if as_bias and says != "is inverted":
        pairs = [tuple(np.where(m, 0.0, -np.inf) for m in pair) for pair in pairs]
    assert relation(pairs, MASK).startswith(says)


def test_a_relation_must_hold_in_every_case():
    first, second, _ = values()
    assert not relation([(2 * first, first), (3 * second, second)], HEADS)
    text = relation([(2 * first, first), (second, second)], HEADS)
    assert text == "is 2 times what it should be", (
        "the sizes of the cases that fail are shown apart"
    )


def test_a_base_is_that_of_the_powers():
    right, wrong = (base ** (-np.arange(8) / 8) for base in (1e4, 5e3))
    assert relation([(wrong, right)], ("element",)) == "has the base 5000 in place of 10000"
