"""Whole decodes of the cases of a graph, step by step, by a runtime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from attn_export.runtimes.protocol import Run
from attn_export.tensorfile import ArrayDict

Axes = Mapping[str, Sequence[str | int]]
"""The axes of every input and output by name, as in a manifest."""

BATCH, QUERY_LEN, CAPACITY = "batch", "query_len", "capacity"
_TOTAL_LEN = "total_len"
PAST, PRESENT, PAST_LENGTH = "past_", "present_", "past_length"

BLOCK = 64
"""The number of keys by which the buffers grow."""

PROMPT, CHUNK, EVERY = 5, 3, 10
"""The number of tokens of the first step, and of a larger step that comes once in `EVERY` tokens.
All other steps have one token."""


def decode(run: Run, inputs: ArrayDict, axes: Axes, fixed: Mapping[str, int]) -> ArrayDict:
    """Decode the sequences of a case step by step.

    A graph with a fixed batch size of 1 gets one batch element after the other.

    Returns:
        The joined outputs, which must equal those of one run on `inputs`.
    """
    single = fixed.get(QUERY_LEN) == 1
    if fixed.get(BATCH) != 1:
        return _decode(run, inputs, axes, single=single)
    batch_axes = {name: axes[name].index(BATCH) for name in axes if BATCH in axes[name]}
    decoded = []
    for index in range(inputs["query"].shape[batch_axes["query"]]):
        element = {
            name: array.take([index], axis=batch_axes[name]) if name in batch_axes else array
            for name, array in inputs.items()
        }
        decoded.append(_decode(run, element, axes, single=single))
    return {
        name: np.concatenate([outputs[name] for outputs in decoded], batch_axes[name])
        if name in batch_axes
        else array
        for name, array in decoded[0].items()
    }


def _decode(run: Run, inputs: ArrayDict, axes: Axes, *, single: bool) -> ArrayDict:
    """Decode all batch elements together; `single` limits steps to one token."""
    total = inputs["query"].shape[axes["query"].index(QUERY_LEN)]
    capacity_axes = {
        name: axes[name].index(CAPACITY)
        for name in inputs
        if name.startswith(PAST) and CAPACITY in axes[name]
    }
    caches = {name: _fit(inputs[name], at, 0) for name, at in capacity_axes.items()}
    cache_length = capacity = 0
    steps: dict[str, list[np.ndarray]] = {}
    for count in _counts(total, single=single):
        if cache_length + count > capacity:
            capacity += BLOCK
            caches = {name: _fit(caches[name], at, capacity) for name, at in capacity_axes.items()}
        outputs = run(_step_inputs(inputs, axes, cache_length, count, capacity) | caches)
        _check_shapes(outputs, axes, {QUERY_LEN: count, CAPACITY: capacity}, cache_length)
        for name, array in outputs.items():
            if QUERY_LEN in axes.get(name, ()):
                resized = _resize_keys(array, axes[name], capacity, total)
                steps.setdefault(name, []).append(resized)
        caches = {name: outputs[PRESENT + name.removeprefix(PAST)] for name in capacity_axes}
        cache_length += count
    return {
        name: np.concatenate(steps[name], axes[name].index(QUERY_LEN))
        if name in steps
        else _resize_keys(array, axes.get(name, ()), capacity, total)
        for name, array in outputs.items()
    }


def decode_returned(
    run: Run, inputs: ArrayDict, axes: Axes, caches: Mapping[str, str]
) -> ArrayDict:
    """Decode the sequences of a case step by step, with the caches that a graph returns.

    In each step the batch elements have another order, as a beam search reorders them.
    `caches`: The input that takes an output in the next step.

    Returns:
        The joined outputs, which must equal those of one run on `inputs`.
    """
    total = inputs[next(n for n, named in axes.items() if QUERY_LEN in named)].shape[1]
    pasts, done = {name: inputs[name] for name in caches.values()}, 0
    steps: dict[str, list[np.ndarray]] = {}
    for number, count in enumerate(_counts(total, single=False)):
        keys = done + count
        step = _part(inputs, axes, done, keys) | pasts
        outputs = _reordered(run(_reordered(step, axes, number)), axes, -number)
        _check_shapes(outputs, axes, {QUERY_LEN: count, _TOTAL_LEN: keys}, done)
        for name, array in outputs.items():
            if name in caches and array.size:  # those of an encoder may come once
                pasts[caches[name]] = array
            elif QUERY_LEN in axes.get(name, ()):
                steps.setdefault(name, []).append(array)
        done = keys
    joined = {n: np.concatenate(arrays, axes[n].index(QUERY_LEN)) for n, arrays in steps.items()}
    joined |= {name: pasts[source] for name, source in caches.items()}
    return {name: joined.get(name, array) for name, array in outputs.items()}


def _part(inputs: ArrayDict, axes: Axes, done: int, keys: int) -> ArrayDict:
    """Return the inputs of the tokens from `done` to `keys`."""
    part, step = {QUERY_LEN: range(done, keys), _TOTAL_LEN: range(keys)}, {}
    for name, array in inputs.items():
        if array.dtype == bool and BATCH not in axes[name]:  # whether there is a past
            array = np.full_like(array, done > 0)
        elif list(axes[name]) == [BATCH]:  # the number of keys before the tokens, or after them
            array = np.minimum(array, keys) if array.any() else np.full_like(array, done)
        for at, axis in enumerate(axes[name]):
            array = array.take(part[str(axis)], axis=at) if axis in part else array
        step[name] = array
    return step


def _reordered(arrays: ArrayDict, axes: Axes, by: int) -> ArrayDict:
    """Return arrays whose batch elements are `by` rows further."""
    return {
        name: np.roll(array, by, axes[name].index(BATCH)) if BATCH in axes.get(name, ()) else array
        for name, array in arrays.items()
    }


def _counts(total: int, *, single: bool) -> Iterator[int]:
    """Yield the number of tokens of each step."""
    fed = 0
    while fed < total:
        most = 1
        if not single and fed == 0:
            most = PROMPT
        elif not single and fed % EVERY == PROMPT - CHUNK:
            most = CHUNK
        count = min(most, total - fed)
        yield count
        fed += count


def _step_inputs(
    inputs: ArrayDict, axes: Axes, cache_length: int, count: int, capacity: int
) -> ArrayDict:
    """Return the inputs of a step without its caches; masks are padded to `capacity` keys."""
    keys = cache_length + count
    step = {}
    for name, array in inputs.items():
        part = array
        for at, axis in enumerate(axes[name]):
            if axis == QUERY_LEN:
                part = part.take(range(cache_length, keys), axis=at)
            elif axis == CAPACITY:
                part = _fit(_fit(part, at, keys), at, capacity)
        step[name] = part
    return step | {PAST_LENGTH: np.full_like(inputs[PAST_LENGTH], cache_length)}


def _check_shapes(
    outputs: ArrayDict, axes: Axes, sizes: Mapping[str, int], cache_length: int
) -> None:
    """Raise ValueError for an output of a wrong shape, which cutting and joining could hide."""
    longer = next(axis for axis in sizes if axis != QUERY_LEN)
    for name, array in outputs.items():
        named = axes.get(name, array.shape)
        expected = [
            sizes.get(str(axis), size) for axis, size in zip(named, array.shape, strict=False)
        ]
        if len(named) != array.ndim or list(array.shape) != expected:
            raise ValueError(
                f"{name} is {list(array.shape)} where its axes are {list(named)}, after "
                f"{cache_length} tokens, with {sizes[QUERY_LEN]} new ones and a {longer} of "
                f"{sizes[longer]}"
            )


def _resize_keys(
    array: np.ndarray, axes: Sequence[str | int], capacity: int, total: int
) -> np.ndarray:
    """Resize the axes of keys from `capacity` to `total` keys; learned keys stay at the end."""
    for at, axis in enumerate(axes):
        if isinstance(axis, str) and axis not in (BATCH, QUERY_LEN):
            keys, learned = np.split(array, [capacity], axis=at)
            array = np.concatenate([_fit(keys, at, total), learned], axis=at)
    return array


def _fit(array: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Cut an axis of an array to a size, or pad it with zeros."""
    shape = list(array.shape)
    shape[axis] = size
    fitted = np.zeros(shape, array.dtype)
    common = tuple(slice(min(sizes)) for sizes in zip(array.shape, shape, strict=True))
    fitted[common] = array[common]
    return fitted
