"""Keys that a mask shows or hides wrongly, in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from attn_export.tensorfile import Array

KEYS: Sequence[tuple[str, Callable[[Array, Array, int, int], Array]]] = (
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


def keys_relation(pairs: Sequence[tuple[Array, Array]]) -> str:
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
    for name, keys in KEYS if of_queries else KEYS[:2]:
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
