"""Inputs of probes: the semantic cases of a build if there is one, else similar random ones."""

from __future__ import annotations

import functools

import numpy as np

from attn_export.diagnose.probe_graphs import HKV, D, H
from attn_export.parity.contents import FUTURE, VALUES
from attn_export.parity.draw import generator
from attn_export.parity.fixed_cases import content_case
from attn_export.parity.mask_contents import LOWEST, MASKS
from attn_export.spec import AttentionSpec, Input
from attn_export.tensorfile import ArrayDict

B, L = 2, 3


def case_of_a_build(name: str, *, mask: str = "none", past: bool = False) -> ArrayDict:
    """Return the inputs of a build's case, as inputs of its `Attention` node.

    The projections of a layer's tokens are drawn as the tokens are.

    Args:
        name: Contents of `cases.contents`.
        mask: As in a spec.
        past: Whether there is one, and the layer is causal.
    """
    given = _cases(mask, past)[name]
    heads = {name: _heads_apart(given[name], count) for name, count in
             {"query": H, "key": HKV, "value": HKV}.items()}  # fmt: skip
    return {**heads, **{name: array for name, array in given.items() if name not in heads}}


@functools.cache
def _cases(mask: str, past: bool) -> dict[str, ArrayDict]:
    spec = AttentionSpec(
        embed_dim=H * D, num_heads=H, num_kv_heads=HKV, attn_mask=mask, causal=past,
        cache="append" if past else "none",
    )  # fmt: skip
    layer = spec.inputs()
    new = Input(("batch", "query_len", HKV * D))
    inputs = {"query": layer["query"], "key": new, "value": new} | layer
    contents = [*VALUES, FUTURE, *(MASKS if spec.mask else ())]
    contents += [LOWEST] if spec.mask and spec.mask.dtype == "float" else []
    cases = [content_case(content, inputs, spec, spec.sums) for content in contents]
    return {case.name: dict(case.inputs) for case in cases}


def _heads_apart(x: np.ndarray, heads: int) -> np.ndarray:
    """Reshape `[B, L, heads · D]` to `[B, heads, L, D]`."""
    split = x.reshape(*x.shape[:2], heads, -1)
    return np.ascontiguousarray(split.transpose(0, 2, 1, 3))


def drawn(
    name: str, *, batch: int = B, queries: int = L, keys: int = L, past: int = 0
) -> ArrayDict:
    """Draw normal queries, keys and values; with a past of `past` keys if that is not 0.

    Args:
        name: Of the probe; the numbers depend on it.
        batch: B.
        queries: L.
        keys: New ones.
        past: P.
    """
    rng = generator("fingerprint", name)

    def normal(heads: int, length: int) -> np.ndarray:
        return rng.standard_normal((batch, heads, length, D)).astype(np.float32)

    found = {"query": normal(H, queries), "key": normal(HKV, keys), "value": normal(HKV, keys)}
    if past:
        found |= {"past_key": normal(HKV, past), "past_value": normal(HKV, past)}
    return found
