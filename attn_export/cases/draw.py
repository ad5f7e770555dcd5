"""Random input arrays: the same from the same words, on every machine."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np

from attn_export.cases.sizes import Sizes
from attn_export.spec import Shape

Arrays = dict[str, np.ndarray]

VISIBLE = 0.7
"""The share of True, or of finite values, in a random mask."""


def generator(*words: str | int) -> np.random.Generator:
    """A random generator that depends on nothing but the words."""
    return np.random.default_rng(zlib.crc32(repr(words).encode()))


def concrete(shape: Shape, sizes: Sizes) -> tuple[int, ...]:
    """A shape with the names of its dynamic axes replaced by sizes."""
    return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in shape)


def draw_inputs(
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, str],
    sizes: Sizes,
    *,
    seed_words: tuple[str | int, ...],
) -> Arrays:
    """Draw every input: normal floats, masks with about 70 % visible keys.

    Key 0 is visible in every row of a mask, so that a masked row comes only from a probe.

    Raises:
        ValueError: If a dtype is neither floating point nor bool.
    """
    arrays: Arrays = {}
    for name, shape in shapes.items():
        rng = generator(*seed_words, name)
        size = concrete(shape, sizes)
        dtype = np.dtype(dtypes[name])
        if dtype == np.bool_:
            arrays[name] = _visible(rng, size)
        elif np.issubdtype(dtype, np.floating):
            values = rng.standard_normal(size)
            if name == "attn_mask":
                values = np.where(_visible(rng, size), values, -np.inf)
            arrays[name] = values.astype(dtype)
        else:
            raise ValueError(f"cannot draw values for {name} of type {dtype}")
    return arrays


def _visible(rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    mask = rng.random(size) < VISIBLE
    mask[..., 0] = True
    return mask
