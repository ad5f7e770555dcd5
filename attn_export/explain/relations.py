"""Relations of a wrong value to the right one, in words: "is 0.5 times what it should be"."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import ml_dtypes
import numpy as np

from attn_export.tensorfile import Array

_WrongAndRight = Sequence[tuple[Array, Array]]
"""A wrong and a right array of the same shape, in several cases."""

CLOSE = 1e-6
"""The largest difference of equal arrays, as a share of the largest finite element."""

MOST_ELEMENTS = 10**6
"""The largest number of elements of which relations along an axis are tried."""


def relation(pairs: _WrongAndRight, units: Sequence[str]) -> str:
    """Describe how wrong arrays differ from the right ones, in every case.

    Returns:
        The relation, of the wrong part along an axis if only one is wrong; "" if none is known.
    """
    pairs = [(w.reshape(r.shape) if w.size == r.size == 1 else w, r) for w, r in pairs]
    wrong = [(w, r) for w, r in pairs if r.size and not _equal(w, r)]
    if not wrong or any(w.ndim != r.ndim for w, r in wrong):
        return ""
    text = _known(pairs, units) or _known(wrong, units)
    if text or any(w.shape != r.shape for w, r in wrong):
        return text
    for axis, unit in enumerate(units):
        where, part = wrong_part(wrong, axis, unit)
        text = _known(part, units) if where else ""
        if text:
            return f"{text} in {where} alone"
    return ""


def _known(pairs: _WrongAndRight, units: Sequence[str]) -> str:
    """Return the first relation that holds in all cases."""
    shown = [(w, r) for w, r in pairs if w.size and r.size]
    small = sum(r.size for _, r in shown) <= MOST_ELEMENTS
    relations = list(_RELATIONS)
    if any(w.shape != r.shape for w, r in shown):
        relations = [_transposed]
    elif small:
        of_an_axis = functools.partial(_of_an_axis, units)
        relations = [
            *([_keys_relation] if units[-2:] == ("query", "key") else []),
            *relations,
            of_an_axis,
        ]
    with np.errstate(all="ignore"):
        return next(filter(None, (describe(shown) for describe in relations)), "")


def _equal(x: Array, y: Array) -> bool:
    if x.shape != y.shape:
        return False
    if x.dtype.kind == "b" or y.dtype.kind == "b":
        return bool((x == y).all())
    finite = np.isfinite(y)
    largest = float(np.abs(y[finite]).max(initial=0.0)) or 1.0
    with np.errstate(invalid="ignore"):  # Inf - Inf
        close = np.where(finite, np.abs(x - y) <= CLOSE * largest, x == y)
    return bool((close | (np.isnan(x) & np.isnan(y))).all())


def _all_equal(pairs: _WrongAndRight, change: Callable[[Array], Array]) -> bool:
    return all(_equal(w, change(r)) for w, r in pairs)


def differences(w: Array, r: Array) -> Array:
    """Return where two arrays differ; NaN equals NaN.

    `r`: An array of its shape.
    """
    return np.asarray((w != r) & ~((w != w) & (r != r)))


def wrong_part(pairs: _WrongAndRight, axis: int, unit: str) -> tuple[str, _WrongAndRight]:
    """Return the name of the indices along an axis that alone are wrong, and the arrays there."""
    found = []
    pairs = [(w, r) for w, r in pairs if differences(w, r).any()]
    for w, r in pairs:
        others = tuple(a for a in range(w.ndim) if a != axis)
        differs = differences(w, r)
        found.append((np.flatnonzero(differs.any(axis=others)), w.shape[axis]))
    for name, select in _selections(unit, found):
        if all(np.array_equal(i, np.arange(n)[select(np.arange(n), n)]) for i, n in found):
            both = zip(pairs, found, strict=True)
            return name, [(w.take(i, axis), r.take(i, axis)) for (w, r), (i, _) in both]
    return "", []


def _selections(
    unit: str, found: Sequence[tuple[Array, int]]
) -> Iterator[tuple[str, Callable[[Array, int], Array]]]:
    """Yield parts of an axis that may be the wrong indices, `found` with the size of each case."""
    if all(len(indices) == size for indices, size in found):
        return
    first = min(int(indices[0]) for indices, _ in found)
    last = max(int(indices[-1]) for indices, _ in found)
    if first == last:
        yield f"{unit} {first}", lambda i, _: i == first
    yield f"the last {unit}", lambda i, n: i == n - 1
    if first == 0:
        yield f"{unit}s 0 to {last}", lambda i, _: i <= last
    yield f"{unit}s from {first} on", lambda i, _: i >= first
    yield f"{unit}s {first} to {last}", lambda i, _: (i >= first) & (i <= last)


# -- relations of all elements ------------------------------------------------------------------


def _constant(pairs: _WrongAndRight) -> str:
    value = pairs[0][0].flat[0]
    right = pairs[0][1].flat[0]
    if not all((w == value).all() for w, _ in pairs):
        return ""
    is_right_constant = all((r == right).all() for _, r in pairs)
    where = f"where it should be {_number(right)}" if is_right_constant else "everywhere"
    return f"is {_number(value)} {where}"


def _negated(pairs: _WrongAndRight) -> str:
    if pairs[0][0].dtype.kind == "b":
        return "is inverted" if _all_equal(pairs, np.logical_not) else ""
    return "is negated" if _all_equal(pairs, lambda x: np.where(np.isfinite(x), -x, x)) else ""


def _factor(pairs: _WrongAndRight) -> str:
    w, r = _flat(pairs)
    used = np.isfinite(w) & np.isfinite(r) & (r != 0)
    if not used.any():
        return ""
    factor = float(np.median(w[used] / r[used]))
    holds = factor > 0 and _all_equal(pairs, lambda x: x * factor)
    return f"is {_number(factor)} times what it should be" if holds else ""


def _offset(pairs: _WrongAndRight) -> str:
    w, r = _flat(pairs)
    used = np.isfinite(w) & np.isfinite(r)
    offset = float(np.median((w - r)[used])) if used.any() else 0.0
    if not offset or not _all_equal(pairs, lambda x: x + offset):
        return ""
    return f"is {_number(abs(offset))} too {'high' if offset > 0 else 'low'}"


def _replaced(pairs: _WrongAndRight) -> str:
    """Describe one number in place of another."""
    if pairs[0][0].dtype.kind == "b":
        return ""
    w, r = _flat(pairs)
    differs = differences(w, r)
    wrong, right = w[differs], r[differs]
    if not wrong.size or not (wrong == wrong[0]).all():
        return ""
    if (right == right[0]).all():
        return f"is {_number(wrong[0])} where it should be {_number(right[0])}"
    return ""


def _clipped(pairs: _WrongAndRight) -> str:
    w, r = _flat(pairs)
    least, most = float(w.min()), float(w.max())
    limits = [f"at least {_number(least)}"] if least > r.min() else []
    limits += [f"at most {_number(most)}"] if most < r.max() else []
    if not limits or not _all_equal(pairs, lambda x: np.clip(x, least, most)):
        return ""
    return f"is clipped to {' and '.join(limits)}"


def _rounded(pairs: _WrongAndRight) -> str:
    for name, dtype in (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)):
        if all((w == r.astype(np.float32).astype(dtype)).all() for w, r in pairs):
            return f"is rounded to {name}"
    return "is rounded to integers" if all((w == np.rint(r)).all() for w, r in pairs) else ""


def _transposed(pairs: _WrongAndRight) -> str:
    if pairs[0][1].ndim < 2:
        return ""
    if _all_equal(pairs, lambda x: np.swapaxes(x, -1, -2)):
        return "is transposed"
    for a in range(pairs[0][1].ndim - 1):
        for b in range(a + 1, pairs[0][1].ndim):
            if _all_equal(pairs, functools.partial(_reshaped, a, b)):
                return f"has the elements of axes {a} and {b} in the wrong order, as by a reshape"
    return ""


def _reshaped(a: int, b: int, x: Array) -> Array:
    """Return the elements in the order of a transpose of two axes, in the shape without it."""
    return np.swapaxes(x, a, b).reshape(x.shape)


def _powers(pairs: _WrongAndRight) -> str:
    """Describe the base of rotary frequencies, base^(-k / n)."""
    if any(r.ndim != 1 or len(r) < 2 or w[0] != 1 or not 0 < w[1] < 1 for w, r in pairs):
        return ""
    n = len(pairs[0][1])
    bases = [float(x[1]) ** -n for x in pairs[0]]
    are_powers = all(
        _equal(x, base ** (-np.arange(n) / n)) for x, base in zip(pairs[0], bases, strict=True)
    )
    return "has the base {:.6g} in place of {:.6g}".format(*bases) if are_powers else ""


_RELATIONS: Sequence[Callable[[_WrongAndRight], str]] = (
    _constant, _negated, _factor, _offset, _replaced, _clipped, _rounded, _transposed, _powers,
)  # fmt: skip
"""Relations of all elements; the first that holds is named."""


def _flat(pairs: _WrongAndRight) -> tuple[Array, Array]:
    w, r = (np.concatenate([np.ravel(pair[i]) for pair in pairs]) for i in (0, 1))
    return w.astype(np.float64), r.astype(np.float64)


def _number(x: float | bool) -> str:
    return str(x) if isinstance(x, (bool, np.bool_)) else f"{x + 0.0:.4g}"  # no -0


# -- relations along an axis --------------------------------------------------------------------


def _of_an_axis(units: Sequence[str], pairs: _WrongAndRight) -> str:
    for axis, unit in enumerate(units):
        if max(r.shape[axis] for _, r in pairs) < 2:
            continue
        for text, indices in _index_changes(unit):
            if _all_equal(pairs, functools.partial(_take, indices, axis)):
                return text
        order = _order(pairs, axis, unit)
        if order:
            return order
    return ""


def _take(indices: Callable[[int], Array], axis: int, x: Array) -> Array:
    return x.take(indices(x.shape[axis]), axis)


def _index_changes(unit: str) -> Iterator[tuple[str, Callable[[int], Array]]]:
    """Yield texts, and functions from the length of an axis to the indices that are read."""
    yield f"is that of the first {unit} for every {unit}", lambda n: np.zeros(n, int)
    yield f"is that of the last {unit} for every {unit}", lambda n: np.full(n, n - 1)
    yield f"has its {unit}s in reverse", lambda n: np.arange(n)[::-1]
    for by in (1, -1, 2, -2):
        text = f"has {unit} i {'+' if by > 0 else '-'} {abs(by)} in place of {unit} i"
        yield text, functools.partial(_shifted, by)
        yield text, functools.partial(_shifted_up_to_the_end, by)
    yield f"has its {unit}s in two halves that are swapped", lambda n: np.roll(np.arange(n), n // 2)
    yield (
        f"has its even {unit}s before its odd ones",
        lambda n: np.concatenate([np.arange(0, n, 2), np.arange(1, n, 2)]),
    )
    yield (
        f"has its {unit}s of two halves interleaved",
        lambda n: np.arange(n).reshape(2, -1).T.ravel() if n % 2 == 0 else np.arange(n),
    )


def _shifted(by: int, n: int) -> Array:
    return (np.arange(n) + by) % n


def _shifted_up_to_the_end(by: int, n: int) -> Array:
    return np.clip(np.arange(n) + by, 0, n - 1)


def _order(pairs: _WrongAndRight, axis: int, unit: str) -> str:
    """Describe the order in which a wrong array has the parts of the right one."""
    sizes = {r.shape[axis] for _, r in pairs}
    w, r = max(pairs, key=lambda pair: pair[1].size)
    n = r.shape[axis]
    if len(sizes) > 1 or n * r.size > MOST_ELEMENTS:
        return ""
    w, r = (np.moveaxis(x, axis, 0).reshape(n, -1) for x in (w, r))
    same = (w[:, None] == r) if w.dtype.kind == "b" else np.isclose(w[:, None], r, CLOSE, 0.0)
    order = same.all(axis=-1).argmax(axis=-1)
    if not _all_equal(pairs, lambda x: x.take(order, axis)):
        return ""
    moved = np.flatnonzero(order != np.arange(n))
    if len(moved) == 2 and (order[moved] == moved[::-1]).all():
        return f"has {unit}s {moved[0]} and {moved[1]} swapped"
    shown = ", ".join(map(str, order[:16])) + (", …" if n > 16 else "")
    return f"has {unit}s {shown} in place of 0 to {n - 1}"


# -- keys of masks --------------------------------------------------------------------------------

_KEYS: Sequence[tuple[str, Callable[[Array, Array, int, int], Array]]] = (
    ("key 0", lambda _, j, __, ___: j == 0),
    ("the last key", lambda _, j, __, S: j == S - 1),
    ("each query's own key", lambda i, j, P, _: j == i + P),
    ("the key after each query's own", lambda i, j, P, _: j == i + P + 1),
    ("the keys after each query's own", lambda i, j, P, _: j > i + P),
    ("the keys before each query's own", lambda i, j, P, _: j < i + P),
    ("the keys of the past", lambda _, j, P, __: j < P),
    ("the new keys", lambda _, j, P, __: j >= P),
)
"""Keys that a mask may show or hide wrongly: functions of query, key, P and S. The first two do
not need to know the queries."""


def _keys_relation(pairs: Sequence[tuple[Array, Array]]) -> str:
    """Describe the keys that a mask shows or hides wrongly.

    `pairs`: Wrong and right masks `[..., L, S]`, bool or added, in several cases.

    Returns:
        A clause; "" if no such keys are known.
    """
    if pairs[0][0].dtype.kind != "b":
        if any(((w != r) & np.isfinite(w) & np.isfinite(r)).any() for w, r in pairs):
            return ""
        pairs = [(~np.isneginf(w), ~np.isneginf(r)) for w, r in pairs]
    of_queries = any(r.shape[-2] > 1 for _, r in pairs)
    for name, keys in _KEYS if of_queries else _KEYS[:2]:
        chosen = [_chosen(keys, *r.shape[-2:]) for _, r in pairs]
        if all((w == (r | k)).all() for (w, r), k in zip(pairs, chosen, strict=True)):
            return f"shows {name}, whatever it should hide"
        if all((w == (r & ~k)).all() for (w, r), k in zip(pairs, chosen, strict=True)):
            return f"hides {name}"
    return _window(pairs) if of_queries else ""


def _window(pairs: Sequence[tuple[Array, Array]]) -> str:
    """Describe the limit on how far back a mask shows keys that the right one shows."""
    distances = [_chosen(lambda i, j, P, _: i + P - j, *r.shape[-2:]) for _, r in pairs]
    both = list(zip(pairs, distances, strict=True))
    most = max(int(np.where(w, d, -1).max(initial=-1)) for (w, _), d in both)
    is_limited = most >= 0 and all((w == (r & (d <= most))).all() for (w, r), d in both)
    return f"hides keys more than {most} before each query's own" if is_limited else ""


def _chosen(of: Callable[[Array, Array, int, int], Array], L: int, S: int) -> Array:
    return of(np.arange(L)[:, None], np.arange(S), S - L, S)
