"""Replay of a case token by token, which must give the same result as the whole case at once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from attn_kit.cache_layout import is_cache, to_graph
from attn_kit.model import Model
from attn_kit.settings import AXES, CACHE, PRESENTS

Arrays = Mapping[str, np.ndarray]
NEW, KEYS, CAPACITY, LENGTHS = "query_len", "total_len", "capacity", "past_length"


def replay(model: Model, inputs: Arrays) -> dict[str, np.ndarray]:
    """Run a case one token at a time, with the cache of each step as input of the next.

    Args:
        model: The model.
        inputs: The inputs of the whole case, which must have no past.

    Returns:
        The outputs with an axis `query_len`, concatenated along it.

    Raises:
        ValueError: If the case cannot be run token by token.
    """
    tokens = _tokens(inputs)
    caches = to_graph({name: array.copy() for name, array in inputs.items() if is_cache(name)})
    steps: dict[str, list[np.ndarray]] = {}
    for token in range(tokens):
        step = {name: _step_input(name, array, token) for name, array in inputs.items()} | caches
        outputs = model.run(step, in_place=CACHE == "in-place")
        caches = {name: outputs[PRESENTS[name]] for name in caches}
        for name, array in outputs.items():
            if NEW in AXES[name]:
                steps.setdefault(name, []).append(_pad_keys(name, array, tokens))
    return {name: np.concatenate(rows, AXES[name].index(NEW)) for name, rows in steps.items()}


def _tokens(inputs: Arrays) -> int:
    """Return the number of tokens of a case, whose keys must be those of its tokens."""
    sizes = {
        axis: size
        for name, array in inputs.items()
        for axis, size in zip(AXES[name], array.shape, strict=True)
    }
    tokens = sizes.get(NEW, 0)
    if not tokens:
        raise ValueError("the case has no tokens to feed one by one")
    if sizes.get(KEYS, tokens) != tokens or sizes.get(CAPACITY, tokens) < tokens:
        raise ValueError(f"the case has other keys than those of its {tokens} tokens")
    return tokens


def _step_input(name: str, array: np.ndarray, token: int) -> np.ndarray:
    """Return an input of the step with one token: its row, and the keys up to it."""
    if name == LENGTHS:
        return np.full_like(array, token)
    for number, axis in enumerate(AXES[name]):
        if axis == NEW:
            array = array.take([token], number)
        elif axis == KEYS:
            array = array.take(range(token + 1), number)
    return np.ascontiguousarray(array)


def _pad_keys(name: str, array: np.ndarray, tokens: int) -> np.ndarray:
    """Pad the axis of keys of an output with zeros for the keys of later tokens."""
    for number, axis in enumerate(AXES[name]):
        if axis == KEYS:
            padding = [(0, 0)] * array.ndim
            padding[number] = (0, tokens - array.shape[number])
            array = np.pad(array, padding)
    return array
