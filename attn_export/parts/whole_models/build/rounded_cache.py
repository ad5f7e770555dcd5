"""The rounding of keys and values to float16, in which a model's caches hold them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from attn_export.cases.draw import seed_of
from attn_export.errors import UsageError
from attn_export.measures import EPS_FLOAT32

FLOAT16 = "float16"
"""The `kv_dtype` of a model whose caches are narrower than it."""

_SAFETY = 4.0
"""The factor of a margin on the error of a run."""


def rounded_cache(kv_dtype: str) -> RoundedCache | None:
    """Return the rounding to a type; None if caches have the type of the model."""
    if kv_dtype not in ("none", FLOAT16):
        raise UsageError(f"kv_dtype of a whole model is {FLOAT16} or none; got {kv_dtype!r}")
    return RoundedCache() if kv_dtype == FLOAT16 else None


class RoundedCache:
    """Rounds new keys and values of a run of a float32 model, or of its float64 copy, to float16.

    Floating-point error decides values near a tie, and what later layers round depends on them. So
    in runs with random rounding these values become either neighbour.

    Attributes:
        is_used: Whether they are rounded at all.
    """

    def __init__(self) -> None:
        self._exact: dict[int, tuple[Tensor, ...]] = {}
        self._random: np.random.Generator | None = None
        self._runs, self.is_used = range(1), True

    def __call__(self, layer: int, *pair: Tensor) -> tuple[Tensor, ...]:
        """Return keys and values `[B, Hkv, L, D]`: float16, or such numbers in float64."""
        if not self.is_used:
            return pair
        # NumPy's operations are not those of the model, which modes of torch change.
        values = [x.detach().numpy() for x in pair]
        with np.errstate(over="ignore"):
            if self._random is None:
                self._exact[layer] = pair
                stored = [x.astype(np.float16) for x in values]
            else:
                exact = (x.numpy() for x in self._exact[layer])
                stored = [self._drawn(*each) for each in zip(values, exact, strict=True)]
        wide = np.float64 if pair[0].dtype == torch.float64 else np.float16
        return tuple(torch.from_numpy(x.astype(wide)) for x in stored)

    @contextlib.contextmanager
    def drawing(self, runs: range) -> Iterator[None]:
        """Let the values near a tie become either neighbour, in runs stacked along the batch axis.

        In run 0 all of them become the farther one.
        """
        self._random, self._runs = np.random.default_rng(seed_of("cache", *runs)), runs
        try:
            yield
        finally:
            self._random = None

    def _drawn(self, values: np.ndarray, exact: np.ndarray) -> np.ndarray:
        """Return float16 numbers of a run; those of the run without random rounding are known."""
        assert self._random is not None
        exact = np.concatenate([exact] * len(self._runs))
        nearest = values.astype(np.float16)
        errors = np.abs(values - exact).max(axis=(1, 3), keepdims=True)
        margin = np.minimum(
            _SAFETY * errors + EPS_FLOAT32 * np.abs(values), np.spacing(np.abs(nearest)) / 2.0
        )
        below, above = ((values + x).astype(np.float16) for x in (-margin, margin))
        crosses = self._random.random(values.shape) < 0.5
        if 0 in self._runs:
            crosses[: len(crosses) // len(self._runs)] = True
        found: np.ndarray = np.where(crosses, np.where(below != nearest, below, above), nearest)
        return found
