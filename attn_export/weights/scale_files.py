"""Scales of a cache of integers as a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_export.errors import WeightsError
from attn_export.spec.fields import HUGE
from attn_export.weights.array_files import read_arrays
from attn_export.weights.source import bracketed

FILE = "kv_scales.npz"
"""The name of the file in a bundle."""

PARTS = ("k_scale", "v_scale")

MOST = 64 * 2**20
"""The largest size of such a file in bytes: a scale for each of 2^20 channels takes 8 MiB."""


def read_scales(path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the scales that a file holds, in the shapes of a module's own.

    Args:
        path: A .npz or .safetensors file with `k_scale` and `v_scale`, float32: scalars or `[1]`,
            or `[Hkv, D]` or `[Hkv, 1, D]` by channel.
        like: The module's own, by name.

    Raises:
        WeightsError: If it is no such file, or a scale is not positive and finite.
    """
    found = read_arrays(path, PARTS, MOST)
    return {name: _fitting(path, name, found, like[name]) for name in PARTS}


def _fitting(path: Path, name: str, found: Mapping[str, Tensor], like: Tensor) -> Tensor:
    if name not in found:
        raise WeightsError(f"{path} has no {name}; it has to hold {' and '.join(PARTS)}")
    scale = found[name]
    if scale.dtype != torch.float32:
        dtype = str(scale.dtype).removeprefix("torch.")
        raise WeightsError(f"{path}: {name} is {dtype}; store scales as float32")
    shapes = [tuple(like.shape), (like.shape[0], like.shape[-1]) if like.dim() else (1,)]
    if tuple(scale.shape) not in shapes:
        wanted = " or ".join(map(bracketed, shapes))
        kind = "per-channel" if like.dim() else "per-tensor"
        raise WeightsError(
            f"{path}: {name} has the shape {bracketed(scale.shape)}; with kv_scale = {kind!r} it "
            f"has to be {wanted}"
        )
    wrong = scale[~((scale >= 1 / HUGE) & (scale <= HUGE))]
    if wrong.numel():
        raise WeightsError(
            f"{path}: {name} holds {wrong[0].item():g}; a scale is a number from {1 / HUGE:g} to "
            f"{HUGE:g}"
        )
    return scale.reshape(like.shape)


def write_scales(folder: Path, scales: Mapping[str, Tensor]) -> None:
    """Write the scales of a module as a file that `read_scales` reads.

    Args:
        folder: An existing folder.
        scales: `k_scale` and `v_scale`.
    """
    arrays: dict[str, Any] = {name: scales[name].numpy() for name in PARTS}
    np.savez(folder / FILE, **arrays)
