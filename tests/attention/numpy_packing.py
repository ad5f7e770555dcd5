"""Reference for a packed projection of queries, keys and values, in plain numpy.

Legend: see `numpy_attention`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from attn_export.spec import AttentionSpec

Arrays = dict[str, np.ndarray]
PACKED = "qkv_proj."


def widths(spec: AttentionSpec) -> dict[str, int]:
    """Return the number of rows of queries, keys and values."""
    H, Hkv, D, Dv = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim
    return {"q": H * D, "k": Hkv * D, "v": Hkv * Dv}


def rows_in_order(spec: AttentionSpec, order: str) -> Arrays:
    """Return the rows of each side in a packed projection with an order such as "qkv"."""
    counts = widths(spec)
    ends = np.cumsum([counts[side] for side in order])
    return {side: np.arange(end - counts[side], end) for side, end in zip(order, ends, strict=True)}


def rows_by_kv_head(spec: AttentionSpec) -> Arrays:
    """Return the rows if each K/V head follows its query heads: q, q, k, v, then the next."""
    each = {side: count // spec.num_kv_heads for side, count in widths(spec).items()}
    grouped = np.arange(sum(widths(spec).values())).reshape(spec.num_kv_heads, -1)
    parts = np.split(grouped, np.cumsum([each["q"], each["k"]]), axis=1)
    return {side: part.ravel() for side, part in zip("qkv", parts, strict=True)}


def apart(
    parameters: Mapping[str, np.ndarray], rows: Mapping[str, Mapping[str, np.ndarray]]
) -> Arrays:
    """Return the parameters under the names of separate projections."""
    found = {name: array for name, array in parameters.items() if not name.startswith(PACKED)}
    for kind, of in rows.items():
        packed = parameters.get(PACKED + kind)
        if packed is not None:
            found |= {f"{side}_proj.{kind}": packed[of[side]] for side in "qkv"}
    return found
