"""A case fed token by token: with a causal cache that means the same as the whole at once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from attn_kit.cache_layout import to_graph
from attn_kit.model import Model
from attn_kit.settings import AXES, CACHE

Arrays = Mapping[str, np.ndarray]
NEW, KEYS, ROOM, LENGTHS = "query_len", "total_len", "capacity", "past_length"


def replay(model: Model, inputs: Arrays) -> dict[str, np.ndarray]:
    """Run a case one token at a time, the cache fed back.

    Args:
        model: The attention.
        inputs: Of the whole case, which has no past.

    Returns:
        The outputs that have a row for each token, put together.

    Raises:
        ValueError: If the case cannot be fed one by one.
    """
    tokens = _tokens(inputs)
    caches = to_graph({name: array.copy() for name, array in inputs.items() if _is_cache(name)})
    steps: dict[str, list[np.ndarray]] = {}
    for token in range(tokens):
        step = {name: _cut(name, array, token) for name, array in inputs.items()} | caches
        outputs = model.run(step, in_place=CACHE == "in-place")
        caches = {name: outputs["present_" + name.removeprefix("past_")] for name in caches}
        for name, array in outputs.items():
            if NEW in AXES[name]:
                steps.setdefault(name, []).append(_as_wide(name, array, tokens))
    return {name: np.concatenate(parts, AXES[name].index(NEW)) for name, parts in steps.items()}


def _tokens(inputs: Arrays) -> int:
    sizes = {
        axis: size
        for name, array in inputs.items()
        for axis, size in zip(AXES[name], array.shape, strict=True)
    }
    tokens = sizes.get(NEW, 0)
    if not tokens:
        raise ValueError("the case has no tokens to feed one by one")
    if sizes.get(KEYS, tokens) != tokens or sizes.get(ROOM, tokens) < tokens:
        raise ValueError(f"the case has other keys than those of its {tokens} tokens")
    return tokens


def _is_cache(name: str) -> bool:
    return name.startswith("past_") and name != LENGTHS


def _cut(name: str, array: np.ndarray, token: int) -> np.ndarray:
    """Return the part of an input that belongs to one token."""
    if name == LENGTHS:
        return np.full_like(array, token)
    for at, axis in enumerate(AXES[name]):
        if axis == NEW:
            array = array.take([token], at)
        elif axis == KEYS:
            array = array.take(range(token + 1), at)
    return np.ascontiguousarray(array)


def _as_wide(name: str, array: np.ndarray, tokens: int) -> np.ndarray:
    """Extend an output to a column for every key; columns of later keys are 0."""
    for at, axis in enumerate(AXES[name]):
        if axis == KEYS:
            missing = [(0, 0)] * array.ndim
            missing[at] = (0, tokens - array.shape[at])
            array = np.pad(array, missing)
    return array
